"""What is said where an adapter's tokenizer or template cannot do what was asked of it: the file, and what to do."""

from inference_service.adapter_text.messages import Compile, Continue, Decode, Encode, Load, Render, Request
from shared.adapter_format.reasons import file_invalid
from shared.errors import AdapterInvalid

_TOKENIZER = "register the adapter with its tokenizer as save_pretrained writes it, or without one of its own"
_TEMPLATE = "register the adapter with a simpler chat template, or without; prompts of text or token ids need none"
# By step: what was to be done, and what to do where it cannot be.
_STEPS: dict[type[Request], tuple[str, str]] = {
    Load: ("be read", _TOKENIZER),
    Compile: ("be compiled", _TEMPLATE),
    Render: ("be rendered with these messages", _TEMPLATE),
    Encode: ("make tokens of this text", f"send token ids, or {_TOKENIZER}"),
    Decode: ("make text of these tokens", _TOKENIZER),
    Continue: ("make text of the answer's tokens", _TOKENIZER),
}


def took_too_much(request: Request, file: str) -> AdapterInvalid:
    """The worker ended over the request, which is for `file`."""
    step, advice = _STEPS[type(request)]
    return file_invalid(file, f"takes too much time or memory to {step}", advice)


def failed(request: Request, file: str, problem: str) -> AdapterInvalid:
    """A library failed in `file` over the request. `problem`: its words."""
    step, advice = _STEPS[type(request)]
    return file_invalid(file, f"cannot {step}: {problem}", advice)

"""Prompts to token ids."""

from collections.abc import Sequence

from inference_service.texts import RequestText, RequestTokenizer
from loraplex.inference.v1 import inference_pb2 as pb
from shared.errors import InvalidArgument


def tokenizer_of(text: RequestText, field: str) -> RequestTokenizer:
    """The tokenizer that a request uses.

    Raises:
        InvalidArgument: there is none; names `field`.
    """
    if text.tokenizer is None:
        raise InvalidArgument.of(field, "this model has no tokenizer: send token_ids")
    return text.tokenizer


async def encode_chat(
    messages: Sequence[pb.ChatMessage], text: RequestText, *, max_bytes: int, add_special_tokens: bool = False
) -> list[int]:
    """Token ids of a conversation, of which the template makes at most `max_bytes`.

    Raises:
        InvalidArgument: the template refuses it; says if it is an adapter's own, for then the fault may be there.
    """
    tokenizer = tokenizer_of(text, "prompt.chat")
    if text.template is None:
        raise InvalidArgument.of("prompt.chat", "this model has no chat template: send text")
    try:
        prompt = await text.template.prompt([{"role": m.role, "content": m.content} for m in messages], max_bytes)
    except InvalidArgument as error:
        if not text.template_of:
            raise
        raise InvalidArgument.of("prompt.chat", f"{error.violations[0].description}; {_own_template(text)}") from error
    return await tokenizer.encode(prompt, add_special_tokens)


async def prompt_ids(request: pb.GenerateRequest, text: RequestText, max_bytes: int) -> Sequence[int]:
    """Token ids of a checked request's prompt.

    Raises:
        InvalidArgument: as `encode_chat`, or what an adapter brings makes no token of it.
    """
    match request.WhichOneof("prompt"):
        case "text":
            ids = await tokenizer_of(text, "prompt.text").encode(request.text)
            if not ids and text.tokenizer_of:
                whose = f"the tokenizer is that of {text.tokenizer_of}, so look there as well"
                raise InvalidArgument.of("prompt.text", f"has no tokens; {whose}")
            return ids
        case "chat":
            ids = await encode_chat(request.chat.messages, text, max_bytes=max_bytes)
            if not ids and text.template_of:
                raise InvalidArgument.of("prompt.chat", f"has no tokens; {_own_template(text)}")
            return ids
        case _:
            return request.token_ids.ids


def _own_template(text: RequestText) -> str:
    return f"the chat template is that of {text.template_of}, so look there as well"

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
    """Token ids of a conversation, of which the template makes at most `max_bytes`."""
    tokenizer = tokenizer_of(text, "prompt.chat")
    if text.template is None:
        raise InvalidArgument.of("prompt.chat", "this model has no chat template: send text")
    prompt = await text.template.prompt([{"role": m.role, "content": m.content} for m in messages], max_bytes)
    return await tokenizer.encode(prompt, add_special_tokens)


async def prompt_ids(request: pb.GenerateRequest, text: RequestText, max_bytes: int) -> Sequence[int]:
    """Token ids of a checked request's prompt."""
    match request.WhichOneof("prompt"):
        case "text":
            return await tokenizer_of(text, "prompt.text").encode(request.text)
        case "chat":
            return await encode_chat(request.chat.messages, text, max_bytes=max_bytes)
        case _:
            return request.token_ids.ids

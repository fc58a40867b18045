"""Prompts to token ids."""

from collections.abc import Sequence

from inference_service.chat_template import ChatTemplate
from inference_service.request_checks import too_long
from inference_service.served_model import ServedModel
from inference_service.tokenizer import Tokenizer
from inference_service.types import PreparedAdapter
from loraplex.inference.v1 import inference_pb2 as pb
from shared.errors import InvalidArgument

# A longer chat is rendered on another thread.
_INLINE_TURNS = 16
_INLINE_CHARACTERS = 2000


def tokenizer_of(model: ServedModel, adapter: PreparedAdapter | None, field: str) -> Tokenizer:
    """The tokenizer that a request uses. Adapters do not bring their own yet.

    Raises:
        InvalidArgument: there is none; names `field`.
    """
    if model.tokenizer is None:
        raise InvalidArgument.of(field, "this model has no tokenizer: send token_ids")
    return model.tokenizer


def chat_template_of(model: ServedModel, adapter: PreparedAdapter | None, field: str) -> ChatTemplate:
    """Likewise for the chat template."""
    if model.chat_template is None:
        raise InvalidArgument.of(field, "this model has no chat template: send text")
    return model.chat_template


async def encode_text(
    text: str, model: ServedModel, adapter: PreparedAdapter | None, *, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a text prompt."""
    return await tokenizer_of(model, adapter, "prompt.text").encode(text, add_special_tokens)


async def encode_chat(
    messages: Sequence[pb.ChatMessage],
    model: ServedModel,
    adapter: PreparedAdapter | None,
    *,
    max_bytes: int,
    add_special_tokens: bool = False,
) -> list[int]:
    """Token ids of a conversation, of which the template makes at most `max_bytes`, its own special tokens included."""
    tokenizer = tokenizer_of(model, adapter, "prompt.chat")
    template = chat_template_of(model, adapter, "prompt.chat")
    turns = [{"role": m.role, "content": m.content} for m in messages]
    is_short = len(turns) <= _INLINE_TURNS and sum(len(turn["content"]) for turn in turns) <= _INLINE_CHARACTERS
    text = template.render(turns) if is_short else await tokenizer.in_thread(template.render, turns)
    check_text_size(len(text.encode()), "prompt.chat", max_bytes)
    return await tokenizer.encode(text, add_special_tokens)


def check_text_size(nbytes: int, field: str, max_bytes: int) -> None:
    """Before tokenizing: a text that cannot have few enough tokens. Raises InvalidArgument."""
    if nbytes > max_bytes:
        raise InvalidArgument.of(field, too_long(nbytes, max_bytes))


async def prompt_ids(
    request: pb.GenerateRequest, model: ServedModel, adapter: PreparedAdapter | None, max_bytes: int
) -> Sequence[int]:
    """Token ids of a checked request's prompt."""
    match request.WhichOneof("prompt"):
        case "text":
            return await encode_text(request.text, model, adapter)
        case "chat":
            return await encode_chat(request.chat.messages, model, adapter, max_bytes=max_bytes)
        case _:
            return request.token_ids.ids

"""Prompts to token ids."""

from collections.abc import Sequence

from inference_service.chat_template import ChatTemplate
from inference_service.served_model import ServedModel
from inference_service.tokenizer import Tokenizer
from inference_service.types import PreparedAdapter
from loraplex.inference.v1 import inference_pb2 as pb
from shared.errors import InvalidArgument


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
    add_special_tokens: bool = False,
) -> list[int]:
    """Token ids of a conversation. The template writes its own special tokens."""
    tokenizer = tokenizer_of(model, adapter, "prompt.chat")
    template = chat_template_of(model, adapter, "prompt.chat")
    text = template.render([{"role": m.role, "content": m.content} for m in messages])
    return await tokenizer.encode(text, add_special_tokens)


async def prompt_ids(request: pb.GenerateRequest, model: ServedModel, adapter: PreparedAdapter | None) -> Sequence[int]:
    """Token ids of a checked request's prompt."""
    match request.WhichOneof("prompt"):
        case "text":
            return await encode_text(request.text, model, adapter)
        case "chat":
            return await encode_chat(request.chat.messages, model, adapter)
        case _:
            return request.token_ids.ids

"""Chat templates, rendered as transformers renders them (so that models see the prompts they were trained on)."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jinja2

from shared.adapter_format.texts import CHAT_TEMPLATE, SPECIAL_TOKENS, TOKENIZER_CONFIG
from shared.chat_template import NOT_A_TEMPLATE, environment, not_a_template, template_source
from shared.errors import InvalidArgument
from shared.model_folder import read_files

FIELD = "prompt.chat"

# A longer chat is rendered on another thread.
_INLINE_TURNS = 16
_INLINE_CHARACTERS = 2000
_THREADS = 2

# What a template may raise of itself.
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class ChatTemplate:
    """A compiled template and the special tokens it may name (`bos_token`, `eos_token` …)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = environment().from_string(source)
        except NOT_A_TEMPLATE as error:
            raise InvalidArgument.of("chat_template", not_a_template(error)) from error
        self._special_tokens = dict(special_tokens)
        self._threads = ThreadPoolExecutor(_THREADS, "chat-template")

    async def prompt(self, messages: Sequence[Mapping[str, str]], max_bytes: int) -> str:
        """As `render`, long chats on another thread; and at most `max_bytes`, its own special tokens included.

        Raises:
            InvalidArgument: as `render`, or it is longer.
        """
        if len(messages) <= _INLINE_TURNS and sum(len(m["content"]) for m in messages) <= _INLINE_CHARACTERS:
            text = self.render(messages)
        else:
            text = await asyncio.get_running_loop().run_in_executor(self._threads, self.render, messages)
        check_prompt_size(text, max_bytes)
        return text

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for the assistant's next turn. Encode it without adding special tokens: it has its own.

        Raises:
            InvalidArgument: the template refuses these messages (field `prompt.chat`).
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render(messages=[dict(m) for m in messages], **variables)
        except _REFUSALS as error:
            raise InvalidArgument.of(FIELD, f"the chat template refuses it: {error!s:.300}") from error


def check_prompt_size(text: str, max_bytes: int) -> None:
    """Refuse a rendered prompt that is too long to be tokenized. Raises InvalidArgument."""
    if (nbytes := len(text.encode())) > max_bytes:
        problem = f"has {nbytes} bytes; no text of more than {max_bytes} fits into this replica's context"
        raise InvalidArgument.of(FIELD, problem)


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a model folder, or None.

    Raises:
        InvalidArgument: a file is not what it should be.
    """
    source = template_source(read_files(folder, (TOKENIZER_CONFIG, SPECIAL_TOKENS, CHAT_TEMPLATE)))
    return None if source is None else ChatTemplate(source.text, source.special_tokens)

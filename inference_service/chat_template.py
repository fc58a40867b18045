"""Chat templates, rendered as transformers renders them (so that models see the prompts they were trained on)."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.adapter_format.texts import CHAT_TEMPLATE, SPECIAL_TOKENS, TOKENIZER_CONFIG
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


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # local time, as transformers


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML; models were trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template and the special tokens it may name (`bos_token`, `eos_token` …)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidArgument.of("chat_template", f"is not a template: {error!s:.200}") from error
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


class TemplateSource(NamedTuple):
    """A template as its files hold it, and the special tokens beside it."""

    text: str
    special_tokens: Mapping[str, str]


def template_source(files: Mapping[str, bytes]) -> TemplateSource | None:
    """The template in files, by name: chat_template.jinja, else `chat_template` of tokenizer_config.json, else None.

    Raises:
        InvalidArgument: a file is not what it should be; names it.
    """
    config = _json_object(TOKENIZER_CONFIG, files)
    tokens = special_tokens(files)
    text = _text(CHAT_TEMPLATE, files[CHAT_TEMPLATE]) if CHAT_TEMPLATE in files else None
    if text is None:
        text = _default_template(config.get("chat_template"))
    return None if text is None else TemplateSource(text, tokens)


def special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    """Every `…_token` of tokenizer_config.json, written as a string or as `{"content": …}`.

    Those of special_tokens_map.json come before them, as in transformers, where the config is of the time when it did
    not list the added tokens itself.

    Raises:
        InvalidArgument: a file is not what it should be; names it.
    """
    fields = _json_object(TOKENIZER_CONFIG, files)
    if "added_tokens_decoder" not in fields:
        fields |= _json_object(SPECIAL_TOKENS, files)
    found = {}
    for key, value in fields.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a model folder, or None.

    Raises:
        InvalidArgument: a file is not what it should be.
    """
    source = template_source(read_files(folder, (TOKENIZER_CONFIG, SPECIAL_TOKENS, CHAT_TEMPLATE)))
    return None if source is None else ChatTemplate(source.text, source.special_tokens)


def _json_object(name: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Of the file `name`; empty without it."""
    try:
        value = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument.of(name, "is not JSON") from error
    if not isinstance(value, dict):
        raise InvalidArgument.of(name, "must be a JSON object")
    return value


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument.of(name, f"cannot be read: {error}") from error


def _default_template(value: Any) -> str | None:
    """A model has one template, or a list of named ones of which `default` is for chats without tools."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise InvalidArgument.of("tokenizer_config.json", "chat_template must be a string or a list of named strings")
    return value

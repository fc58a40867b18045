"""Chat templates, rendered as transformers renders them (so that models see the prompts they were trained on)."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidArgument
from shared.model_folder import read_json_object

FIELD = "prompt.chat"


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

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for the assistant's next turn. Encode it without adding special tokens: it has its own.

        Raises:
            InvalidArgument: the template refuses these messages (field `prompt.chat`).
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render(messages=[dict(m) for m in messages], **variables)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise InvalidArgument.of(FIELD, f"the chat template refuses it: {error!s:.300}") from error


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a model folder: chat_template.jinja, else `chat_template` of tokenizer_config.json, else None.

    Raises:
        InvalidArgument: a file is not what it should be.
    """
    path = folder / "tokenizer_config.json"
    config = read_json_object(path) if path.is_file() else {}
    file = folder / "chat_template.jinja"
    source = _read_text(file) if file.is_file() else _default_template(config.get("chat_template"))
    return None if source is None else ChatTemplate(source, _special_tokens(config))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument.of(path.name, f"cannot be read: {error}") from error


def _default_template(value: Any) -> str | None:
    """A model has one template, or a list of named ones of which `default` is for chats without tools."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise InvalidArgument.of("tokenizer_config.json", "chat_template must be a string or a list of named strings")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Every `…_token` of tokenizer_config.json, written as a string or as `{"content": …}`."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found

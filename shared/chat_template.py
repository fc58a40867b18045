"""A chat template as its files hold it, and the language that it is written in: what both services know of one.

Nothing here runs a template. Parsing evaluates none of its expressions; compiling none but those of `autoescape`, where
jinja2 would compute each that is constant (`{{ 9 ** (9 ** 9) }}`).
"""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.adapter_format.texts import CHAT_TEMPLATE, SPECIAL_TOKENS, TOKENIZER_CONFIG
from shared.errors import InvalidArgument

# What compiling a text raises that is no template.
NOT_A_TEMPLATE = (jinja2.TemplateError, RecursionError, SyntaxError, ValueError)
_BRANCHES = (nodes.If, nodes.CondExpr)
_MAYBE = (nodes.For, nodes.Macro, nodes.CallBlock)
_OTHER_TEMPLATES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


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


@jinja2.pass_context
def _unchanged(_: Context, value: Any) -> Any:
    """What is said to depend on a template's variables is computed when it renders, constant or not."""
    return value


def environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives a chat template to work with; constants too are computed when it renders."""
    result = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, loopcontrols],
        optimized=False,
        finalize=_unchanged,
    )
    result.filters["tojson"] = _tojson
    result.globals["raise_exception"] = _raise_exception
    result.globals["strftime_now"] = _strftime_now
    return result


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


def template_file(files: Mapping[str, bytes]) -> str:
    """The one that `template_source` finds a template in."""
    return CHAT_TEMPLATE if CHAT_TEMPLATE in files else TOKENIZER_CONFIG


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


class Syntax(NamedTuple):
    """What a template's text tells of it. `never`: why it can render nothing; `doubts`: what may fail or be meant
    otherwise."""

    never: str | None = None
    doubts: tuple[str, ...] = ()


def parse_template(text: str) -> Syntax:
    """Read a template, at some 100 kB a second, without running any of it."""
    if not text.strip():
        return Syntax("is empty")
    language = environment()
    try:
        tree = language.parse(text)
    except NOT_A_TEMPLATE as error:
        return Syntax(not_a_template(error))
    places = list(_places(tree))
    unknown = [(problem, is_certain) for place in places for problem, is_certain in _unknown(place, language)]
    never = next((problem for problem, is_certain in unknown if is_certain), None)
    doubts = [f"{problem}: it fails where it comes to that" for problem, _ in unknown]
    if not any(isinstance(place.node, nodes.Name) and place.node.name == "messages" for place in places):
        doubts.append("does not use `messages`: every chat has the same prompt")
    return Syntax(never, tuple(dict.fromkeys(doubts))[:5])


class _Place(NamedTuple):
    """A node of a template. `is_compiled`: jinja2 looks for its filter or test at once, else when it comes to it.
    `is_reached`: every chat comes to it."""

    node: nodes.Node
    is_compiled: bool = True
    is_reached: bool = True


def _places(tree: nodes.Node) -> Iterator[_Place]:
    waiting = [_Place(tree)]  # no recursion: `a.b.c…` is as deep as it is long
    while waiting:
        place = waiting.pop()
        yield place
        is_branch = isinstance(place.node, _BRANCHES)
        is_compiled = place.is_compiled and not is_branch
        is_reached = place.is_reached and not is_branch and not isinstance(place.node, _MAYBE)
        waiting += [_Place(child, is_compiled, is_reached) for child in place.node.iter_child_nodes()]


def _unknown(place: _Place, language: jinja2.Environment) -> Iterator[tuple[str, bool]]:
    """What templates do not have here, and whether that ends each of its uses."""
    node = place.node
    if isinstance(node, nodes.Filter) and node.name not in language.filters:
        yield f"uses the filter {node.name[:60]!r}, which templates do not have", place.is_compiled
    if isinstance(node, nodes.Test) and node.name not in language.tests:
        yield f"uses the test {node.name[:60]!r}, which templates do not have", place.is_compiled
    if isinstance(node, _OTHER_TEMPLATES):
        yield "uses another template; there is but this one", place.is_reached


def not_a_template(error: Exception) -> str:
    """One of NOT_A_TEMPLATE, in words."""
    if isinstance(error, RecursionError):
        return "is not a template: nested too deeply"
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return f"is not a template: {error!s:.200}{line}"


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

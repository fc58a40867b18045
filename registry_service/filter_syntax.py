"""The grammar of list filters: the part of AIP-160 that compares fields.

    filter      = all
    all         = any {"AND" any}
    any         = term {"OR" term}                  OR binds tighter than AND, as AIP-160 has it
    term        = ["NOT"] (comparison | "(" all ")")
    comparison  = field ("=" | "!=" | "<" | "<=" | ">" | ">=" | ":") value
    field       = word, such as `state` or `labels.team`; a key that is no word is quoted: `labels."a b"`
    value       = word | time (RFC 3339) | "string" | 'string'

Only the grammar: what fields there are, and what they are compared with, is `filter_fields`' business.
"""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple, cast

from shared.errors import InvalidArgument

MAX_CHARS = 2000
MAX_DEPTH = 20  # of parentheses and NOTs within each other

Operator = Literal["=", "!=", "<", "<=", ">", ">=", ":"]
_OPERATORS = ("=", "!=", "<", "<=", ">", ">=", ":")
_KEYWORDS = ("AND", "OR", "NOT")
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<word>\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) | [^\s()=!<>:"']+)
    | (?P<operator><=|>=|!=|[=<>:])
    | (?P<parenthesis>[()])
    )""",
    re.VERBOSE,
)


class Value(NamedTuple):
    """What a field is compared with. `position` counts characters of the filter from 1."""

    text: str
    position: int


class Comparison(NamedTuple):
    """`field` with the `key` behind its first dot, "" without one."""

    field: str
    key: str
    operator: Operator
    value: Value
    position: int


class Not(NamedTuple):
    term: "Term"


class All(NamedTuple):
    terms: "tuple[Term, ...]"


class AnyOf(NamedTuple):
    terms: "tuple[Term, ...]"


Term = Comparison | Not | All | AnyOf


class _Token(NamedTuple):
    kind: str  # string, word, operator, parenthesis or end
    text: str
    position: int


def wrong(position: int, description: str) -> InvalidArgument:
    """The error for what stands at `position`."""
    return InvalidArgument.of("filter", f"at {position}: {description}")


def parse_filter(text: str) -> Term | None:
    """The tree of a filter; None if it is blank.

    Raises:
        InvalidArgument: on `filter`, with the position.
    """
    if len(text) > MAX_CHARS:
        raise InvalidArgument.of("filter", f"is longer than {MAX_CHARS} characters")
    if not text.replace("\n", " ").replace("\t", " ").isprintable():
        raise InvalidArgument.of("filter", "must be printable")
    return _Parser(text).filter() if text.strip() else None


class _Parser:
    """Recursive descent; `_next` is the token that was not used yet."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._next = next(self._tokens)
        self._depth = 0

    def filter(self) -> Term:
        term = self._all()
        if self._next.kind != "end":
            raise wrong(self._next.position, f"expected AND, OR or the end, found {self._next.text!r:.40}")
        return term

    def _all(self) -> Term:
        terms = [self._any()]
        while self._takes("AND"):
            terms.append(self._any())
        return terms[0] if len(terms) == 1 else All(tuple(terms))

    def _any(self) -> Term:
        terms = [self._term()]
        while self._takes("OR"):
            terms.append(self._term())
        return terms[0] if len(terms) == 1 else AnyOf(tuple(terms))

    def _term(self) -> Term:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise wrong(self._next.position, f"nested more than {MAX_DEPTH} deep")
        try:
            if self._takes("NOT"):
                return Not(self._term())
            if self._takes("("):
                term = self._all()
                if not self._takes(")"):
                    raise wrong(self._next.position, "expected )")
                return term
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> Comparison:
        name = self._take("word", "a field")
        if name.text in _KEYWORDS:
            raise wrong(name.position, f"expected a field, found {name.text}")
        field, dot, key = name.text.partition(".")
        if dot and not key:
            key = _unquoted(self._take("string", "a key after the dot"))
        operator = self._take("operator", f"one of {' '.join(_OPERATORS)}")
        return Comparison(field, key, cast(Operator, operator.text), self._value(), name.position)

    def _value(self) -> Value:
        token = self._next
        if token.kind not in ("string", "word") or token.text in _KEYWORDS:
            raise wrong(token.position, f"expected a value, found {token.text or 'the end'!r:.40}")
        self._advance()
        return Value(_unquoted(token) if token.kind == "string" else token.text, token.position)

    def _takes(self, text: str) -> bool:
        """Whether the next token is this keyword or parenthesis; if so it is used."""
        if self._next.kind in ("string", "operator") or self._next.text != text:
            return False
        self._advance()
        return True

    def _take(self, kind: str, expected: str) -> _Token:
        token = self._next
        if token.kind != kind:
            raise wrong(token.position, f"expected {expected}, found {token.text or 'the end'!r:.40}")
        self._advance()
        return token

    def _advance(self) -> None:
        if self._next.kind != "end":
            self._next = next(self._tokens)


def _tokens(text: str) -> Iterator[_Token]:
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            raise wrong(at + 1, f"cannot be read: {text[at : at + 20]!r}")
        kind = str(match.lastgroup)
        yield _Token(kind, match[kind], match.start(kind) + 1)
        at = match.end()
    yield _Token("end", "", end + 1)


def _unquoted(token: _Token) -> str:
    return re.sub(r"\\(.)", r"\1", token.text[1:-1])

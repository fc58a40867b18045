"""Bearer tokens listed in a file, as their SHA-256: who reads the file cannot use them.

TOML with a table `[[tokens]]` for each, or JSON lines (`.jsonl`) with one object for each: subject, sha256, roles,
namespaces and, if it shall end, expires. Entries of one token add up, so that it may have other roles elsewhere.
"""

import hashlib
import json
import re
import time
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shared.auth.caller import EVERY_NAMESPACE, Caller, Role, granted, own_namespace
from shared.changing_file import ChangingFile
from shared.errors import InvalidArgument
from shared.references import check_id

MAX_SUBJECT_CHARS = 255
_SHA256 = re.compile(r"[0-9a-f]{64}")


class TokenEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the file."""

    subject: str
    sha256: str
    roles: tuple[Role, ...]
    namespaces: tuple[str, ...] = ()
    expires: datetime | None = None


class _Known(NamedTuple):
    caller: Caller
    until: float  # seconds since the epoch


class TokenFile:
    """The tokens of a file, which is read again when it changes.

    A look-up is by hash: how long it takes says nothing about how much of a guessed token is right.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError or ValueError if the file cannot be used."""
        self._file = ChangingFile((path,), _parser(path))

    def caller(self, digest: bytes) -> Caller | None:
        """Whose token has this SHA-256; None if nobody's, or not any more."""
        known = self._file.value().get(digest)
        return known.caller if known is not None and time.time() < known.until else None


def hash_token(token: str) -> bytes:
    """What the file has of a token, in hex."""
    return hashlib.sha256(token.encode()).digest()


def check_subject(text: str) -> str:
    """`text` if it can name a caller in logs and in the database. Raises ValueError."""
    if not 1 <= len(text) <= MAX_SUBJECT_CHARS or not text.isprintable():
        raise ValueError(f"a subject must be printable, of 1 to {MAX_SUBJECT_CHARS} characters")
    return text


def check_namespaces(names: Iterable[str]) -> tuple[str, ...]:
    """`names` if each is the id of a namespace or `*`. Raises ValueError."""
    try:
        return tuple(name if name == EVERY_NAMESPACE else check_id(name, "namespaces") for name in names)
    except InvalidArgument as error:
        raise ValueError(error.message) from None


def _parser(path: Path) -> Any:
    return _read_lines if path.suffix == ".jsonl" else _read_toml


def _read_toml(content: bytes) -> dict[bytes, _Known]:
    tables = tomllib.loads(content.decode())
    if set(tables) - {"tokens"} or not isinstance(tables.get("tokens", []), list):
        raise ValueError("expected tables [[tokens]] and nothing else")
    return _known(tables.get("tokens", []))


def _read_lines(content: bytes) -> dict[bytes, _Known]:
    return _known([json.loads(line) for line in content.decode().splitlines() if line.strip()])


def _known(raw: list[Any]) -> dict[bytes, _Known]:
    entries: dict[bytes, list[TokenEntry]] = {}
    for number, item in enumerate(raw, 1):
        try:
            entry = _entry(item)
        except ValueError as error:  # msgspec's are
            raise ValueError(f"token {number}: {error}") from None
        entries.setdefault(bytes.fromhex(entry.sha256), []).append(entry)
    return {digest: _merged(found) for digest, found in entries.items()}


def _entry(item: Any) -> TokenEntry:
    entry = msgspec.convert(item, TokenEntry)
    check_subject(entry.subject)
    check_namespaces(entry.namespaces)
    if not _SHA256.fullmatch(entry.sha256):
        raise ValueError("sha256 must be the 64 hex digits that `printf %s TOKEN | sha256sum` prints")
    if not entry.roles or (not entry.namespaces and set(entry.roles) != {"replica"}):
        raise ValueError("roles and namespaces must not be empty (a replica alone needs no namespaces)")
    return entry


def _merged(entries: list[TokenEntry]) -> _Known:
    if len({entry.subject for entry in entries}) > 1:
        raise ValueError(f"subjects {', '.join(sorted({e.subject for e in entries}))} have the same token")
    roles: dict[str, frozenset[Role]] = {}
    for entry in entries:
        for namespace, held in granted(entry.namespaces, entry.roles).items():
            roles[namespace] = roles.get(namespace, frozenset()) | held
    own = own_namespace(name for entry in entries for name in entry.namespaces)
    until = min(_seconds(entry.expires) for entry in entries)
    return _Known(Caller(entries[0].subject, own, roles, "token"), until)


def _seconds(expires: datetime | None) -> float:
    if expires is None:
        return float("inf")
    return (expires if expires.tzinfo else expires.replace(tzinfo=UTC)).timestamp()

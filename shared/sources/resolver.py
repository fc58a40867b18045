"""Finds the resolver class of a source URI's scheme among the entry points of the group `loraplex.resolvers`."""

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast

from shared.errors import InvalidArgument

GROUP = "loraplex.resolvers"
URI_FIELD = "source.uri"
MAX_URI_CHARS = 2048

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")


class PinnedSource(NamedTuple):
    """A source fixed to exact content: the canonical URI, and the commit of a Hub repository (else empty)."""

    uri: str
    revision: str = ""


class Source(Protocol):
    """A folder with an adapter's files. Every call may block; none is safe to run on an event loop.

    All raise `SourceNotFound`, `SourceForbidden` or `SourceUnavailable`, with metadata `uri` and, for one file, `file`.
    """

    def pin(self) -> PinnedSource:
        """What to remember so that exactly this content can be read again."""

    def list(self) -> list[str]:
        """Names of the folder's files, sorted."""

    def size(self, name: str) -> int:
        """Bytes of one file."""

    def open(self, name: str) -> BinaryIO:
        """One file, opened for reading without buffering; it has a `fileno()` where it is a local file."""


class Resolver(Protocol):
    """What an entry point of the group names: opens the URIs of one scheme."""

    def __call__(self, uri: str, roots: Mapping[str, Path]) -> Source: ...


def open_source(uri: str, roots: Mapping[str, Path], *, reader: str = "registry") -> Source:
    """The source that `uri` names; `roots` are the folders that `file://ROOT/…` may name. May block.

    `reader` is what errors call the service that reads.

    Raises:
        InvalidArgument: the URI is malformed or its scheme unknown.
        SourceNotFound, SourceForbidden, SourceUnavailable: see `Source`.
    """
    match = _SCHEME.match(uri)
    if match is None or len(uri) > MAX_URI_CHARS or any(ord(char) < 32 for char in uri):
        expected = f"must be a URI like file://ROOT/path of at most {MAX_URI_CHARS} printable characters"
        raise InvalidArgument.of(URI_FIELD, f"{expected}, is {uri!r:.100}")
    found = entry_points(group=GROUP, name=match[1])
    if not found:
        reads = _and([f"{scheme}://" for scheme in sorted(entry_points(group=GROUP).names)])
        description = f"scheme {match[1]:.60}:// is not available; this {reader} reads {reads}"
        raise InvalidArgument.of(URI_FIELD, description)
    resolver = cast(Resolver, next(iter(found)).load())
    return resolver(uri, roots)


def _and(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *first, last = items or ["nothing"]
    return f"{', '.join(first)} and {last}" if first else last

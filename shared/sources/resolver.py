"""Finds the resolver class of a source URI's scheme among the entry points of the group `loraplex.resolvers`."""

import re
import threading
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from types import TracebackType
from typing import NamedTuple, Protocol, Self, cast, runtime_checkable

from shared.errors import InvalidArgument
from shared.sources.policy import Access, SourcePolicy

GROUP = "loraplex.resolvers"
URI_FIELD = "source.uri"
MAX_URI_CHARS = 2048

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")


class PinnedObject(NamedTuple):
    """One file as it was when it was registered: its version where the store keeps versions, and its ETag."""

    path: str
    version_id: str = ""
    etag: str = ""


class PinnedSource(NamedTuple):
    """A source, fixed to exact content once it was read.

    `uri` is then canonical; `revision` is the commit of a Hub repository; `objects` are the files of other stores;
    `credential_ref` names what it is read with.
    """

    uri: str
    revision: str = ""
    objects: tuple[PinnedObject, ...] = ()
    credential_ref: str = ""

    @property
    def origin(self) -> str:
        """What is slow or down as a whole: scheme and host, bucket, root or owner, and the login."""
        scheme, _, rest = self.uri.partition("://")
        return f"{scheme}://{rest.partition('/')[0]} {self.credential_ref}"


class SourceFile(Protocol):
    """A file, or a range of one, that is read from its beginning to its end. `size` is that of the whole file."""

    size: int

    def read(self, count: int, /) -> bytes:
        """At most `count` of the next bytes; none at the end."""

    def is_unchanged(self) -> bool:
        """Whether all that was read is of one file as it was at one moment."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Source(Protocol):
    """A folder with an adapter's files. Every call may block; none is safe to run on an event loop.

    All raise `SourceNotFound`, `SourceForbidden`, `SourceUnavailable` or, where a pin does not hold, `DigestMismatch`,
    with metadata `uri` and, for one file, `file`.
    """

    def pin(self) -> PinnedSource:
        """What to remember so that exactly the content that was read can be read again."""

    def list(self) -> list[str]:
        """Names of the folder's files, sorted."""

    def open(self, name: str) -> SourceFile:
        """One file, opened for reading without buffering."""


@runtime_checkable
class FolderedSource(Source, Protocol):
    """A source that knows of folders below its own."""

    def folders(self) -> tuple[str, ...]:
        """Names of the folders right below, sorted."""


@runtime_checkable
class RangedSource(Source, Protocol):
    """A source whose files may be read in parts, several at once."""

    def open_range(self, name: str, start: int, end: int) -> SourceFile:
        """Bytes [start, end) of one file."""


class Resolver(Protocol):
    """What an entry point of the group names: opens the URIs of one scheme, pinned or not."""

    def __call__(self, source: PinnedSource, access: Access) -> Source: ...


def open_source(
    source: PinnedSource, namespace: str, policy: SourcePolicy, stopping: threading.Event, *, reader: str = "registry"
) -> Source:
    """The source that `source.uri` names, opened for an adapter of `namespace`. May block.

    `stopping` is set by the caller when it no longer waits; `reader` is what errors call the service that reads.

    Raises:
        InvalidArgument: the URI is malformed or its scheme unknown.
        CredentialNotAllowed: the namespace may not use the credential for this URI.
        SourceNotFound, SourceForbidden, SourceUnavailable: see `Source`.
    """
    match = _SCHEME.match(source.uri)
    if match is None or len(source.uri) > MAX_URI_CHARS or any(ord(char) < 32 for char in source.uri):
        expected = f"must be a URI like file://ROOT/path of at most {MAX_URI_CHARS} printable characters"
        raise InvalidArgument.of(URI_FIELD, f"{expected}, is {source.uri!r:.100}")
    found = installed().select(name=match[1])
    if not found:
        reads = _and([f"{scheme}://" for scheme in sorted(installed().names)])
        description = f"scheme {match[1]:.60}:// is not available; this {reader} reads {reads}"
        raise InvalidArgument.of(URI_FIELD, description)
    credential = policy.check(source.uri, source.credential_ref, namespace)
    resolver = cast(Resolver, next(iter(found)).load())
    return resolver(source, policy.access(credential, namespace, stopping))


@cache
def installed() -> EntryPoints:
    """The resolvers of this environment, looked for once: it takes milliseconds to read what every package says."""
    return entry_points(group=GROUP)


def _and(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *first, last = items or ["nothing"]
    return f"{', '.join(first)} and {last}" if first else last

"""Brings an adapter's files from its pinned sources into the disk cache, hashing them on the way."""

import errno
import hashlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from inference_service.adapters.disk_cache import DiskCache
from inference_service.adapters.download import download, ignore, mismatch
from inference_service.adapters.resolution import ResolvedVersion, forgotten
from inference_service.adapters.write_behind import WriteBehind
from shared.digest import FileEntry
from shared.errors import (
    AdapterMemory,
    DigestMismatch,
    Draining,
    InvalidArgument,
    LoraplexError,
    SourceForbidden,
    SourceNotFound,
    SourceUnavailable,
    Unavailable,
)
from shared.references import parse_version_name
from shared.sources.policy import SourcePolicy
from shared.sources.resolver import PinnedSource, RangedSource, Source, SourceFile, open_source

log = logging.getLogger(__name__)

WRITTEN_BEHIND = 4
_PIECE_BYTES = 1 << 20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_RETRY_SECONDS = 5.0
_OPEN_SOURCE = partial(open_source, reader="replica")


class CacheUnavailable(Unavailable):
    """The fault is this replica's, whatever the source."""


class _VolumeFull(AdapterMemory):
    """The volume has no room for what the cache's budget allows."""


class Fetched(NamedTuple):
    """The folder with a version's files. `is_verified`: it was hashed as it was written, a moment ago; a folder that
    was here is verified by whoever reads it."""

    folder: Path
    is_verified: bool


class Fetcher:
    """Fetches into `cache` what `policy` lets adapters' namespaces read. Calls block and may run in threads.

    Two threads must not fetch the same digest at a time; two processes may.
    """

    def __init__(
        self,
        cache: DiskCache,
        policy: SourcePolicy,
        open_source: Callable[[PinnedSource, str, SourcePolicy, threading.Event], Source] = _OPEN_SOURCE,
    ) -> None:
        self._cache = cache
        self._policy = policy
        self._open_source = open_source
        self._is_closing = threading.Event()

    def fetch(self, version: ResolvedVersion, on_bytes: Callable[[int], None] = ignore) -> Fetched:
        """The folder with the version's files: the cached one, else downloaded from the first source that has them.

        Of a file that is copied no more than WRITTEN_BEHIND pieces of 1 MiB are in memory; of one that is downloaded
        in parts, one piece a stream.

        Args:
            version: Which files, and from where.
            on_bytes: Told of bytes downloaded, as they are, on this thread.

        Raises:
            DigestMismatch: what the sources hold is not what was registered.
            SourceNotFound, SourceForbidden, SourceUnavailable, CredentialNotAllowed: no source could be read.
            AdapterMemory: the disk, or the cache's budget, is full.
            CacheUnavailable: the cache's folder cannot be written.
        """
        if version.number:  # else nobody knows its name
            self._cache.names.remember(version.digest, version.name, version.rank)
        if (folder := self._cache.find(version.digest, version.files)) is not None:
            return Fetched(folder, is_verified=False)
        failures: list[LoraplexError] = []
        for source in version.sources:
            try:
                return self._download_making_room(version, source, on_bytes)
            except (AdapterMemory, CacheUnavailable, Draining):
                raise
            except LoraplexError as error:
                log.warning("%s from %s: %s", version.name, source.uri, error)
                failures.append(error)
        raise _most_telling(version, failures)

    def close(self) -> None:
        """Makes running downloads end soon, with `Draining`."""
        self._is_closing.set()

    def _download_making_room(
        self, version: ResolvedVersion, pinned: PinnedSource, on_bytes: Callable[[int], None]
    ) -> Fetched:
        """Once more without the idle adapters, should the volume be full before the cache's budget is."""
        try:
            return self._download(version, pinned, on_bytes)
        except _VolumeFull:
            if not self._cache.evict(sum(file.size for file in version.files)):
                raise
        return self._download(version, pinned, on_bytes)

    def _download(self, version: ResolvedVersion, pinned: PinnedSource, on_bytes: Callable[[int], None]) -> Fetched:
        namespace = parse_version_name(version.name, "version.name").namespace
        try:
            source = self._open_source(pinned, namespace, self._policy, self._is_closing)
        except InvalidArgument as error:
            message = f"this replica cannot open {pinned.uri}: {error.message}"
            raise SourceForbidden(message, metadata={"uri": pinned.uri}) from None
        nbytes = sum(file.size for file in version.files)
        try:
            with self._cache.new_folder(nbytes) as folder:
                if isinstance(source, RangedSource):
                    download(source, version.files, folder, pinned.uri, self._is_closing, on_bytes)
                else:
                    self._copy_all(source, version.files, folder, pinned.uri, on_bytes)
                return Fetched(*self._cache.install(version.digest, folder, nbytes))
        except OSError as error:
            message = f"the disk cache {self._cache.root} (--cache-dir) cannot be written: {error.strerror}"
            metadata = {"tier": "disk", "cache_dir": str(self._cache.root)}
            if error.errno in _DISK_FULL:
                raise _VolumeFull(message, metadata=metadata, retry_after=_FULL_RETRY_SECONDS) from None
            raise CacheUnavailable(message, metadata=metadata) from None

    def _copy_all(
        self,
        source: Source,
        files: tuple[FileEntry, ...],
        folder: Path,
        uri: str,
        on_bytes: Callable[[int], None],
    ) -> None:
        for file in files:
            with (
                source.open(file.path) as stream,
                (folder / file.path).open("xb", buffering=0) as target,
                WriteBehind(target, WRITTEN_BEHIND) as writer,
            ):
                self._copy(stream, writer, file, uri, on_bytes)

    def _copy(
        self, stream: SourceFile, target: WriteBehind, file: FileEntry, uri: str, on_bytes: Callable[[int], None]
    ) -> None:
        """Copy exactly the file of the manifest, or raise DigestMismatch; never reads more than a byte too many."""
        hasher = hashlib.sha256()
        left = file.size
        while piece := _read(stream, min(_PIECE_BYTES, left + 1), file, uri):
            if self._is_closing.is_set():
                raise Draining("the replica is stopping")
            left -= len(piece)
            if left < 0:
                raise mismatch(file, uri, f"has more than the {file.size} bytes that were registered")
            target.write(piece)
            hasher.update(piece)
            on_bytes(len(piece))
        if left:
            raise mismatch(file, uri, f"has {file.size - left} bytes instead of the {file.size} that were registered")
        if hasher.hexdigest() != file.sha256:
            raise mismatch(file, uri, "is not what was registered")


def _read(stream: SourceFile, count: int, file: FileEntry, uri: str) -> bytes:
    try:
        return stream.read(count)
    except OSError as error:
        message = f"{file.path} in {uri} cannot be read: {error.strerror}"
        raise SourceUnavailable(message, metadata={"uri": uri, "file": file.path}) from None


def _most_telling(version: ResolvedVersion, failures: list[LoraplexError]) -> LoraplexError:
    """A source that may come back says more than one that has gone wrong for good."""
    for kind in (SourceUnavailable, DigestMismatch, LoraplexError):
        for failure in failures:
            if isinstance(failure, kind):
                return failure
    if not version.number:  # it was on disk a moment ago
        return forgotten(version.digest)
    return SourceNotFound(f"{version.name} has no source", metadata={"version": version.name})

"""Brings an adapter's files from its pinned sources into the disk cache, hashing them on the way."""

import errno
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from inference_service.adapters.disk_cache import DiskCache
from inference_service.adapters.resolution import ResolvedVersion
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
from shared.sources.resolver import PinnedSource, Source, open_source

log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_RETRY_SECONDS = 5.0
_OPEN_SOURCE = partial(open_source, reader="replica")


class CacheUnavailable(Unavailable):
    """The fault is this replica's, whatever the source."""


class _VolumeFull(AdapterMemory):
    """The volume has no room for what the cache's budget allows."""


class Fetcher:
    """Fetches into `cache`; `roots` are the folders that `file://ROOT/…` may name. Calls block and may run in threads.

    Two threads must not fetch the same digest at a time; two processes may.
    """

    def __init__(
        self,
        cache: DiskCache,
        roots: Mapping[str, Path],
        open_source: Callable[[str, Mapping[str, Path]], Source] = _OPEN_SOURCE,
    ) -> None:
        self._cache = cache
        self._roots = roots
        self._open_source = open_source
        self._is_closing = threading.Event()

    def fetch(self, version: ResolvedVersion) -> Path:
        """The folder with the version's files: the cached one, else downloaded from the first source that has them.

        Only what is downloaded here is verified here; a cached folder is verified by whoever reads it.

        Raises:
            DigestMismatch: what the sources hold is not what was registered.
            SourceNotFound, SourceForbidden, SourceUnavailable: no source could be read.
            AdapterMemory: the disk, or the cache's budget, is full.
            CacheUnavailable: the cache's folder cannot be written.
        """
        if version.number:  # else nobody knows its name
            self._cache.names.remember(version.digest, version.name, version.rank)
        if (folder := self._cache.find(version.digest, version.files)) is not None:
            return folder
        failures: list[LoraplexError] = []
        for source in version.sources:
            try:
                return self._download_making_room(version, source)
            except (AdapterMemory, CacheUnavailable, Draining):
                raise
            except LoraplexError as error:
                log.warning("%s from %s: %s", version.name, source.uri, error)
                failures.append(error)
        raise _most_telling(version, failures)

    def close(self) -> None:
        """Makes running downloads end soon, with `Draining`."""
        self._is_closing.set()

    def _download_making_room(self, version: ResolvedVersion, pinned: PinnedSource) -> Path:
        """Once more without the idle adapters, should the volume be full before the cache's budget is."""
        try:
            return self._download(version, pinned)
        except _VolumeFull:
            if not self._cache.evict(sum(file.size for file in version.files)):
                raise
        return self._download(version, pinned)

    def _download(self, version: ResolvedVersion, pinned: PinnedSource) -> Path:
        try:
            source = self._open_source(pinned.uri, self._roots)
        except InvalidArgument as error:
            message = f"this replica cannot open {pinned.uri}: {error.message}"
            raise SourceForbidden(message, metadata={"uri": pinned.uri}) from None
        nbytes = sum(file.size for file in version.files)
        try:
            with self._cache.new_folder(nbytes) as folder:
                for file in version.files:
                    with source.open(file.path) as stream, (folder / file.path).open("xb") as target:
                        self._copy(stream, target, file, pinned.uri)
                return self._cache.install(version.digest, folder, nbytes)
        except OSError as error:
            message = f"the disk cache {self._cache.root} (--cache-dir) cannot be written: {error.strerror}"
            metadata = {"tier": "disk", "cache_dir": str(self._cache.root)}
            if error.errno in _DISK_FULL:
                raise _VolumeFull(message, metadata=metadata, retry_after=_FULL_RETRY_SECONDS) from None
            raise CacheUnavailable(message, metadata=metadata) from None

    def _copy(self, stream: BinaryIO, target: BinaryIO, file: FileEntry, uri: str) -> None:
        """Copy exactly the file of the manifest, or raise DigestMismatch; never reads more than a byte too many."""
        hasher = hashlib.sha256()
        left = file.size
        while piece := _read(stream, min(_PIECE_BYTES, left + 1), file, uri):
            if self._is_closing.is_set():
                raise Draining("the replica is stopping")
            left -= len(piece)
            if left < 0:
                raise _mismatch(file, uri, f"has more than the {file.size} bytes that were registered")
            hasher.update(piece)
            target.write(piece)
        if left:
            raise _mismatch(file, uri, f"has {file.size - left} bytes instead of the {file.size} that were registered")
        if hasher.hexdigest() != file.sha256:
            raise _mismatch(file, uri, "is not what was registered")
        target.flush()
        os.fsync(target.fileno())


def _read(stream: BinaryIO, count: int, file: FileEntry, uri: str) -> bytes:
    try:
        return stream.read(count)
    except OSError as error:
        message = f"{file.path} in {uri} cannot be read: {error.strerror}"
        raise SourceUnavailable(message, metadata={"uri": uri, "file": file.path}) from None


def _mismatch(file: FileEntry, uri: str, problem: str) -> DigestMismatch:
    metadata = {"uri": uri, "file": file.path, "sha256": file.sha256}
    return DigestMismatch(f"{file.path} in {uri} {problem}", metadata=metadata)


def _most_telling(version: ResolvedVersion, failures: list[LoraplexError]) -> LoraplexError:
    """A source that may come back says more than one that has gone wrong for good."""
    for kind in (SourceUnavailable, DigestMismatch, LoraplexError):
        for failure in failures:
            if isinstance(failure, kind):
                return failure
    return SourceNotFound(f"{version.name} has no source", metadata={"version": version.name})

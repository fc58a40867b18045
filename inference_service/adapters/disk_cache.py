"""The disk tier: one folder per adapter at `ROOT/sha256/HEX`, holding exactly the files of its manifest.

A folder gets its name by a rename once it is complete, and loses it by a rename before it is deleted, so several
processes may share a cache, and one that is killed leaves nothing half-written under a digest. Nothing is synced: a
machine that loses power may leave files of the right size and other content, as a bad disk may, and whoever reads a
cached file hashes it and fetches it again. What a process writes or deletes lies in a work folder of its own, locked
while it lives; start-up sweeps those of the dead.
`names` (names.py) remembers what adapters are called.
"""

import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from inference_service.adapters.names import AdapterNames
from inference_service.lora.limits import PINNED_RETRY_SECONDS
from shared.digest import FileEntry, manifest_digest
from shared.errors import AdapterMemory, InvalidArgument

log = logging.getLogger(__name__)

_HEX = re.compile(r"[0-9a-f]{64}")
_PREFIX = "sha256:"
BUSY_RETRY_SECONDS = 1.0
_NO_FOLDER = (errno.ENOTDIR, errno.EACCES, errno.ELOOP)


class DiskCache:
    """An LRU of `budget` bytes. Safe to call from several threads; what is `held`, and what it was told to `keep`, is
    never evicted by this process.

    Raises OSError if the folder cannot be used.
    """

    def __init__(self, root: Path, budget: int) -> None:
        self._budget = budget
        self.num_evicted = 0
        self.root = root
        self._folders = root / "sha256"
        self._lock = Lock()
        self._held: Counter[str] = Counter()
        self._kept: Set[str] = frozenset()
        self._reserved = 0
        self._folders.mkdir(parents=True, exist_ok=True)
        self._work, self._work_fd = _create_work_folder(root / "work")
        _sweep(root / "work", self._work)
        self._sizes = _scan(self._folders)  # by digest, least recently used first
        with self._room(0):
            pass
        self.names = AdapterNames(root / "names")

    @property
    def budget(self) -> int:
        """Bytes it may hold."""
        return self._budget

    @contextmanager
    def held(self, digest: str) -> Iterator[None]:
        """While it lasts, the adapter is not evicted, whether it is here yet or not."""
        with self._lock:
            self._held[digest] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[digest] -= 1
                if not self._held[digest] and digest not in self._kept:
                    del self._held[digest]

    def keep(self, digests: Set[str]) -> None:
        """Pin `digests` and no others: they are not evicted, whether they are here yet or not."""
        with self._lock:
            self._kept = frozenset(digests)

    def has(self, digest: str) -> bool:
        """Whether the adapter's folder was here when it was last looked at; never waits for the disk."""
        with self._lock:
            return digest in self._sizes

    def find(self, digest: str, files: Sequence[FileEntry]) -> Path | None:
        """The adapter's folder, if it holds the files at their sizes; it counts as used now.

        Their content is not verified here: whoever reads it does that.
        """
        folder = self._folder(digest)
        try:
            sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder)}
        except OSError as error:
            with self._lock:
                self._sizes.pop(digest, None)
            if error.errno in _NO_FOLDER:
                log.warning("what lies in place of the cached %s is no folder and is deleted", digest)
                self._delete(digest)
            return None
        if sizes == {file.path: file.size for file in files}:
            with suppress(OSError):
                os.utime(folder)
            self._record(digest, sum(sizes.values()))
            return folder
        log.warning("the cached %s is incomplete and is fetched again", digest)
        self.discard(digest)
        return None

    def manifest(self, digest: str) -> tuple[FileEntry, ...] | None:
        """What the adapter's folder holds, hashed, if that is `digest`; for when the registry's word is not at hand."""
        if not _HEX.fullmatch(digest.removeprefix(_PREFIX)):
            return None
        files = []
        try:
            for path in self._folder(digest).iterdir():
                with path.open("rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                    files.append(FileEntry(path.name, os.fstat(file.fileno()).st_size, sha256))
            return tuple(files) if manifest_digest(files) == digest else None
        except (OSError, InvalidArgument):
            return None

    @contextmanager
    def _room(self, nbytes: int) -> Iterator[None]:
        if nbytes > self._budget:
            message = f"the adapter's files take {nbytes} bytes; the disk cache may hold {self._budget} in all"
            raise AdapterMemory(f"{message}: raise --disk-bytes", metadata={"tier": "disk"})
        with self._lock:
            victims = self._victims(nbytes)
            self._reserved += nbytes
        try:
            for victim in victims:
                self._delete(victim)
            yield
        finally:
            with self._lock:
                self._reserved -= nbytes

    def evict(self, nbytes: int) -> bool:
        """Delete idle adapters, least recently used first, of at least `nbytes`, or all: the volume is full.

        False if there is none.
        """
        with self._lock:
            victims, _ = self._idle(nbytes)
            self._forget(victims)
        for digest in victims:
            self._delete(digest)
        return bool(victims)

    def _idle(self, nbytes: int) -> tuple[list[str], int]:
        """Idle adapters, least recently used first, that have `nbytes` together; and how many bytes they lack."""
        victims = []
        for digest, size in self._sizes.items():
            if nbytes <= 0:
                break
            if not self._held[digest] and digest not in self._kept:
                victims.append(digest)
                nbytes -= size
        return victims, nbytes

    def _victims(self, nbytes: int) -> list[str]:
        victims, over = self._idle(sum(self._sizes.values()) + self._reserved + nbytes - self._budget)
        if over > 0 and nbytes:
            self._check_beside_pins(nbytes)
            message = f"the disk cache has no room for {nbytes} bytes beside the adapters in use and the pinned ones"
            raise AdapterMemory(message, metadata={"tier": "disk"}, retry_after=BUSY_RETRY_SECONDS)
        self._forget(victims)
        return victims

    def _check_beside_pins(self, nbytes: int) -> None:
        """Raise if it is the pinned ones that leave no room: they stay until somebody lets one go."""
        pinned = sum(size for digest, size in self._sizes.items() if digest in self._kept)
        if pinned + nbytes > self._budget:
            raise AdapterMemory(
                f"the files of pinned adapters leave no room for {nbytes} bytes in the disk cache of {self._budget}; "
                "`loraplex adapter update NAME --residency on-demand`, or `loraplex adapter unload NAME` of what "
                "LoadAdapter pinned, lets one go (`loraplex status` shows which), or raise --disk-bytes",
                metadata={"tier": "disk"},
                retry_after=PINNED_RETRY_SECONDS,
            )

    def _forget(self, victims: list[str]) -> None:
        self.num_evicted += len(victims)
        for digest in victims:
            del self._sizes[digest]

    @contextmanager
    def new_folder(self, nbytes: int) -> Iterator[Path]:
        """An empty folder to fill with at most `nbytes` and then `install`; deleted at the end if it was not.

        Raises:
            AdapterMemory: the budget does not allow it. Others are evicted first.
        """
        with self._room(nbytes):
            folder = self._work / uuid.uuid4().hex
            folder.mkdir()
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def install(self, digest: str, folder: Path, nbytes: int) -> tuple[Path, bool]:
        """Make a complete folder the adapter's. Raises OSError.

        Where it is now; and whether it is that one: if another process was faster, its folder stays.
        """
        target, is_ours = self._folder(digest), True
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            is_ours = False
        self._record(digest, nbytes)
        return target, is_ours

    def discard(self, digest: str) -> None:
        """Delete an adapter whose files proved wrong."""
        with self._lock:
            self._sizes.pop(digest, None)
        self._delete(digest)

    def entries(self) -> list[tuple[str, int]]:
        """Digest and bytes of what is here, least recently used first."""
        with self._lock:
            return list(self._sizes.items())

    def close(self) -> None:
        """Delete the work folder and what is in it."""
        shutil.rmtree(self._work, ignore_errors=True)
        os.close(self._work_fd)

    def _folder(self, digest: str) -> Path:
        return self._folders / digest.removeprefix(_PREFIX)

    def _record(self, digest: str, nbytes: int) -> None:
        with self._lock:
            self._sizes[digest] = nbytes
            self._sizes.move_to_end(digest)

    def _delete(self, digest: str) -> None:
        trash = self._work / uuid.uuid4().hex
        try:
            self._folder(digest).rename(trash)
        except OSError as error:
            log.debug("not deleted: %s", error)
            return
        if trash.is_dir() and not trash.is_symlink():
            shutil.rmtree(trash, ignore_errors=True)
        else:
            trash.unlink(missing_ok=True)


def _create_work_folder(parent: Path) -> tuple[Path, int]:
    """A new folder under `parent` and the descriptor that locks it; again if a sweep took it before the lock."""
    parent.mkdir(exist_ok=True)
    while True:
        folder = parent / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists():
                return folder, fd
        except BlockingIOError:
            pass
        os.close(fd)


def _sweep(parent: Path, own: Path) -> None:
    """Delete the work folders that no living process holds."""
    for folder in parent.iterdir():
        if folder == own:
            continue
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)


def _scan(folders: Path) -> OrderedDict[str, int]:
    found = []
    for folder in folders.iterdir():
        try:
            if _HEX.fullmatch(folder.name):
                size = sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))
                found.append((folder.stat().st_mtime, _PREFIX + folder.name, size))
        except OSError:  # gone, or no folder: whoever wants it deletes it
            continue
    log.info("the disk cache holds %d adapters", len(found))
    return OrderedDict((digest, size) for _, digest, size in sorted(found))

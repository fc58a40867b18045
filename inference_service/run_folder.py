"""The private folder with the sockets of one replica. It outlives a supervisor that is killed; the next one removes it.

A living supervisor holds a lock on the file `supervisor.lock` in its folder; the kernel lets go of it however the
process ends. Nothing is deleted but sockets and that file, so a folder that only looks like ours loses nothing.
"""

import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

LONGEST_SOCKET = "adapters.sock"
_MAX_IPC_PATH = 107  # bytes, of a Unix socket's address
_PREFIX = "loraplex-"
_LOCK = "supervisor.lock"
_FALLBACK = "/tmp"


@contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder, private and with a path short enough for sockets, until the end. Those of the dead are removed."""
    for parent in {tempfile.gettempdir(), _FALLBACK}:
        remove_stale(Path(parent))
    folder, lock = _create()
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def remove_stale(parent: Path) -> None:
    """Remove the run folders in `parent` that are this user's and whose supervisor is dead."""
    try:
        found = [entry.path for entry in os.scandir(parent) if entry.name.startswith(_PREFIX)]
    except OSError:
        return
    for folder in map(Path, found):
        with suppress(OSError):  # BlockingIOError: its supervisor lives. FileNotFoundError: no run folder, or gone
            if not _is_ours(folder.lstat()):
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
                log.info("removed the sockets that a killed supervisor left in %s", folder)
            finally:
                os.close(lock)


def _create() -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock; again if another supervisor took it for stale before."""
    while True:
        folder = _new_folder()
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / _LOCK).exists():
                return folder, lock
        except BlockingIOError:
            pass
        os.close(lock)


def _new_folder() -> Path:
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    if len(folder.encode()) + len(f"/{LONGEST_SOCKET}") < _MAX_IPC_PATH:
        return Path(folder)
    Path(folder).rmdir()
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_FALLBACK))


def _is_ours(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _remove(folder: Path) -> None:
    """Delete what a replica puts into its folder, then the folder if it is empty; the lock last."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                Path(entry.path).unlink()
        (folder / _LOCK).unlink()
        folder.rmdir()

"""Files that others replace while we run: tokens, keys, certificates."""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

CHECK_SECONDS = 1.0


class ChangingFile(Generic[T]):
    """What `read` makes of some files together, read again when one of them is another.

    A state of the files that cannot be read is logged, once, and the last good one goes on counting. Safe to use from
    several threads.

    Args:
        read: Takes the files' bytes, in order. Raises ValueError for what it cannot use; its text must hold no secret.
        check_seconds: How often the files are looked at.
    """

    def __init__(
        self, paths: tuple[Path, ...], read: Callable[..., T], *, check_seconds: float = CHECK_SECONDS
    ) -> None:
        """Raises OSError or ValueError if the files cannot be used now."""
        self._paths = paths
        self._read = read
        self._check_seconds = check_seconds
        self._lock = threading.Lock()
        self._checked_at = time.monotonic()
        self._problem = ""
        self._state = self._look()
        self._value = self._load()

    def value(self) -> T:
        """What the files say."""
        if time.monotonic() < self._checked_at + self._check_seconds:
            return self._value
        with self._lock:
            self._checked_at = time.monotonic()
            try:
                if (state := self._look()) != self._state:
                    self._value, self._state, self._problem = self._load(), state, ""
                    log.info("read again: %s", self._names())
            except (OSError, ValueError) as error:
                if str(error) != self._problem:
                    log.error("%s cannot be read again, the last good content counts: %s", self._names(), error)
                self._problem = str(error)
        return self._value

    def _look(self) -> tuple[tuple[int, ...], ...]:
        found = [os.stat(path) for path in self._paths]  # noqa: PTH116  # follows the symlinks of mounted secrets
        return tuple((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)

    def _load(self) -> T:
        return self._read(*(path.read_bytes() for path in self._paths))

    def _names(self) -> str:
        return ", ".join(str(path) for path in self._paths)

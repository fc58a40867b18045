"""One process at a time serves an embedded database; several share Postgres."""

import fcntl
import os
from pathlib import Path

from shared.errors import InvalidArgument


def claim(path: Path) -> int:
    """Claims the SQLite database at `path` for this process, until the descriptor that this returns is closed or the
    process dies, however it does.

    The lock is on a file beside the database, PATH.serving, which stays. On the database itself it would be lost when
    SQLite closes any descriptor of it. Commands (`migrate`, `export`) claim nothing.

    Raises:
        InvalidArgument: another process serves it.
    """
    beside = Path(f"{path.resolve()}.serving")
    try:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InvalidArgument.of("database", f"{beside} cannot be used: {error.strerror}") from None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError | PermissionError):  # EAGAIN or EACCES: it is taken
            raise InvalidArgument.of("database", f"{beside} cannot be locked: {error.strerror}") from None
        raise InvalidArgument.of(
            "database", f"another registry serves {path}; only Postgres can be shared by several"
        ) from None
    return descriptor

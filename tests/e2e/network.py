"""Ways to cut the network between processes: packets vanish, and neither end is told."""

import asyncio
import itertools
import os
import shutil
import subprocess
from contextlib import suppress
from types import TracebackType

_PIECE = 1 << 16
_numbers = itertools.count(1)


class Proxy:
    """Passes TCP connections on to `target` ("host:port") until `cut`; `heal` lets what was sent meanwhile through.

    `address`: where it listens, on a free port of 127.0.0.1.
    """

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._passing = asyncio.Event()
        self._passing.set()
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> None:
        """From now on nothing arrives, in either direction; connections are taken and lead nowhere."""
        self._passing.clear()

    def heal(self) -> None:
        self._passing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._passing.wait()
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
            try:
                await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))
            finally:
                far_writer.close()
        except (OSError, asyncio.CancelledError):
            pass  # one of the ends is gone, or this proxy, and so is the connection
        finally:
            writer.close()
            self._connections.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(_PIECE):
            await self._passing.wait()
            writer.write(content)
            await writer.drain()
        await self._passing.wait()
        with suppress(OSError):
            writer.write_eof()


def can_make_namespaces() -> bool:
    """Whether this user may make network namespaces with a link between them."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    with suppress(subprocess.CalledProcessError), Namespace():
        return True
    return False


class Namespace:
    """A network namespace of its own, joined to ours by one link.

    `prefix` runs a command in it; `here` and `there` are the addresses of the link's ends.
    """

    def __init__(self) -> None:
        number = next(_numbers)
        mark = f"{os.getpid() % 100_000}-{number}"
        self._name, self._near, self._far = f"lx{mark}", f"lx{mark}a", f"lx{mark}b"
        net = f"10.{200 + os.getpid() % 50}.{number}"
        self.here, self.there = f"{net}.1", f"{net}.2"
        self.prefix = ("ip", "netns", "exec", self._name)

    def __enter__(self) -> "Namespace":
        _ip("netns", "add", self._name)
        try:
            _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self._name)
            _ip("addr", "add", f"{self.here}/30", "dev", self._near)
            _ip("-n", self._name, "addr", "add", f"{self.there}/30", "dev", self._far)
            _ip("-n", self._name, "link", "set", "lo", "up")
            _ip("link", "set", self._near, "up")
            self.heal()
        except BaseException:
            _ip("netns", "delete", self._name)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ip("netns", "delete", self._name)

    def cut(self) -> None:
        """The cable is pulled; our end keeps its address, so that those on our side still reach each other there."""
        _ip("-n", self._name, "link", "set", self._far, "down")

    def heal(self) -> None:
        _ip("-n", self._name, "link", "set", self._far, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)

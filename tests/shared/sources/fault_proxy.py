"""An HTTP server between a client and a server that goes wrong when it is told to."""

import http.client
import re
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import urlsplit

PIECE = 16 << 10


class Fault(NamedTuple):
    """What happens to GET requests whose path matches, `times` of them.

    `status` answers with that; otherwise the body is passed on: all of it, or `after` bytes of it and then `ending`.
    `flip` changes a bit of its last byte, `rate` is in bytes a second, `ranges` False hides the request's range.
    `dripping`: of the answer comes a byte now and then, and never so much as its head.
    """

    path: str = ""
    times: int = 1_000
    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    after: int | None = None
    ending: str = "reset"  # or "close", or "stall": no further byte until the proxy stops
    flip: bool = False
    rate: float = 0.0
    ranges: bool = True
    dripping: bool = False


class Seen(NamedTuple):
    """One request, and how many bytes of the answer's body were sent."""

    method: str
    path: str
    headers: dict[str, str]
    sent: list[int]


class FaultProxy:
    """Listens on a port of its own; without faults it only passes on."""

    def __init__(self, upstream: str, tls: ssl.SSLContext | None = None) -> None:
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.host, self.port_of_upstream = urlsplit(upstream).hostname, urlsplit(upstream).port
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._num_running = 0
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self._server.server_address[1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Down: connections are refused from now on."""
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Of one request, from when it is read until all of its answer is sent."""
        with self._lock:
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self._num_running == 0

    def next_fault(self, path: str) -> Fault | None:
        with self._lock:
            for index, fault in enumerate(self.faults):
                if re.search(fault.path, path):
                    left = fault.times - 1
                    self.faults[index : index + 1] = [fault._replace(times=left)] if left else []
                    return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that leaves is no error here."""


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultProxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        with self.proxy.running():
            self._pass_on(self.proxy.next_fault(self.path))

    def do_PUT(self) -> None:
        with self.proxy.running():
            self._pass_on(None)

    do_HEAD = do_POST = do_DELETE = do_PUT  # noqa: N815  # the names http.server asks for

    def _pass_on(self, fault: Fault | None) -> None:
        seen = Seen(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, [0])
        self.proxy.seen.append(seen)
        try:
            if fault is not None and fault.dripping:
                self._drip()
            elif fault is not None and fault.status:
                self._answer(fault)
            else:
                self._forward(fault or Fault(), seen)
        except OSError:
            self.close_connection = True  # else the client waits for an answer that nobody gives

    def _drip(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not self.proxy.stopping.wait(0.02):
            self.wfile.write(b"x")

    def _answer(self, fault: Fault) -> None:
        self.send_response(fault.status)
        for name, value in fault.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _forward(self, fault: Fault, seen: Seen) -> None:
        upstream = http.client.HTTPConnection(self.proxy.host or "", self.proxy.port_of_upstream, timeout=30)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {k: v for k, v in self.headers.items() if fault.ranges or k.lower() != "range"}
        upstream.request(self.command, self.path, body, {**headers, "Connection": "close"})
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = answer.headers.get("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if fault.flip and content:
            content = content[:-1] + bytes([content[-1] ^ 1])
        self._send(content if fault.after is None else content[: fault.after], fault, seen)
        if fault.after is not None and fault.after < len(content):
            self._end(fault.ending)

    def _send(self, content: bytes, fault: Fault, seen: Seen) -> None:
        step = max(1, int(fault.rate / 20)) if fault.rate else PIECE
        for start in range(0, len(content), step):
            piece = content[start : start + step]
            self.wfile.write(piece)
            seen.sent[0] += len(piece)
            if fault.rate and self.proxy.stopping.wait(0.05):
                return

    def _end(self, ending: str) -> None:
        self.wfile.flush()
        if ending == "stall":
            self.proxy.stopping.wait()
        if ending == "reset":  # RST instead of FIN
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        with suppress(OSError):
            self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        pass

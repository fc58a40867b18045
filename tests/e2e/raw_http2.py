"""HTTP/2 written byte by byte, for what no gRPC client would send (RFC 9113)."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress

from loraplex.inference.v1 import inference_pb2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE = 4  # a setting
GENERATE = "/loraplex.inference.v1.InferenceService/Generate"


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame, whether or not it makes sense."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def setting(name: int, value: int) -> bytes:
    """A SETTINGS frame with one setting."""
    return frame(SETTINGS, payload=name.to_bytes(2, "big") + value.to_bytes(4, "big"))


def header_block(path: str = GENERATE) -> bytes:
    """The headers of a gRPC call as HPACK literals that are not indexed."""
    fields = {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost", "te": "trailers",
        "content-type": "application/grpc",
    }  # fmt: skip
    return b"".join(b"\0" + _literal(name) + _literal(value) for name, value in fields.items())


def _literal(text: str) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()


def message(content: bytes) -> bytes:
    """A gRPC message: not compressed, its length, itself."""
    return b"\0" + len(content).to_bytes(4, "big") + content


def generate_call(stream: int, request: inference_pb2.GenerateRequest) -> bytes:
    """A whole Generate call."""
    body = message(request.SerializeToString())
    return frame(HEADERS, END_HEADERS, stream, header_block()) + frame(DATA, END_STREAM, stream, body)


class RawConnection:
    """A TCP connection to `address` that has only sent what it was told to."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10)
        self.is_ended = False  # by the other end

    def send(self, content: bytes) -> None:
        """Sends as much as the other end takes."""
        with suppress(OSError):
            self.socket.sendall(content)

    async def received(self, seconds: float) -> bytes:
        """What comes until the other end closes, for at most `seconds`."""
        self.socket.setblocking(False)
        loop, content = asyncio.get_running_loop(), b""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                with suppress(ConnectionError):
                    while piece := await loop.sock_recv(self.socket, 1 << 16):
                        content += piece
                self.is_ended = True
        return content

    def close(self) -> None:
        self.socket.close()


def frames(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The kinds and payloads of whole frames."""
    while len(content) >= 9:
        end = 9 + int.from_bytes(content[:3], "big")
        yield content[3], content[9:end]
        content = content[end:]

"""What gRPC's core prints of the other end, as the services set it up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.grpc_environment import grpc_environment
from tests.shared.auth.authority import Authority

# A server and a client of gRPC, each with somebody at the other end who leaves with words of his own.
BOTH_ENDS = """
import asyncio, socket
import grpc
from shared.channel import open_channel
from tests.e2e import raw_http2 as http2

WORDS = b"\\nforged by a "
def goaway(who, code):
    return http2.frame(http2.SETTINGS) + http2.frame(http2.GOAWAY, payload=bytes(7) + bytes([code]) + WORDS + who)

async def leave_a_client(reader, writer):
    for code in (0, 2, 11):
        writer.write(goaway(b"server\\n", code))
    await reader.read()
    writer.close()

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    for code in (0, 2, 11):
        connection = http2.RawConnection(f"127.0.0.1:{port}")
        ping = http2.frame(http2.PING, payload=b"heard it")
        connection.send(http2.PREFACE + goaway(b"client\\n", code) + ping)
        content = b""
        while b"heard it" not in content and not connection.is_ended:
            content += await connection.received(0.05)
        connection.close()
    await server.stop(None)
    other = await asyncio.start_server(leave_a_client, "127.0.0.1", 0)
    async with open_channel("127.0.0.1:%d" % other.sockets[0].getsockname()[1]) as channel:
        try:
            await channel.unary_unary("/a/b")(b"", timeout=1.0)
        except grpc.aio.AioRpcError:
            pass
    other.close()
asyncio.run(main())
"""


# A server of TLS, with the certificate and key of its arguments, and a client that asks for a name of two lines.
TLS_SERVER = r"""
import asyncio, socket, ssl, sys
from pathlib import Path
import grpc

NAME = b"x\nforged by a client\n" + b"." * 40
def hello():
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    allowed = (b"a" * 30 + b".").ljust(len(NAME), b"b")
    sent = ssl.MemoryBIO()
    try:
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=allowed.decode()).do_handshake()
    except ssl.SSLWantReadError:
        pass
    content = sent.read()
    assert content.count(allowed) == 1
    return content.replace(allowed, NAME)

async def main():
    pair = [Path(path).read_bytes() for path in sys.argv[1:]]
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([tuple(pair)]))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(hello())
    await reader.read(1)  # whatever it answers, it has read the name
    writer.close()
    await server.stop(None)
asyncio.run(main())
"""


def printed(environment: dict[str, str], code: str = BOTH_ENDS, arguments: tuple[Path, ...] = ()) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=os.environ | environment, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    return ended.stderr


def test_neither_end_can_write_a_line_of_the_others_log() -> None:
    assert "forged" not in printed(grpc_environment(env={}))


def test_an_operator_who_wants_to_see_it_does() -> None:
    seen = printed(grpc_environment(env={"GRPC_VERBOSITY": "INFO"}))
    assert "\nforged by a client\n" in seen
    assert "\nforged by a server\n" in seen


def test_the_name_that_a_tls_client_asks_for_is_no_line_of_the_log(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue("server", "localhost")
    pair = (files.key, files.cert)
    assert printed(grpc_environment(env={}), TLS_SERVER, pair) == ""
    assert "\nforged by a client\n" in printed({"GRPC_VERBOSITY": "ERROR"}, TLS_SERVER, pair)


@pytest.mark.parametrize("starts_processes", [False, True])
def test_fork_handlers_are_off_for_who_starts_processes(starts_processes: bool) -> None:
    assert ("GRPC_ENABLE_FORK_SUPPORT" in grpc_environment(starts_processes=starts_processes)) == starts_processes

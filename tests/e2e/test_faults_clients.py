"""Clients that ask for nonsense, leave, never read or speak no HTTP/2: nobody else notices, and nothing is left."""

import asyncio
import os
import random
import struct
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import psutil
import pytest
import pytest_asyncio

from examples.stack import Stack
from loraplex import Client
from loraplex.inference.v1 import control_pb2, inference_pb2
from tests.e2e import raw_http2 as http2
from tests.e2e.processes import processes_of
from tests.e2e.streams import collect
from tests.e2e.tiny_stack import PROMPTS, TinyWorld
from tests.e2e.traffic import LONG, Traffic, refusal

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

RESIDENT = {"": "", "content-0": "content-0", "content-1": "content-1"}
NUM_NEVER_READING = 200
MOST_GROWTH = 96 << 20  # bytes of an API process with all of them
SETTLE_SECONDS = 60.0
# What ends a connection. Others are left open, with an error for their stream or none.
ENDED = {
    "HTTP/1.1", "garbage", "garbage after the preface", "a frame larger than allowed", "settings of no size",
    "a continuation of nothing",
}  # fmt: skip


class Replica(NamedTuple):
    """The running services and a client of them."""

    stack: Stack
    client: Client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replica]:
    os.environ.pop("GRPC_VERBOSITY", None)  # which the command line, if it was imported here, has set
    async with world.serving(tmp_path_factory.mktemp("clients"), names=["content-0", "content-1"]) as (stack, client):
        yield Replica(stack, client)


async def until_idle(client: Client) -> None:
    """Returns when the engine has no sequence, and no request holds an adapter."""
    async with asyncio.timeout(SETTLE_SECONDS):
        while True:
            status = await client.call(client.control.GetReplicaStatus(control_pb2.GetReplicaStatusRequest()))
            listed = await client.call(client.control.ListLoadedAdapters(control_pb2.ListLoadedAdaptersRequest()))
            left = status.engine.running_sequences + status.engine.waiting_sequences
            if status.HasField("engine") and not left + sum(each.active_requests for each in listed.adapters):
                return
            await asyncio.sleep(0.05)


def bad_requests(client: Client) -> dict[str, tuple[Any, str, str]]:
    """Requests by what is wrong with them: the call, the reason it must end with, and what the error must name."""

    def ask(prompt: Any = PROMPTS[0], adapter: str = "", **more: Any) -> Any:
        return collect(client, prompt, adapter, **more)

    return {
        "unknown adapter": (ask(adapter="nobody"), "ADAPTER_NOT_FOUND", "nobody"),
        "unknown version": (ask(adapter="content-0@7"), "ADAPTER_NOT_FOUND", "7"),
        "unknown alias": (ask(adapter="content-0@prod"), "ADAPTER_NOT_FOUND", "prod"),
        "not a reference": (ask(adapter="Content!"), "INVALID_ARGUMENT", "adapter"),
        "empty prompt": (ask([]), "INVALID_ARGUMENT", "prompt"),
        "prompt too long": (ask([5] * 600), "INVALID_ARGUMENT", "prompt"),
        "unknown token": (ask([10**6]), "INVALID_ARGUMENT", "prompt.token_ids"),
        "negative temperature": (ask(temperature=-1), "INVALID_ARGUMENT", "sampling.temperature"),
        "NaN": (ask(top_p=float("nan")), "INVALID_ARGUMENT", "sampling.top_p"),
        "n too large": (ask(n=10_000), "INVALID_ARGUMENT", "sampling.n"),
        "blend": (ask(request={"blend": [{"reference": "content-0"}]}), "INVALID_ARGUMENT", "blend[0].weight"),
        "deadline": (ask(timeout=0.001), "DEADLINE_EXCEEDED|DEADLINE_UNREACHABLE", ""),
    }


async def test_bad_requests_get_a_typed_error(world: TinyWorld, replica: Replica) -> None:
    async with Traffic(world, replica.client, RESIDENT) as traffic:
        for what, (call, reason, named) in bad_requests(replica.client).items():
            error = await refusal(call)
            assert error.reason in reason.split("|"), what
            assert named in f"{error.message} {error.metadata}", what
        await traffic.answers(8)


@pytest.mark.parametrize("waves", [1, pytest.param(10, marks=pytest.mark.slow)])
async def test_cancelled_streams_free_what_they_held(world: TinyWorld, replica: Replica, waves: int) -> None:
    """A hundred at once, each at a moment of its own: before it was sent, queued, in its prompt, after some tokens."""
    client, chance = replica.client, random.Random(waves)

    async def leave(reference: str, num_events: int) -> None:
        stop = {"max_tokens": LONG, "ignore_eos": True}
        events = client.generate(PROMPTS[1], adapter=reference, temperature=0, stop=stop, timeout=60)
        async for _ in events:
            num_events -= 1
            if not num_events:
                break
        await events.aclose()

    async with Traffic(world, client, RESIDENT) as traffic:
        for _ in range(waves):
            streams = [
                asyncio.create_task(leave(chance.choice(list(RESIDENT)), chance.choice([1, 1, 2, 4, 20])))
                for _ in range(80)
            ]
            unheard = [client.inference.Generate(inference_pb2.GenerateRequest(adapter="content-0")) for _ in range(20)]
            for call in unheard:
                call.cancel()  # before anything was sent, or just then
            await asyncio.gather(*streams)
        await traffic.answers(8)
    await until_idle(client)


@pytest.mark.slow
async def test_connections_that_never_read(world: TinyWorld, replica: Replica) -> None:
    """Each asks for an answer and forbids the server to send any of it (a window of no bytes), then leaves."""
    stack, client = replica
    (api,) = processes_of(stack, "api")
    before, sockets = api.memory_info().rss, api.num_fds()
    connections = [http2.RawConnection(stack.inference.address) for _ in range(NUM_NEVER_READING)]
    request = inference_pb2.GenerateRequest(
        token_ids={"ids": PROMPTS[0]}, adapter="content-0", stop={"max_tokens": 40, "ignore_eos": True}
    )
    try:
        async with Traffic(world, client, RESIDENT) as traffic:
            for connection in connections:
                settings = http2.setting(http2.INITIAL_WINDOW_SIZE, 0)
                connection.send(http2.PREFACE + settings + http2.generate_call(1, request))
            await traffic.answers(20)
            growth = api.memory_info().rss - before
            assert growth < MOST_GROWTH
    finally:
        for connection in connections:
            connection.close()
    await until_idle(client)
    await until_closed(api, sockets)
    print(f"the API process grew by {growth >> 20} MiB with {NUM_NEVER_READING} connections that never read")


async def until_closed(api: psutil.Process, sockets: int) -> None:
    async with asyncio.timeout(SETTLE_SECONDS):
        while api.num_fds() > sockets + 8:  # noqa: ASYNC110 - it is another process that closes them
            await asyncio.sleep(0.05)


def malformed() -> dict[str, bytes]:
    """What a connection sends, by what is wrong with it."""
    start = http2.PREFACE + http2.frame(http2.SETTINGS)
    block, garbage = http2.header_block(), random.Random(0).randbytes(4096)
    opening = http2.frame(http2.HEADERS, http2.END_HEADERS, 1, block)
    reset = http2.frame(http2.RST_STREAM, 0, 1, struct.pack(">I", 8))
    resets = b"".join(
        http2.frame(http2.HEADERS, http2.END_HEADERS, stream, block)
        + http2.frame(http2.RST_STREAM, 0, stream, struct.pack(">I", 8))
        for stream in range(1, 2001, 2)
    )
    endless = http2.frame(http2.CONTINUATION, 0, 1, b"\0\1a\1b" * 100)
    return {
        "nothing": b"",
        "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "garbage": garbage,
        "garbage after the preface": http2.PREFACE + garbage,
        "half a preface": http2.PREFACE[:10],
        "a frame larger than allowed": start + b"\xff\xff\xff" + bytes([http2.DATA, 0]) + b"\0\0\0\1" + garbage,
        "settings of no size": start + http2.frame(http2.SETTINGS, payload=b"123"),
        "headers on stream 0": start + http2.frame(http2.HEADERS, http2.END_HEADERS, 0, block),
        "data on an idle stream": start + http2.frame(http2.DATA, 0, 5, b"x"),
        "headers on a server's stream": start + http2.frame(http2.HEADERS, http2.END_HEADERS, 2, block),
        "no HPACK": start + http2.frame(http2.HEADERS, http2.END_HEADERS, 1, b"\x80\xff\xff\xff"),
        "a continuation of nothing": start + http2.frame(http2.CONTINUATION, 0, 1, block),
        "endless headers": start + http2.frame(http2.HEADERS, 0, 1, block) + endless * 2000,
        "a window of no bytes more": start + opening + http2.frame(http2.WINDOW_UPDATE, 0, 1, bytes(4)),
        "a window too large": start + http2.frame(http2.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff") * 2,
        "pings": start + http2.frame(http2.PING, payload=bytes(8)) * 10_000,
        "settings again and again": start + http2.setting(http2.INITIAL_WINDOW_SIZE, 1) * 10_000,
        "a thousand streams reset at once": start + resets,
        "reset twice": start + opening + reset * 2,
        "a message of 4 GiB": start + opening + http2.frame(http2.DATA, 0, 1, b"\0\xff\xff\xff\xff" + garbage),
        "a compressed message": start + opening + http2.frame(http2.DATA, 1, 1, b"\1\0\0\0\4abcd"),
        "half a message": start + opening + http2.frame(http2.DATA, 1, 1, b"\0\0\0\1\0abcd"),
        "no message": start + opening + http2.frame(http2.DATA, 1, 1, http2.message(b"\xff" * 50)),
        "no such method": start + http2.frame(http2.HEADERS, 5, 1, http2.header_block("/no.Such/Method")),
    }


async def test_malformed_http2(world: TinyWorld, replica: Replica) -> None:
    stack, client = replica
    (api,) = processes_of(stack, "api")
    sockets = api.num_fds()
    answers: defaultdict[str, list[str]] = defaultdict(list)

    async def suffer(what: str, content: bytes) -> None:
        connection = http2.RawConnection(stack.inference.address)
        try:
            await asyncio.to_thread(connection.send, content)
            content = await connection.received(SETTLE_SECONDS if what in ENDED else 0.5)
            kinds = {kind for kind, _ in http2.frames(content)}
        finally:
            connection.close()
        assert connection.is_ended or what not in ENDED, what
        names = {http2.GOAWAY: "GOAWAY", http2.RST_STREAM: "RST_STREAM", http2.HEADERS: "a status"}
        told = [name for kind, name in names.items() if kind in kinds]
        answers[", ".join([*told, "ended" if connection.is_ended else "left open"])].append(what)

    async with Traffic(world, client, RESIDENT) as traffic:
        await asyncio.gather(*(suffer(*each) for each in malformed().items()))
        await traffic.answers(12)
    (still,) = processes_of(stack, "api")
    assert still.pid == api.pid
    await until_idle(client)
    await until_closed(api, sockets)
    print("; ".join(f"{how}: {', '.join(what)}" for how, what in answers.items()))


async def test_what_a_client_says_as_it_leaves_is_no_line_of_a_log(replica: Replica) -> None:
    """gRPC's C core would write it to standard error as it is, for anybody who reaches the port."""
    stack, client = replica
    words = b'x"\n{"forged": "by nobody"}\n'
    for service in (stack.registry, stack.inference):
        connection = http2.RawConnection(service.address)
        try:
            goaway = http2.frame(http2.GOAWAY, payload=bytes(7) + b"\2" + words)
            ping = http2.frame(http2.PING, payload=b"heard it")
            connection.send(http2.PREFACE + http2.frame(http2.SETTINGS) + goaway + ping)
            async with asyncio.timeout(SETTLE_SECONDS):
                content = b""
                while b"heard it" not in content:
                    content += await connection.received(0.05)
        finally:
            connection.close()
    await collect(client, PROMPTS[0], request={"request_id": "after-it"})
    async with asyncio.timeout(SETTLE_SECONDS):
        while '"after-it"' not in stack.inference.log_tail(1000):  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)
    for service in (stack.registry, stack.inference):
        assert "forged" not in service.log_tail(1_000_000)

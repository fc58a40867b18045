"""The client against a socket that plays the engine."""

import asyncio
import gc
from contextlib import aclosing

import pytest
import zmq
import zmq.asyncio

from inference_service.engine.client import EngineClient
from inference_service.engine.event_queue import merge
from inference_service.types import (
    Abort,
    CancelCall,
    EngineReady,
    GenerateSpec,
    Hello,
    ListResident,
    LoadAdapter,
    Reply,
    RequestFailed,
    ResidentAdapter,
    Sampling,
    SequenceDelta,
    Started,
    StepOutput,
    Stop,
    Submit,
    TokenLogprobs,
    decode_engine_request,
    encode,
)
from shared.errors import AdapterInvalid, ClientTooSlow, EngineUnavailable, QueueFull, RequestIdReused

READY = EngineReady(64, 4, 10, 16, 1024, "cpu", "float32")


def spec(request_id="r", n=1):
    return GenerateSpec(request_id, [1, 2], Sampling(n=n), Stop(8))


class PlayedEngine:
    def __init__(self, address):
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)

    async def hear(self):
        self.client, payload = await asyncio.wait_for(self.socket.recv_multipart(), 60)
        return decode_engine_request(payload)

    async def say(self, message):
        await self.socket.send_multipart([self.client, encode(message)])

    async def greet(self):
        assert isinstance(await self.hear(), Hello)
        await self.say(READY)

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def address(tmp_path_factory):
    return f"ipc://{tmp_path_factory.mktemp('s')}/e.sock"


@pytest.fixture
async def engine(address):
    engine = PlayedEngine(address)
    yield engine
    engine.close()


@pytest.fixture
async def client(address):
    client = EngineClient(address, "api-0")
    yield client
    await client.close()


@pytest.fixture
async def connected(engine, client):
    hello = asyncio.create_task(client.hello())
    await engine.greet()
    assert await hello == READY
    return client


def delta(index, *ids, done=None, request_id="r"):
    return SequenceDelta(request_id, index, list(ids), None, done)


async def test_a_stream_ends_when_every_sequence_has(connected, engine):
    seen = []

    async def read():
        async for event in connected.generate(spec(n=2)):
            seen.append(event)

    stream = asyncio.create_task(read())
    assert isinstance(await engine.hear(), Submit)
    started = Started("r", 0, 0.1, 0.0)
    await engine.say(StepOutput(started=[started], deltas=[delta(0, 5, done="stop"), delta(0, 9, request_id="other")]))
    await until(lambda: len(seen) == 2)
    await engine.say(StepOutput(deltas=[delta(1, 6)]))
    await until(lambda: len(seen) == 3)
    await engine.say(StepOutput(deltas=[delta(1, 7, done="length")]))
    await stream
    assert seen == [started, delta(0, 5, done="stop"), delta(1, 6), delta(1, 7, done="length")]


async def until(is_so):
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.001)


async def _collect(client, request):
    return [event async for event in client.generate(request)]


async def test_a_slow_reader_gets_merged_deltas(connected, engine):
    async with aclosing(connected.generate(spec(n=2))) as stream:
        first = asyncio.create_task(anext(stream))
        await engine.hear()
        await engine.say(StepOutput(deltas=[delta(0, 1)]))
        assert await first == delta(0, 1)
        for token in (2, 3):
            await engine.say(StepOutput(deltas=[delta(0, token), delta(1, 10 * token)]))
        await engine.say(StepOutput(deltas=[delta(0, 4, done="stop"), delta(1, 40, done="length")]))
        await until(lambda: not connected._streams["r"].unfinished)
        assert [event async for event in stream] == [
            delta(0, 2, 3, 4, done="stop"),
            delta(1, 20, 30, 40, done="length"),
        ]


async def test_who_leaves_too_much_unread_loses_the_request(engine, address):
    client = EngineClient(address, "api-0", max_unread=5)
    hello = asyncio.create_task(client.hello())
    await engine.greet()
    await hello
    async with aclosing(client.generate(spec())) as stream:
        first = asyncio.create_task(anext(stream))
        await engine.hear()
        top = ((1, -1.0), (2, -2.0))
        await engine.say(StepOutput(deltas=[delta(0, 1)]))
        assert await first == delta(0, 1)
        scored = SequenceDelta("r", 0, [2], [TokenLogprobs(2, -0.5, top)])
        await engine.say(StepOutput(deltas=[scored]))  # a token and three logprobs
        assert await anext(stream) == scored  # what was read does not count any more
        await engine.say(StepOutput(deltas=[scored, delta(0, 3), delta(0, 4)]))
        assert await engine.hear() == Abort("r")
        with pytest.raises(ClientTooSlow):
            await anext(stream)
    await client.close()


def test_merging_keeps_logprobs_in_order():
    first = SequenceDelta("r", 0, [1], [TokenLogprobs(1, -1.0)])
    second = SequenceDelta("r", 0, [2], [TokenLogprobs(2, -2.0)], "stop", 2)
    assert merge(first, second) == SequenceDelta(
        "r", 0, [1, 2], [TokenLogprobs(1, -1.0), TokenLogprobs(2, -2.0)], "stop", 2
    )


async def test_leaving_early_and_cancelling_abort(connected, engine):
    async with aclosing(connected.generate(spec("a"))) as stream:
        first = asyncio.create_task(anext(stream))
        await engine.hear()
        await engine.say(StepOutput(deltas=[delta(0, 1, request_id="a")]))
        await first
    assert await engine.hear() == Abort("a")
    task = asyncio.create_task(_collect(connected, spec("b")))
    await engine.hear()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await engine.hear() == Abort("b")


async def test_aborting_one_sequence_leaves_the_others(connected, engine):
    stream = asyncio.create_task(_collect(connected, spec(n=2)))
    await engine.hear()
    connected.abort("r", 0)
    assert await engine.hear() == Abort("r", 0)
    await engine.say(StepOutput(deltas=[delta(0, 1), delta(1, 2, done="stop")]))
    assert await stream == [delta(1, 2, done="stop")]
    connected.abort("unknown")


async def test_failures_arrive_as_errors_after_what_came_before(connected, engine):
    stream = connected.generate(spec())
    first = asyncio.create_task(anext(stream))
    await engine.hear()
    await engine.say(
        StepOutput(deltas=[delta(0, 1)], failed=[RequestFailed("r", QueueFull("full", retry_after=2.0).record())])
    )
    assert await first == delta(0, 1)
    with pytest.raises(QueueFull) as caught:
        await anext(stream)
    assert caught.value.retry_after == 2.0


async def test_an_id_in_flight_is_refused(connected, engine):
    stream = connected.generate(spec())
    first = asyncio.create_task(anext(stream))
    await engine.hear()
    with pytest.raises(RequestIdReused):
        await anext(connected.generate(spec()))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_calls_get_their_own_replies(connected, engine):
    load = asyncio.create_task(connected.load_adapter("sha256:a", pinned=True, wait=True))
    listing = asyncio.create_task(connected.list_resident())
    first, second = await engine.hear(), await engine.hear()
    assert first == LoadAdapter(first.call_id, "sha256:a", True, True)
    assert isinstance(second, ListResident)
    resident = [ResidentAdapter("sha256:a", 10, 8, ("operator",), 0)]
    await engine.say(Reply(second.call_id, resident=resident))
    await engine.say(Reply(first.call_id, error=AdapterInvalid("bad").record()))
    assert await listing == resident
    with pytest.raises(AdapterInvalid):
        await load


async def test_a_call_given_up_is_cancelled(connected, engine):
    call = asyncio.create_task(connected.unload_adapter("sha256:a", force=False))
    heard = await engine.hear()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await engine.hear() == CancelCall(heard.call_id)


async def test_a_failed_hello_that_nobody_waits_for_is_not_logged(client, caplog):
    hello = asyncio.create_task(client.hello())
    await asyncio.sleep(0)
    hello.cancel()
    await asyncio.gather(hello, return_exceptions=True)
    client.engine_down()
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_no_engine_fails_at_once(client):
    with pytest.raises(EngineUnavailable):
        await anext(client.generate(spec()))
    with pytest.raises(EngineUnavailable):
        await client.list_resident()


@pytest.mark.parametrize("told", [True, False])
async def test_a_dead_engine_fails_everything_until_the_next_hello(connected, engine, address, told):
    stream = asyncio.create_task(_collect(connected, spec()))
    call = asyncio.create_task(connected.list_resident())
    await engine.hear()
    engine.close()
    if told:
        connected.engine_down()
    await asyncio.wait_for(connected.wait_down(), 60)
    for task in (stream, call):
        with pytest.raises(EngineUnavailable):
            await task
    with pytest.raises(EngineUnavailable):
        await anext(connected.generate(spec()))
    successor = PlayedEngine(address)
    hello = asyncio.create_task(connected.hello())
    await successor.greet()
    assert await hello == READY
    stream = asyncio.create_task(_collect(connected, spec()))
    assert isinstance(await successor.hear(), Submit)
    await successor.say(StepOutput(deltas=[delta(0, 1, done="stop")]))
    assert await stream == [delta(0, 1, done="stop")]
    successor.close()

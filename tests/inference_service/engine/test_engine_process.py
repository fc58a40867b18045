"""A real engine process with a tiny model: sockets, start, stop, and what happens when its neighbours die."""

import asyncio
import inspect
import os
import signal
import subprocess
import sys
from contextlib import aclosing

import msgspec
import pytest
import zmq
import zmq.asyncio

from inference_service.adapters.engine_port import EnginePort
from inference_service.engine.client import EngineClient
from inference_service.engine.config import EngineConfig
from inference_service.engine.loop import fits
from inference_service.engine.process import StartMessage
from inference_service.stats import TokenCounts
from inference_service.types import (
    Acquire,
    Acquired,
    AcquireFailed,
    BlobLayout,
    ChunkLayout,
    EngineStarted,
    GenerateSpec,
    Release,
    Sampling,
    SequenceDelta,
    Started,
    Stop,
    decode_adapter_request,
    encode,
)
from shared.errors import AdapterInvalid, AdapterMemory, AdapterUnloaded, Internal, InvalidArgument
from tests.inference_service.engine.tiny_model import ADAPTERS, build_tiny, oracle_logits

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

QV, ATTENTION, ALL = ADAPTERS
LONG = 2_000  # tokens of seconds, so that a request still runs however slow this process is meanwhile


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("tiny"))


class PlayedAdapterProcess:
    """Answers Acquire out of `tiny.acquired`, or with an error for unknown digests; keeps what it heard."""

    def __init__(self, address, tiny):
        self.tiny, self.heard, self.muted = tiny, [], set()
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)
        self.task = asyncio.create_task(self.serve())

    async def serve(self):
        while True:
            identity, payload = await self.socket.recv_multipart()
            message = decode_adapter_request(payload)
            self.heard.append(message)
            if isinstance(message, Acquire) and message.digest not in self.muted:
                answer = self.tiny.acquired.get(message.digest)
                answer = answer or AcquireFailed(message.digest, AdapterInvalid("broken file").record())
                await self.answer(identity, message, answer)

    async def answer(self, identity, asked, answer):
        answer = msgspec.structs.replace(answer, session=asked.session)
        await self.socket.send_multipart([identity, encode(answer)])

    def acquires(self, digest):
        """What it was asked of this adapter."""
        return [m for m in self.heard if isinstance(m, Acquire) and m.digest == digest]

    async def close(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.context.destroy(linger=0)


class Running:
    def __init__(self, folder, tiny, max_adapters=4):
        self.folder = folder
        self.api_address, self.adapter_address = f"ipc://{folder}/e.sock", f"ipc://{folder}/a.sock"
        self.fd = os.memfd_create("arena")
        os.write(self.fd, tiny.host.numpy().tobytes())
        config = EngineConfig(
            model=str(tiny.folder), device="cpu", dtype="float32", threads=1, kv_cache_bytes=1 << 20,
            max_batched_tokens=64, max_num_seqs=8, adapter_memory_bytes=1 << 18, max_adapters=max_adapters,
        )  # fmt: skip
        start = StartMessage(config, self.api_address, self.adapter_address, self.fd)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "inference_service.engine.process"],
            stdin=subprocess.PIPE, pass_fds=[self.fd], env=environment,
        )  # fmt: skip
        self.process.stdin.write(msgspec.json.encode(start) + b"\n")
        self.process.stdin.flush()

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        os.close(self.fd)


@pytest.fixture(scope="module")
def shared_engine(tiny, tmp_path_factory):
    running = Running(tmp_path_factory.mktemp("run"), tiny)
    yield running
    running.close()


@pytest.fixture
async def adapters(shared_engine, tiny):
    played = PlayedAdapterProcess(shared_engine.adapter_address, tiny)
    yield played
    await played.close()


@pytest.fixture
async def client(shared_engine, adapters):
    client = EngineClient(shared_engine.api_address, "api-0")
    ready = await asyncio.wait_for(client.hello(), 60)
    assert (ready.device, ready.dtype, ready.max_num_seqs, ready.max_model_len) == ("cpu", "float32", 8, 2048)
    yield client
    await client.close()


def spec(request_id, max_tokens=8, adapter=None, prompt=(5, 6, 7, 8), **more):
    sampling = more.pop("sampling", Sampling(temperature=0))
    return GenerateSpec(request_id, list(prompt), sampling, Stop(max_tokens, ignore_eos=True), adapter, **more)


async def collect(client, request):
    """Tokens by index."""
    tokens = {}
    async with asyncio.timeout(60):
        async for event in client.generate(request):
            if isinstance(event, SequenceDelta):
                tokens.setdefault(event.index, []).extend(event.token_ids)
    return tokens


async def eventually(condition):
    async with asyncio.timeout(60):
        while not (await met if inspect.isawaitable(met := condition()) else met):  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(0.01)


async def last_acquire(played, digest):
    """The one that came after the engine's greeting: what was sent before to another may come ahead of it."""

    def found():
        greeting = played.heard.index(EngineStarted())
        return [m for m in played.heard[greeting:] if isinstance(m, Acquire) and m.digest == digest]

    await eventually(found)
    return found()[-1]


def greedy(tiny, prompt, count, digest):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(oracle_logits(tiny, tokens, digest)[-1].argmax()))
    return tokens[len(prompt) :]


async def test_base_and_adapters_at_the_same_time(client, adapters, tiny):
    digests = [None, QV, ATTENTION, ALL]
    answers = await asyncio.gather(*(collect(client, spec(f"mixed-{d}", adapter=d)) for d in digests))
    for digest, answer in zip(digests, answers, strict=True):
        assert answer == {0: greedy(tiny, (5, 6, 7, 8), 8, digest)}
    assert adapters.heard[0] == EngineStarted()
    assert {m.digest for m in adapters.heard if isinstance(m, Release)} == {QV, ATTENTION, ALL}
    assert {r.digest for r in await client.list_resident()} == {QV, ATTENTION, ALL}


async def test_n_and_logprobs(client):
    request = spec("n", 5, sampling=Sampling(n=2, seed=3), logprobs=2, prompt_logprobs=1)
    events = [event async for event in client.generate(request)]
    assert isinstance(events[0], Started)
    assert len(events[1].tokens) == 3
    for index in range(2):
        deltas = [e for e in events if isinstance(e, SequenceDelta) and e.index == index]
        assert sum(len(d.token_ids) for d in deltas) == 5
        assert all(len(entry.top) == 2 and entry.logprob <= 0 for d in deltas for entry in d.logprobs)
        assert deltas[-1].finish_reason == "length"


async def test_an_aborted_request_frees_its_adapter(client):
    async with aclosing(client.generate(spec("long", LONG, adapter=QV))) as stream:
        await anext(stream)

    async def idle():
        return all(r.active_requests == 0 for r in await client.list_resident())

    await eventually(idle)


async def test_bad_requests_and_bad_adapters_fail_alone(client, adapters, tiny):
    far = Acquired("sha256:far", 1 << 40, next(iter(tiny.acquired.values())).layout)
    adapters.tiny = tiny._replace(acquired={**tiny.acquired, "sha256:far": far})
    good = asyncio.create_task(collect(client, spec("good")))
    with pytest.raises(InvalidArgument, match="prompt"):
        await collect(client, spec("empty", prompt=()))
    with pytest.raises(InvalidArgument, match="token"):
        await collect(client, spec("unknown token", prompt=(4000,)))
    with pytest.raises(AdapterInvalid, match="broken file"):
        await collect(client, spec("broken", adapter="sha256:broken"))
    with pytest.raises(Internal):
        await collect(client, spec("outside", adapter="sha256:far"))
    assert len((await good)[0]) == 8


async def test_load_pin_unload_and_force(client, adapters):
    await client.load_adapter(ATTENTION, pinned=True, wait=True)
    assert [r.pinned for r in await client.list_resident() if r.digest == ATTENTION] == [True]
    with pytest.raises(AdapterInvalid):
        await client.load_adapter("sha256:broken", pinned=False, wait=True)
    stream = client.generate(spec("running", LONG, adapter=ATTENTION))
    await anext(stream)
    await client.unload_adapter(ATTENTION, force=True)
    with pytest.raises(AdapterUnloaded):
        async for _ in stream:
            pass
    assert ATTENTION not in {r.digest for r in await client.list_resident()}
    drained = asyncio.create_task(collect(client, spec("drains", 30, adapter=ATTENTION)))
    await client.load_adapter(ATTENTION, pinned=False, wait=True)
    await client.unload_adapter(ATTENTION, force=False)
    assert len((await drained)[0]) == 30


async def test_a_load_that_nobody_waits_for_begins_at_once(client, adapters):
    await client.unload_adapter(ALL, force=True)
    adapters.muted.add(ALL)
    await asyncio.wait_for(client.load_adapter(ALL, pinned=False, wait=False), 60)
    await eventually(lambda: adapters.acquires(ALL))
    adapters.muted.clear()
    await adapters.answer(b"engine", adapters.acquires(ALL)[-1], adapters.tiny.acquired[ALL])

    async def is_there():
        return ALL in {r.digest for r in await client.list_resident()}

    await eventually(is_there)


async def test_pins_outlive_the_adapter_process_and_end_with_the_word_of_the_next(shared_engine, client, adapters):
    before = EnginePort(shared_engine.api_address)
    for digest in (QV, ATTENTION):
        await before.load(digest, pinned=True)
    await client.load_adapter(QV, pinned=True, wait=True)
    await before.close()
    after = EnginePort(shared_engine.api_address)
    pins = {r.digest: r.pinned_by for r in await after.residents() if r.pinned}
    assert pins == {QV: ("operator", "registry"), ATTENTION: ("registry",)}
    assert {len(tokens) for tokens in (await collect(client, spec("pinned", adapter=ATTENTION))).values()} == {8}
    await after.keep_pins({ALL})
    held = {r.digest: r.pinned_by for r in await after.residents()}
    assert (held[QV], held[ATTENTION]) == (("operator",), ())
    await after.close()
    await client.unload_adapter(QV, force=False)


async def test_it_counts_what_it_serves_and_shows_what_it_holds(client, adapters):
    before = await client.stats()
    await client.unload_adapter(QV, force=True)
    cold = spec("cold", 6, adapter=QV, adapter_tier="disk", prompt=range(40, 60), prepare_seconds=3.0)
    assert len((await collect(client, cold))[0]) == 6
    warm = spec("warm", 3, adapter=QV, adapter_tier="host", prompt=range(40, 60))
    await collect(client, warm)
    await collect(client, spec("base", 2, prompt=(9, 8, 7)))
    adapters.muted.add(ALL)
    await client.unload_adapter(ALL, force=True)
    waiting = asyncio.create_task(collect(client, spec("waiting", 4, adapter=ALL)))

    async def is_acquiring():
        return [load.phase for load in (await client.stats()).loads_in_flight] == ["ACQUIRING"]

    await eventually(is_acquiring)
    stats = await client.stats()
    waiting.cancel()

    def grown(count):
        return count(stats) - count(before)

    assert grown(lambda s: s.tokens.prompt) == 43
    assert grown(lambda s: s.tokens.generated) == 11
    assert grown(lambda s: s.tokens_by_adapter.get(QV, TokenCounts()).generated) == 9
    assert grown(lambda s: s.tokens_by_adapter.get("", TokenCounts()).prompt) == 3
    assert {tier: grown(lambda s, tier=tier: s.hits.get(tier, 0)) for tier in ("gpu", "host", "disk")} == {
        "gpu": 1, "host": 1, "disk": 1,
    }  # fmt: skip
    assert grown(lambda s: s.load_seconds["total"].count) == 1
    parts = ("prepare", "acquire", "place", "copy")
    in_all = sum(grown(lambda s, phase=phase: s.load_seconds[phase].sum) for phase in parts)
    assert 3.0 < grown(lambda s: s.load_seconds["total"].sum) < in_all + 1e-6  # another load is still ACQUIRING
    assert grown(lambda s: s.prefix_tokens_queried) == 43
    assert grown(lambda s: s.prefix_tokens_hit) == 16  # a block of the prompt that was computed for `cold`
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_for_adapter) == (0, 1, 1)
    assert (stats.requests_running, stats.requests_waiting) == ({}, {ALL: 1})
    assert (stats.adapters_waiting, stats.waited_longest > 0) == ([ALL], True)
    assert [load.digest for load in stats.loads_in_flight] == [ALL]
    assert stats.kv_blocks.used == 0
    assert stats.slots.total == 4
    resident = await client.list_resident()
    assert (stats.slots.used, stats.arena.used) == (len(resident), sum(r.size_bytes for r in resident))
    assert stats.arena.total == 1 << 18
    assert (stats.needless_reloads, stats.num_preemptions) == (0, 0)


async def test_when_everything_is_pinned_others_hear_why_and_when_to_retry(tiny, tmp_path):
    """Nothing blocks, nobody is evicted, pinned adapters and the base model go on; an unload lets the next one in."""
    running = Running(tmp_path, tiny, max_adapters=2)
    adapters = PlayedAdapterProcess(running.adapter_address, tiny)
    client = EngineClient(running.api_address, "api-0")
    try:
        await asyncio.wait_for(client.hello(), 60)
        for digest in (QV, ATTENTION):
            await client.load_adapter(digest, pinned=True, wait=True)
        streams = [asyncio.create_task(collect(client, spec(f"on {d}", 60, adapter=d))) for d in (QV, None)]
        for pinned in (True, False):
            with pytest.raises(AdapterMemory, match=r"pinned adapters take all 2 slots; .*--max-adapters") as caught:
                await asyncio.wait_for(client.load_adapter(ALL, pinned=pinned, wait=True), 60)
            assert 0 < caught.value.retry_after <= 5.0
        with pytest.raises(AdapterMemory, match="adapter unload NAME") as caught:
            await asyncio.wait_for(collect(client, spec("refused", adapter=ALL)), 60)
        assert 0 < caught.value.retry_after <= 5.0
        assert [len((await stream)[0]) for stream in streams] == [60, 60]
        assert [(r.digest, r.pinned) for r in await client.list_resident()] == [(ATTENTION, True), (QV, True)]
        await client.unload_adapter(ATTENTION, force=False)
        assert (await collect(client, spec("served", adapter=ALL)))[0] == greedy(tiny, (5, 6, 7, 8), 8, ALL)
        assert (await client.stats()).load_failures == {"ADAPTER_MEMORY": 1}  # remembered for the others
    finally:
        await client.close()
        await adapters.close()
        running.close()


async def test_an_unload_given_up_lets_new_requests_run(client, shared_engine):
    async def held_by():
        return [r.active_requests for r in await client.list_resident() if r.digest == QV]

    async with aclosing(client.generate(spec("long", LONG, adapter=QV))) as stream:
        await anext(stream)
        await client.load_adapter(QV, pinned=True, wait=True)
        unload = asyncio.create_task(client.unload_adapter(QV, force=False))
        assert await held_by() == [1]  # the unload has been heard
        unload.cancel()
        assert len((await collect(client, spec("new", 3, adapter=QV)))[0]) == 3
        assert await held_by() == [1]


async def test_a_new_adapter_process_is_asked_again(client, adapters, shared_engine, tiny):
    await client.unload_adapter(ALL, force=True)
    adapters.muted.add(ALL)
    waiting = asyncio.create_task(collect(client, spec("waiting", adapter=ALL)))
    await eventually(lambda: adapters.acquires(ALL))
    asked = adapters.acquires(ALL)[-1]
    await adapters.close()
    assert len((await collect(client, spec("meanwhile", adapter=None)))[0]) == 8
    successor = PlayedAdapterProcess(shared_engine.adapter_address, tiny)
    successor.muted.add(ALL)
    try:
        await eventually(lambda: EngineStarted() in successor.heard)
        again = await last_acquire(successor, ALL)
        assert again.session != asked.session
        # Of the time before: nobody holds that blob any more, and it is not read.
        await successor.answer(b"engine", asked, AcquireFailed(ALL, AdapterInvalid("of the time before").record()))
        await successor.answer(b"engine", again, tiny.acquired[ALL])
        assert (await waiting)[0] == greedy(tiny, (5, 6, 7, 8), 8, ALL)
    finally:
        await successor.close()


async def test_a_restarted_api_process_starts_clean(client, shared_engine):
    stream = client.generate(spec("orphan", LONG, adapter=QV))
    await anext(stream)
    again = EngineClient(shared_engine.api_address, "api-0")
    await again.hello()
    assert all(r.active_requests == 0 for r in await again.list_resident())
    assert len((await collect(again, spec("orphan")))[0]) == 8
    await again.close()
    client.engine_down()
    with pytest.raises(Exception, match="engine"):
        async for _ in stream:
            pass


async def test_unreadable_messages_are_skipped(client, shared_engine):
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(shared_engine.api_address)
    await socket.send(b"\xc1 not msgpack")
    await socket.send_multipart([b"too", b"many", b"parts"])
    assert len((await collect(client, spec("after")))[0]) == 8
    context.destroy(linger=0)


@pytest.mark.parametrize("end", ["sigterm", "parent"])
async def test_the_end(tiny, tmp_path, end):
    running = Running(tmp_path, tiny)
    try:
        client = EngineClient(running.api_address, "api-0")
        await asyncio.wait_for(client.hello(), 60)
        stream = client.generate(spec("running", LONG))
        await anext(stream)
        running.process.send_signal(signal.SIGINT)
        await anext(stream)
        if end == "sigterm":
            running.process.send_signal(signal.SIGTERM)
        else:
            running.process.stdin.close()
        assert await asyncio.to_thread(running.process.wait, 60) == 0
        with pytest.raises(Exception, match="engine"):
            async for _ in stream:
                pass
        await client.close()
    finally:
        running.close()


def test_blobs_must_lie_within_the_arena():
    layout = BlobLayout(64, 1, "float32", (ChunkLayout(0, 0, 64, ()),))
    assert fits(Acquired("d", 16, layout), 80)
    assert not fits(Acquired("d", 32, layout), 80)
    assert not fits(Acquired("d", -16, layout), 80)
    beyond = BlobLayout(64, 1, "float32", (ChunkLayout(0, 16, 64, ()),))
    assert not fits(Acquired("d", 0, beyond), 80)

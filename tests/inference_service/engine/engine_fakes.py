"""A model whose next token is a function of the tokens before it, and adapters that become ready when told to."""

from itertools import islice

from inference_service.engine.blocks import BlockAllocator
from inference_service.engine.config import EngineLimits
from inference_service.engine.engine import Engine
from inference_service.engine.scheduler import Scheduler
from inference_service.engine.step import NOT_FINITE, Computed, StepResult
from inference_service.lora.adapter import AdapterState
from inference_service.lora.residents import Handle, StaleHandle
from inference_service.types import GenerateSpec, Sampling, Stop, TokenLogprobs
from shared.errors import AdapterInvalid


def next_token(token_ids, index, vocab_size=97):
    return (sum((i + 1) * t for i, t in enumerate(token_ids)) + 31 * index) % vocab_size


def known_tokens(chunk):
    """Read or not: what the device has when the chunk runs."""
    sequence = chunk.sequence
    tokens = list(sequence.token_ids)
    for _ in range(sequence.num_pending - chunk.samples):
        tokens.append(next_token(tokens, sequence.index))
    return tokens


def content(chunk, tokens, position):
    """What keys and values at a position depend on."""
    spec = chunk.sequence.request.spec
    adapter = (spec.adapter_digest, spec.adapter_start) if position >= spec.adapter_start else (None, 0)
    return tokens[: position + 1], adapter


class FakeRunner:
    """Checks what a real model relies on: every position's K,V was written once, from the same tokens, before use."""

    vocab_size = 97
    eos_ids = ()

    def __init__(self, block_size, looks_ahead=False):
        self.block_size = block_size
        self.looks_ahead = looks_ahead
        self.cells = {}  # (block, offset) -> tokens up to there, and the adapter that has acted, with where it began
        self.steps, self.slots = [], []
        self.explode = False
        self.overflows = set()  # digests of adapters

    def launch(self, schedule):
        if self.explode:
            raise RuntimeError("boom")
        self.steps.append(schedule)
        self.slots.append([chunk.sequence.slot for chunk in schedule.chunks])
        assert all(chunk.length == 1 for chunk in schedule.chunks[: schedule.num_decodes])
        for chunk in schedule.chunks:
            tokens = known_tokens(chunk)
            assert chunk.length == 1 or chunk.end <= len(chunk.sequence.token_ids), "computes what nobody has read"
            for position in range(max(chunk.start, chunk.sequence.num_cached), chunk.start + chunk.length):
                self.cells[self._cell(chunk, position)] = content(chunk, tokens, position)
        for chunk in schedule.chunks:
            for position in range(chunk.start + chunk.length):
                assert self.cells[self._cell(chunk, position)] == content(chunk, known_tokens(chunk), position)
        ids = [
            NOT_FINITE
            if c.sequence.request.spec.adapter_digest in self.overflows
            else next_token(known_tokens(c), c.sequence.index)
            for c in schedule.chunks
            if c.samples
        ]
        scores = [
            [TokenLogprobs(c.sequence.token_ids[p + 1], -float(p)) for p in c.scored_positions] for c in schedule.chunks
        ]
        return Computed(StepResult(ids, [None] * len(ids), scores))

    def _cell(self, chunk, position):
        return chunk.sequence.blocks[position // self.block_size], position % self.block_size


class UniformRunner:
    """Every token is 1: for schedules that go on for thousands of steps."""

    vocab_size = 97
    eos_ids = ()

    def __init__(self, looks_ahead=False):
        self.looks_ahead = looks_ahead
        self.lengths = []  # of every step's chunks, with their requests' ids

    def launch(self, schedule):
        self.lengths.append([(chunk.sequence.request.spec.request_id, chunk.length) for chunk in schedule.chunks])
        count = sum(chunk.samples for chunk in schedule.chunks)
        return Computed(StepResult([1] * count, [None] * count, [[] for _ in schedule.chunks]))


class FakeAdapters:
    def __init__(self, num_slots=4):
        self.num_slots = num_slots
        self.resident = {}
        self.users, self.by_slot = {}, {}
        self.wanted = []
        self.stale = False
        self.broken = set()

    def want(self, line):
        for digest, *_ in islice(line, self.num_slots):
            self.require(digest)

    def is_pinned(self, digest):
        return False

    def is_over_quota(self, digest):
        return False

    def require(self, digest, tenant=""):
        if digest not in self.wanted and digest not in self.resident:
            self.wanted.append(digest)
        return self.state(digest)

    def arrive(self):
        """The first wanted adapter becomes ready, if a slot can be had."""
        idle = [d for d in self.resident if not self.users.get(d)]
        if not self.wanted or (len(self.resident) >= self.num_slots and not idle):
            return
        slot = len(self.resident) if len(self.resident) < self.num_slots else self.resident.pop(idle[0])
        self.resident[self.wanted.pop(0)] = slot

    def state(self, digest):
        if digest in self.broken:
            return AdapterState.FAILED
        return AdapterState.READY if digest in self.resident else AdapterState.ACQUIRING

    def error(self, digest):
        return AdapterInvalid("broken", metadata={"adapter": digest}) if digest in self.broken else None

    def acquire(self, digest):
        self.users[digest] = self.users.get(digest, 0) + 1
        self.by_slot[self.resident[digest]] = digest
        return Handle(self.resident[digest], 1)

    def check(self, handle):
        if self.stale:
            raise StaleHandle(handle)

    def release(self, handle):
        digest = self.by_slot[handle.slot]
        assert self.users[digest] > 0
        self.users[digest] -= 1


def build_engine(
    *,
    num_blocks=16,
    block_size=4,
    max_num_seqs=4,
    budget=8,
    max_model_len=64,
    max_queue=64,
    prefix_caching=True,
    looks_ahead=False,
    runner=None,
    adapters=None,
    **more,
):
    limits = EngineLimits(
        max_model_len=min(max_model_len, num_blocks * block_size),
        max_num_seqs=max_num_seqs,
        max_batched_tokens=budget,
        max_queue=max_queue,
        **more,
    )
    blocks = BlockAllocator(num_blocks, block_size, prefix_caching)
    runner = runner or FakeRunner(block_size, looks_ahead)
    return Engine(runner, Scheduler(limits, blocks, adapters or FakeAdapters()), "weights")


def spec(request_id, prompt, max_tokens=4, *, n=1, adapter=None, stop=None, **more):
    return GenerateSpec(
        request_id, list(prompt), Sampling(n=n, temperature=0), stop or Stop(max_tokens), adapter_digest=adapter, **more
    )


def expected_tokens(prompt, count, index=0):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, index))
    return tokens[len(prompt) :]

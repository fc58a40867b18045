"""Which sequences compute which tokens in the next step: continuous batching with chunked prefill, torch-free."""

import heapq
from array import array
from bisect import insort
from collections.abc import Callable, Iterator
from typing import Protocol

from inference_service.engine.blocks import BlockAllocator, extend_chain
from inference_service.engine.config import EngineLimits
from inference_service.engine.sequence import Request, Sequence, State
from inference_service.engine.step import Chunk, Failure, Schedule
from inference_service.lora.adapter import AdapterState
from inference_service.lora.slots import Handle
from shared.errors import DeadlineUnreachable, LoraplexError, QueueFull

RETRY_AFTER_SECONDS = 1.0


class Adapters(Protocol):
    """What the scheduler asks of the slot pool; `lora.adapter.AdapterPool` is one."""

    def require(self, digest: str) -> AdapterState:
        """Want an adapter as soon as possible, and keep it from being the next victim."""
        ...

    def state(self, digest: str) -> AdapterState | None: ...

    def error(self, digest: str) -> LoraplexError | None:
        """Why it is FAILED."""
        ...

    def acquire(self, digest: str) -> Handle:
        """Use a READY adapter: it keeps its slot until `release`."""
        ...

    def release(self, handle: Handle) -> None: ...


class TokenBudget:
    """Tokens that this step may still compute."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def take(self, wanted: int) -> int:
        taken = min(wanted, self.left)
        self.left -= taken
        return taken


def first_come_by_priority(sequence: Sequence) -> tuple[float, float, int, int]:
    """The order among sequences: higher priority, then earlier arrival. The last one is preempted first."""
    request = sequence.request
    return -request.spec.priority, request.spec.arrival, request.order, sequence.index


class Scheduler:
    """Owns requests from `add` until they finish, fail or are aborted, and the blocks and adapters they hold.

    Args:
        limits: Budgets.
        blocks: The KV cache's blocks.
        adapters: The slot pool.
        policy: Sort key among sequences, fixed for a sequence's life.
    """

    def __init__(
        self,
        limits: EngineLimits,
        blocks: BlockAllocator,
        adapters: Adapters,
        policy: Callable[[Sequence], tuple[float, ...]] = first_come_by_priority,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.adapters = adapters
        self.policy = policy
        self.requests: dict[tuple[bytes, str], Request] = {}
        self.waiting: list[Sequence] = []  # both lists are kept sorted by policy
        self.running: list[Sequence] = []
        self.held_adapters: set[str] = set()  # being unloaded: not asked for
        self._deadlines: list[tuple[float, int, Request]] = []
        self._started: list[Request] = []

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request whose spec has been checked.

        Raises:
            QueueFull: with the seconds after which to retry.
        """
        if self.waiting and len(self.waiting) + len(request.sequences) > self.limits.max_queue:
            raise QueueFull(
                f"{len(self.waiting)} sequences are waiting, the limit is {self.limits.max_queue}",
                retry_after=RETRY_AFTER_SECONDS,
            )
        self.requests[request.key] = request
        for sequence in request.sequences:
            insort(self.waiting, sequence, key=self.policy)
        if request.spec.deadline is not None:
            heapq.heappush(self._deadlines, (request.spec.deadline, request.order, request))
            if len(self._deadlines) > 2 * len(self.requests) + 64:  # forget finished requests with far deadlines
                self._deadlines = [entry for entry in self._deadlines if entry[2].live]
                heapq.heapify(self._deadlines)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence and free what it holds. Twice is once."""
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.RUNNING:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED
        if not sequence.request.live:
            self.requests.pop(sequence.request.key, None)

    def drop(self, request: Request) -> None:
        """End all sequences of a request."""
        for sequence in request.sequences:
            self.finish(sequence)

    def abort(self, key: tuple[bytes, str], index: int | None = None) -> None:
        """Free what a request, or one of its sequences, holds. Unknown ones are ignored."""
        request = self.requests.get(key)
        if request is None:
            return
        for sequence in list(request.sequences):
            if index is None or sequence.index == index:
                self.finish(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def next_deadline(self) -> float | None:
        """The earliest deadline of a request that is still here."""
        while self._deadlines and not self._deadlines[0][2].live:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # ---- one step

    def schedule(self, now: float) -> Schedule:
        """The next step at time `now`. The caller runs it, and reports every chunk to `advance` when it is done.

        It may be called again before that: sequences then go on behind tokens that nobody has read yet.
        """
        failed = (*self._expired(now), *self._failed_adapters(now))
        budget = TokenBudget(self.limits.max_batched_tokens)
        chunks = [*self._decodes(budget), *self._prefills(budget), *self._admissions(budget)]
        decodes = sorted((c for c in chunks if c.length == 1), key=_slot)
        prefills = sorted((c for c in chunks if c.length > 1), key=_slot)
        started, self._started = tuple(self._started), []
        return Schedule((*decodes, *prefills), len(decodes), started, failed)

    def advance(self, chunk: Chunk) -> None:
        """`chunk` has been computed: its full blocks may be found by others, and its token, if any, is read next."""
        sequence, blocks = chunk.sequence, self.blocks
        sequence.num_pending -= chunk.samples
        if sequence.state is not State.RUNNING:  # it ended or was preempted since
            return
        if chunk.end >= sequence.num_prompt:
            sequence.request.prompt_computed = True
        num_full = chunk.end // blocks.block_size
        if blocks.prefix_caching and num_full > sequence.num_named:
            self._extend_hashes(sequence, num_full)
            for index in range(sequence.num_named, num_full):
                blocks.name(sequence.blocks[index], sequence.hashes[index])
            sequence.num_named = num_full

    def check_integrity(self) -> None:
        """Raise AssertionError unless lists, states, blocks and requests agree."""
        self.blocks.check_integrity([sequence.blocks for sequence in self.running])
        assert all(sequence.state is State.RUNNING for sequence in self.running)
        assert all(s.state is State.WAITING and not s.blocks and s.num_computed == 0 for s in self.waiting)
        for line in (self.waiting, self.running):
            assert line == sorted(line, key=self.policy)
        live = {id(s) for request in self.requests.values() for s in request.live}
        assert live == {id(s) for s in (*self.waiting, *self.running)}, "requests and lines disagree"
        assert len(self.running) <= self.limits.max_num_seqs

    # ---- the batch policy's three parts

    def _decodes(self, budget: TokenBudget) -> Iterator[Chunk]:
        for sequence in tuple(self.running):
            if sequence.remaining == 1 and not self._has_enough(sequence) and self._make_room(sequence):
                yield _launch(sequence, budget.take(1))

    def _prefills(self, budget: TokenBudget) -> Iterator[Chunk]:
        for sequence in tuple(self.running):
            if sequence.remaining > 1 and budget.left:
                yield _launch(sequence, budget.take(sequence.remaining))

    def _admissions(self, budget: TokenBudget) -> Iterator[Chunk]:
        """A sequence that waits for its adapter or its prompt lets others pass; one that waits for memory does not."""
        for sequence in tuple(self.waiting):
            if not budget.left or len(self.running) >= self.limits.max_num_seqs:
                return
            if self._is_ready(sequence):
                if not self._admit(sequence):
                    return
                yield _launch(sequence, budget.take(sequence.remaining))

    # ---- waiting

    def _expired(self, now: float) -> Iterator[Failure]:
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            request = heapq.heappop(self._deadlines)[2]
            self.drop(request)
            yield Failure(request, DeadlineUnreachable("the deadline passed before the answer was complete"))

    def _failed_adapters(self, now: float) -> Iterator[Failure]:
        """Ask for every waiting adapter in order, note those that came, and fail the requests of those that cannot."""
        states: dict[str, AdapterState] = {}
        for request in dict.fromkeys(sequence.request for sequence in self.waiting):
            digest = request.spec.adapter_digest
            if digest is None or digest in self.held_adapters:
                continue
            if digest not in states:
                states[digest] = self.adapters.require(digest)
            error = self.adapters.error(digest) if states[digest] is AdapterState.FAILED else None
            if error is not None:
                self.drop(request)
                yield Failure(request, error)
            elif states[digest] is not AdapterState.READY:
                request.waited_for_adapter = True
            elif request.adapter_ready_at is None:
                request.adapter_ready_at = now
        self._touch_backwards([digest for digest, state in states.items() if state is AdapterState.READY])

    def _touch_backwards(self, digests: list[str]) -> None:
        """So that of the waiting adapters the first is evicted last."""
        for digest in reversed(digests):
            self.adapters.require(digest)

    def _is_ready(self, sequence: Sequence) -> bool:
        request = sequence.request
        digest = request.spec.adapter_digest
        if digest is not None and self.adapters.state(digest) is not AdapterState.READY:
            return False
        if sequence.num_pending:  # preempted, and its last token is not read yet
            return False
        return request.prompt_computed or sequence is request.leader

    def _has_enough(self, sequence: Sequence) -> bool:
        """Whether it will end by length as soon as its pending token is read."""
        at_most = sequence.request.spec.stop.max_tokens
        return sequence.num_pending > 0 and (
            sequence.num_sampled >= at_most or sequence.num_tokens >= self.limits.max_model_len
        )

    # ---- memory

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its blocks and its adapter, if there is room for all its known tokens.

        One block per running sequence stays free, so that an admission does not cause a preemption at once.
        """
        blocks, spec = self.blocks, sequence.request.spec
        cached = self._cached_blocks(sequence)
        num_new = blocks.blocks_for(len(sequence.token_ids)) - len(cached)
        if num_new + blocks.num_free_among(cached) + len(self.running) > blocks.num_free:
            return False
        blocks.acquire(cached)
        sequence.blocks = array("i", cached + blocks.allocate(num_new))
        sequence.num_cached = len(cached) * blocks.block_size
        sequence.num_computed = min(
            sequence.num_cached, len(sequence.token_ids) - 1
        )  # the last one's logits are needed
        sequence.num_named = len(cached)
        sequence.handle = None if spec.adapter_digest is None else self.adapters.acquire(spec.adapter_digest)
        sequence.state = State.RUNNING
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=self.policy)
        if not sequence.request.started:
            sequence.request.started = True
            self._started.append(sequence.request)
        return True

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest cached prefix, all of it at best."""
        if not self.blocks.prefix_caching or sequence.wants_prompt_logprobs:
            return []
        num_full = len(sequence.token_ids) // self.blocks.block_size
        self._extend_hashes(sequence, num_full)
        return self.blocks.find(sequence.hashes[:num_full])

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        seed = sequence.request.cache_seed
        extend_chain(sequence.hashes, seed, sequence.token_ids, self.blocks.block_size, num_blocks)

    def _make_room(self, sequence: Sequence) -> bool:
        """Blocks for all known tokens of a running sequence, preempting from the end of the line, itself at worst."""
        if sequence.state is not State.RUNNING:
            return False
        missing = self.blocks.blocks_for(sequence.num_tokens) - len(sequence.blocks)
        while missing > self.blocks.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks.extend(self.blocks.allocate(missing))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue with its tokens; what it had computed is recomputed, or found in the prefix cache."""
        self._stop(sequence)
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=self.policy)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.release(sequence.blocks)
        if sequence.handle is not None:
            self.adapters.release(sequence.handle)
        sequence.blocks = array("i")
        sequence.num_computed = sequence.num_named = 0
        sequence.handle = None


def _slot(chunk: Chunk) -> int:
    return chunk.sequence.slot


def _launch(sequence: Sequence, length: int) -> Chunk:
    """The sequence's next `length` tokens; it goes on behind them."""
    start, end = sequence.num_computed, sequence.num_computed + length
    scored = range(0)
    if sequence.wants_prompt_logprobs:
        request = sequence.request
        scored = range(max(start, request.num_scored), min(end, sequence.num_prompt - 1))
        request.num_scored = max(request.num_scored, scored.stop)
    chunk = Chunk(sequence, start, length, samples=end == sequence.num_tokens, scored_positions=scored)
    sequence.num_computed = end
    sequence.num_pending += chunk.samples
    return chunk

"""Which sequences compute which tokens in the next step: continuous batching with chunked prefill, torch-free.

Every running sequence that decodes has its token in every step; prompts share what is left of the step's tokens in fair
order (`fairness`), whether they are under way or still wait. A sequence that waits for its adapter or its prompt lets
others pass; one that waits for memory does not, and preempts whoever is too far ahead of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from inference_service.engine.adapter_needs import AdapterNeeds
from inference_service.engine.adapter_needs import Adapters as NeededAdapters
from inference_service.engine.blocks import BlockAllocator
from inference_service.engine.config import EngineLimits
from inference_service.engine.deadlines import Deadlines
from inference_service.engine.fairness import FairQueue
from inference_service.engine.flows import Tenant
from inference_service.engine.kv_memory import KvMemory
from inference_service.engine.quotas import TenantLimits
from inference_service.engine.running import Adapters as RunningAdapters
from inference_service.engine.running import RunningSet
from inference_service.engine.sequence import Request, Sequence, State
from inference_service.engine.step import Chunk, Failure, Schedule
from inference_service.engine.wait_estimate import WaitEstimate
from inference_service.lora.residents import Handle
from shared.errors import DeadlineUnreachable, QueueFull

RETRY_AFTER_SECONDS = 1.0


class Adapters(NeededAdapters, RunningAdapters, Protocol):
    """What the scheduler asks of the slot pool; `lora.pool.AdapterPool` is one."""

    def check(self, handle: Handle) -> None:
        """Raise StaleHandle unless the slot is still that adapter's."""
        ...


class Scheduler:
    """Owns requests from `add` until they finish, fail or are aborted, and the blocks and adapters they hold.

    Args:
        limits: Budgets.
        blocks: The KV cache's blocks.
        adapters: The slot pool.
    """

    def __init__(self, limits: EngineLimits, blocks: BlockAllocator, adapters: Adapters) -> None:
        self.limits = limits
        self.blocks = blocks
        self.adapters = adapters
        self.requests: dict[tuple[bytes, str], Request] = {}
        self.num_preemptions = 0
        self.prefix_tokens_queried = 0
        self.prefix_tokens_hit = 0
        self._queue = FairQueue(limits.max_batched_tokens, limits.max_num_seqs)
        self._needs = AdapterNeeds(self._queue, adapters, limits.adapter_age_limit)
        self._memory = KvMemory(blocks)
        self._running = RunningSet(self._queue, self._memory, adapters)
        self.running = self._running.sequences
        self._tenant_limits = TenantLimits(limits.max_queued_per_tenant, limits.max_running_per_tenant)
        self._deadlines = Deadlines()
        self._started: list[Request] = []
        self._waits = WaitEstimate()
        self._now = 0.0
        self._step = StepPlan()

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request whose spec has been checked.

        Raises:
            QueueFull, TenantQuota: with the seconds after which to retry.
            DeadlineUnreachable: it would still wait when its deadline passes.
        """
        queue, spec, count = self._queue, request.spec, len(request.sequences)
        if queue.num_waiting and queue.num_waiting + count > self.limits.max_queue:
            raise QueueFull(
                f"{queue.num_waiting} sequences are waiting, the limit is {self.limits.max_queue}",
                metadata={"limit": "queue", "value": str(self.limits.max_queue)},
                # Before those have started there is no more room than for the first who come back.
                retry_after=self._waits.seconds(queue.num_waiting, spec.arrival) or RETRY_AFTER_SECONDS,
            )
        request.flow = queue.flow(spec.tenant, spec.adapter_digest)
        self._tenant_limits.check_queued(request.flow.tenant.num_waiting, count, RETRY_AFTER_SECONDS)
        if spec.deadline is not None:
            self._waits.check(spec.deadline, queue.num_ahead(request.sequences[0]), spec.arrival)
        self.requests[request.key] = request
        for sequence in request.sequences:
            queue.wait(sequence)
        self._needs.keep(request.flow)
        self._deadlines.add(request, len(self.requests))

    def finish(self, sequence: Sequence) -> None:
        """End a sequence and free what it holds. Twice is once."""
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.RUNNING:
            self._running.stop(sequence)
        else:
            self._queue.leave(sequence)
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
        return bool(self.running or self._queue.num_waiting)

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return self._queue.num_waiting

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences in the queue: those of the base model, then by adapter, the most urgent first."""
        flows = (*(flow for flow in self._queue.waiting if flow.digest is None), *self._needs.in_order())
        return [sequence for flow in flows for sequence in flow.waiting]

    @property
    def held_adapters(self) -> set[str]:
        """Digests that are being unloaded: they are not asked for."""
        return self._needs.held

    def next_deadline(self) -> float | None:
        """The earliest deadline of a request that is still here."""
        return self._deadlines.earliest()

    # ---- one step

    def schedule(self, now: float) -> Schedule:
        """The next step at time `now`. The caller runs it, and reports every chunk to `advance` when it is done.

        It may be called again before that: sequences then go on behind tokens that nobody has read yet.
        """
        self._now = now
        failed = (*self._expired(now), *self._failed_adapters(now))
        self._step = StepPlan()
        self._sort_running()
        prefills = list(self._prefills())  # may preempt decodes
        chunks = [*map(self._running.decode, self._step.decodes), *prefills]
        self._needs.ask(self._step.is_full, self._may_run)
        if not self._queue.is_backlogged:
            self._waits.forget()
        singles = sorted((c for c in chunks if c.length == 1), key=_slot)
        longer = sorted((c for c in chunks if c.length > 1), key=_slot)
        started, self._started = tuple(self._started), []
        return Schedule((*singles, *longer), len(singles), started, failed)

    def advance(self, chunk: Chunk) -> None:
        """`chunk` has been computed: its full blocks may be found by others, and its token, if any, is read next."""
        sequence = chunk.sequence
        sequence.num_pending -= chunk.samples
        if sequence.state is not State.RUNNING:  # it ended or was preempted since
            return
        if chunk.end >= sequence.num_prompt:
            sequence.request.prompt_computed = True
        self._memory.name(chunk)

    def check_integrity(self) -> None:
        """Raise AssertionError unless lines, states, blocks, counters and requests agree."""
        self.blocks.check_integrity([sequence.blocks for sequence in self.running])
        self._queue.check_integrity()
        waiting = [sequence for flow in self._queue.waiting for sequence in flow.waiting]
        assert all(sequence.state is State.RUNNING for sequence in self.running)
        assert all(s.state is State.WAITING and not s.blocks and s.num_computed == 0 for s in waiting)
        assert all(s.handle is None for s in waiting), "an adapter in use by a sequence that waits"
        assert all((s.handle is None) == (s.request.flow.digest is None) for s in self.running), "without its adapter"
        running = [s for tenant in self._queue.tenants.values() for s in tenant.running]
        assert {id(s) for s in running} == {id(s) for s in self.running}, "the tenants' running sequences"
        live = {id(s) for request in self.requests.values() for s in request.live}
        assert live == {id(s) for s in (*waiting, *self.running)}, "requests and lines disagree"
        assert len(self.running) <= self.limits.max_num_seqs
        at_most = self.limits.max_running_per_tenant
        assert not at_most or all(len(t.running) <= at_most for t in self._queue.tenants.values()), "a tenant's limit"
        assert all(len(s.token_ids) >= s.num_charged - s.num_pending for s in (*waiting, *self.running)), "charges"

    # ---- the batch policy's parts

    def _sort_running(self) -> None:
        """Prompts under way; and decodes, each with room for its token."""
        step, block_size = self._step, self.blocks.block_size
        for sequence in tuple(self.running):
            num_tokens = len(sequence.token_ids) + sequence.num_pending
            remaining = num_tokens - sequence.num_computed
            if remaining > 1 and sequence.state is State.RUNNING:
                step.under_way[sequence] = None
            has_room = num_tokens <= len(sequence.blocks) * block_size
            if remaining == 1 and not self._has_enough(sequence) and (has_room or self._make_room(sequence)):
                step.decodes[sequence] = None

    def _prefills(self) -> Iterator[Chunk]:
        """Prompts under way and admissions, in turn, until the step's tokens are taken."""
        step, left = self._step, self.limits.max_batched_tokens
        for sequence in self._queue.turns(step.under_way, self._may_start, self._admits):
            if sequence.state is State.WAITING and not self._admit(sequence):
                if step.is_full and not step.under_way:
                    return
                continue
            step.under_way.pop(sequence, None)
            step.prefills.add(sequence)
            self._pause_decodes(sequence, left)
            length = min(sequence.remaining, left - len(step.decodes))
            left -= length
            yield self._running.launch(sequence, length)
            if left <= len(step.decodes):
                return

    def _pause_decodes(self, sequence: Sequence, left: int) -> None:
        """Whoever is so far ahead that it could be preempted leaves its tokens of this step to `sequence`."""
        decodes = self._step.decodes
        if decodes and sequence.remaining > left - len(decodes):
            for other in self._queue.ahead_of(sequence).running:
                decodes.pop(other, None)
                if sequence.remaining <= left - len(decodes):
                    return

    def _admit(self, sequence: Sequence) -> bool:
        """Start a waiting sequence, if need be in the place of others; if it must wait for memory, so must all."""
        if not self._may_start(sequence) or not self._admits(sequence.request.flow.tenant):
            return False
        victims = self._victims(sequence)
        if victims is None:
            self._step.is_full = True
            return False
        for victim in victims:
            self._preempt(victim)
        self._start(sequence)
        return True

    # ---- waiting

    def _expired(self, now: float) -> Iterator[Failure]:
        for request in self._deadlines.expired(now):
            self.drop(request)
            yield Failure(request, DeadlineUnreachable("the deadline passed before the answer was complete"))

    def _failed_adapters(self, now: float) -> Iterator[Failure]:
        """Note which adapters came, and fail the requests of those that cannot."""
        for flow, error in self._needs.look(now):
            for request in dict.fromkeys(sequence.request for sequence in tuple(flow.waiting)):
                self.drop(request)
                yield Failure(request, error)

    def _may_start(self, sequence: Sequence) -> bool:
        """Whether nothing but memory keeps it, once its adapter is there."""
        return sequence not in self._step.preempted and self._has_prompt(sequence)

    def _has_prompt(self, sequence: Sequence) -> bool:
        if sequence.num_pending:  # preempted, and its last token is not read yet
            return False
        return sequence.request.prompt_computed or sequence is sequence.request.leader

    def _admits(self, tenant: Tenant) -> bool:
        return not self._step.is_full and self._may_run(tenant)

    def _may_run(self, tenant: Tenant) -> bool:
        return self._tenant_limits.may_run(len(tenant.running))

    def _has_enough(self, sequence: Sequence) -> bool:
        """Whether it will end by length as soon as its pending token is read."""
        at_most = sequence.request.spec.stop.max_tokens
        return sequence.num_pending > 0 and (
            sequence.num_sampled >= at_most or sequence.num_tokens >= self.limits.max_model_len
        )

    # ---- memory

    def _victims(self, head: Sequence) -> list[Sequence] | None:
        """Whom to preempt so that there is a seat and memory for `head`; None if it must wait.

        One block per running sequence stays free, so that an admission does not cause a preemption at once.
        """
        victims: list[Sequence] = []
        others = self._queue.victims(head, self._step.prefills)
        while not self._fits(head, victims):
            victim = next(others, None)
            if victim is None:
                return None
            victims.append(victim)
        return victims

    def _fits(self, head: Sequence, without: list[Sequence]) -> bool:
        num_running = len(self.running) - len(without)
        return num_running < self.limits.max_num_seqs and self._memory.missing(head, num_running, without) <= 0

    def _start(self, sequence: Sequence) -> None:
        self._running.start(sequence)
        self._waits.started(self._now)
        request = sequence.request
        if not request.started:
            request.started = True
            request.adapter_ready_at = request.flow.changed_at
            self._started.append(request)
            self.prefix_tokens_queried += sequence.num_prompt
            self.prefix_tokens_hit += sequence.num_cached

    def _make_room(self, sequence: Sequence) -> bool:
        """Blocks for all known tokens of a running sequence, preempting those of whom was served most, itself at
        worst."""
        while sequence.state is State.RUNNING:
            if self._memory.extend(sequence):
                return True
            self._preempt(self._queue.last())
        return False

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue with its tokens; what it had computed is recomputed, or found in the prefix cache."""
        self.num_preemptions += 1
        self._step.decodes.pop(sequence, None)
        self._step.under_way.pop(sequence, None)
        self._step.preempted.add(sequence)
        self._running.stop(sequence)
        sequence.state = State.WAITING
        self._queue.wait(sequence)
        self._needs.keep(sequence.request.flow)


@dataclass(slots=True)
class StepPlan:
    """What `schedule` has decided for its step so far."""

    under_way: dict[Sequence, None] = field(default_factory=dict)  # prompts that have had no turn yet
    decodes: dict[Sequence, None] = field(default_factory=dict)
    prefills: set[Sequence] = field(default_factory=set)
    preempted: set[Sequence] = field(default_factory=set)
    is_full: bool = False  # the next one in turn finds no memory


def _slot(chunk: Chunk) -> int:
    return chunk.sequence.slot

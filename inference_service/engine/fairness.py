"""Whose turn it is: tenants share the engine by served tokens, and a tenant's adapters share what it gets. Torch-free.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024) on two levels, instead of
deficit round robin (Shreedhar and Varghese, SIGCOMM 1995): how long an answer gets is not known when its request is
picked, so there is nothing to hold against a deficit; a counter that grows with every computed token needs no guess.
Whoever has the smallest goes next. Three things differ from the paper:

* Idle time earns nothing. Who comes to wait is lifted to the virtual time less `credit`, a constant; who was ahead
  stays ahead. The virtual time is the smallest counter among those left waiting, or the largest of all when nobody is:
  what was computed while nobody else wanted it is held against nobody.
* Work counts once. What is computed again after a preemption is not charged, so the difference between two counters is
  a difference in progress.
* Who is behind and finds no room preempts. It must be behind by more than `lead`; and, since what is preempted has to
  be computed again, by as much more as that costs. For a cost above another `lead` nobody waits longer.

* Who has more sequences running will be served more: in the order of turns, not where room is taken, each counts as
  service to come, all that may run together as one `lead`. Without that, whoever is behind takes every seat as it comes
  free, and is as far ahead when its answers end.

So of two that always wait, who is 2 * `lead` behind takes all the room that it asks for: they drift apart by at most
that, or `credit` at the start, and the service of the steps in which it is seen; in the paper it is as much as fits the
KV cache. And what is thrown away is never worth more than the difference that it mends, up to that limit.

Preemption ends: T takes room from V only when V - T > lead, and V takes it back only when T - V > lead. In between T
has made progress that is worth more than twice `lead` beyond V's, and all requests together make only so much.

`lead` is worth one full prefill step and `credit` two, so a newcomer's first request is served at once, whatever room
it needs, and what it asks for beside that for one full prefill step.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable, Iterator
from typing import NamedTuple

from inference_service.engine.flows import ALWAYS, Flow, Tenant, by_service, by_service_and_age, place, remove
from inference_service.engine.sequence import Sequence

# Service per token. Keys and values that the prefix cache has cost little more than the memory that they take.
CACHED, PROMPT, OUTPUT = 1, 10, 20
FORGET_EVERY = 64  # newcomers: how often those that need not be remembered are looked for


class FairQueue:
    """All sequences that wait or run, by tenant and adapter.

    Args:
        step_tokens: Of a full prefill step.
        num_seats: Sequences that may run.
    """

    def __init__(self, step_tokens: int, num_seats: int) -> None:
        self.lead = PROMPT * step_tokens
        self.foresight = self.lead // num_seats
        self.credit = 2 * self.lead
        self.tenants: dict[str, Tenant] = {}
        self.waiting: dict[Flow, None] = {}  # flows with waiting sequences
        self.num_waiting = 0
        self.newcomers: list[Flow] = []  # flows that have come to wait since this was last emptied
        self._ready: dict[Tenant, None] = {}
        self._virtual = 0
        self._count = 0

    # ---- who is here

    def flow(self, tenant_name: str, digest: str | None) -> Flow:
        """The flow of a tenant's requests for an adapter."""
        tenant = self.tenants.get(tenant_name)
        if tenant is None:
            if len(self.tenants) % FORGET_EVERY == 0:
                self.tenants = {name: t for name, t in self.tenants.items() if self._is_known(t)}
            tenant = self.tenants[tenant_name] = Tenant(self._next(), name=tenant_name)
        flow = tenant.flows.get(digest)
        if flow is None:
            if len(tenant.flows) % FORGET_EVERY == 0:
                tenant.flows = {d: f for d, f in tenant.flows.items() if self._is_known_flow(f)}
            flow = tenant.flows[digest] = Flow(self._next(), tenant=tenant, digest=digest)
        return flow

    def wait(self, sequence: Sequence) -> None:
        """It waits from now on."""
        flow = sequence.request.flow
        insort(flow.waiting, sequence, key=place)
        flow.tenant.num_waiting += 1
        self.num_waiting += 1
        if len(flow.waiting) == 1:
            self.waiting[flow] = None
            self.newcomers.append(flow)
            flow.changed_at = ALWAYS
            if flow.digest is None:
                self._come(flow)

    def leave(self, sequence: Sequence) -> None:
        """It no longer waits."""
        flow = sequence.request.flow
        remove(flow.waiting, sequence)
        flow.tenant.num_waiting -= 1
        self.num_waiting -= 1
        if not flow.waiting:
            del self.waiting[flow]
            self._go(flow)

    def set_ready(self, flow: Flow, is_ready: bool, now: float) -> None:
        """Whether the adapter of a flow that waits is there."""
        if is_ready is flow.is_ready:
            if not is_ready and flow.changed_at == ALWAYS:
                flow.changed_at = now
            return
        if flow.is_ready or flow.changed_at != ALWAYS:
            flow.changed_at = now
        if is_ready:
            self._come(flow)
        else:
            self._go(flow)

    def start(self, sequence: Sequence) -> None:
        """It runs from now on."""
        flow = sequence.request.flow
        insort(flow.tenant.running, sequence, key=place)
        flow.num_running += 1

    def stop(self, sequence: Sequence) -> None:
        """It no longer runs."""
        flow = sequence.request.flow
        remove(flow.tenant.running, sequence)
        flow.num_running -= 1

    @property
    def is_backlogged(self) -> bool:
        """Whether somebody waits for nothing but a turn."""
        return bool(self._ready)

    def num_ahead(self, newcomer: Sequence) -> int:
        """How many certainly start before `newcomer`, which does not wait yet; 0 while its adapter is not there."""
        flow = newcomer.request.flow
        return bisect_left(flow.waiting, place(newcomer), key=place) if flow.is_ready else 0

    def ready_flows(self) -> list[Flow]:
        """Flows that wait for nothing but their turn."""
        return [flow for tenant in self._ready for flow in tenant.ready]

    # ---- who is next

    def turns(
        self,
        prefilling: Iterable[Sequence],
        may_start: Callable[[Sequence], bool],
        admits: Callable[[Tenant], bool],
    ) -> Iterator[Sequence]:
        """Sequences that could compute prompt tokens in this step, the next one first: `prefilling` ones, and waiting
        ones that `may_start` of tenants that `admits` lets in. Charge each before asking for the next.

        The order is: the tenant served least; of it, the highest priority; then the adapter served least; then arrival.
        Those that run count as service to come.
        """
        running: dict[Tenant, dict[Flow, list[Sequence]]] = {}
        for sequence in prefilling:
            flow = sequence.request.flow
            running.setdefault(flow.tenant, {}).setdefault(flow, []).append(sequence)
        heap = [(self._expected(tenant), tenant.number, tenant) for tenant in {**self._ready, **dict.fromkeys(running)}]
        heapq.heapify(heap)
        lines: dict[Tenant, list[_Turn]] = {}
        while heap:
            tenant = heapq.heappop(heap)[-1]
            line = lines.get(tenant)
            if line is None:
                of_tenant = running.get(tenant, {})
                flows = {**tenant.ready, **of_tenant} if admits(tenant) else of_tenant
                line = lines[tenant] = []
                for flow in flows:
                    self._push(line, flow, _candidates(of_tenant.get(flow, ()), flow, may_start, admits))
            if line:
                turn = heapq.heappop(line)
                yield turn.sequence
                self._push(line, turn.flow, turn.others)
            if line:
                heapq.heappush(heap, (self._expected(tenant), tenant.number, tenant))

    def _expected(self, tenant: Tenant) -> int:
        return tenant.served + self.foresight * len(tenant.running)

    def _push(self, line: list["_Turn"], flow: Flow, candidates: Iterator[Sequence]) -> None:
        """Queue the next of `candidates` in its tenant's line, if there is one."""
        sequence = next(candidates, None)
        if sequence is not None:
            spec, expected = sequence.request.spec, flow.served + self.foresight * flow.num_running
            rank = (-spec.priority, expected, spec.arrival, sequence.request.order)
            heapq.heappush(line, _Turn(rank, flow.number, flow, sequence, candidates))

    def charge(self, flow: Flow, service: int) -> None:
        """`flow` has been served."""
        flow.served += service
        flow.tenant.served += service

    # ---- who must go

    def last(self) -> Sequence:
        """Whose memory a running sequence takes when there is no other: the newest of the tenant served most."""
        return max((t for t in self.tenants.values() if t.running), key=by_service).running[-1]

    def ahead_of(self, head: Sequence) -> "Ahead":
        """Running sequences of the most served tenant, or of the most served adapter of the tenant of `head`, where
        that is ahead of it by more than `lead`; there no higher priority."""
        flow = head.request.flow
        most = max((t for t in self.tenants.values() if t.running), key=by_service, default=flow.tenant)
        by = most.served - flow.tenant.served
        if by > self.lead:
            return Ahead(by, most.running[::-1])
        own = flow.tenant.running
        adapter = max({sequence.request.flow for sequence in own}, key=by_service_and_age, default=flow)
        by = adapter.served - flow.served
        if by <= self.lead:
            return Ahead(by, [])
        priority = head.request.spec.priority
        its = (sequence for sequence in reversed(own) if sequence.request.flow is adapter)
        return Ahead(by, [sequence for sequence in its if sequence.request.spec.priority <= priority])

    def victims(self, head: Sequence, spared: Container[Sequence]) -> Iterator[Sequence]:
        """Those ahead of `head`, newest first, but for `spared`, that it may preempt all together: as many as cost no
        more to compute again than it is behind by, beyond `lead`."""
        ahead, cost = self.ahead_of(head), 0
        for sequence in ahead.running:
            if sequence not in spared:
                cost += PROMPT * sequence.num_computed
                if ahead.by < self.lead + min(cost, self.lead):
                    return
                yield sequence

    def check_integrity(self) -> None:
        """Raise AssertionError unless lines, counts and states agree."""
        flows = [flow for tenant in self.tenants.values() for flow in tenant.flows.values()]
        assert set(self.waiting) == {flow for flow in flows if flow.waiting}, "flows that wait"
        assert self.num_waiting == sum(len(flow.waiting) for flow in flows), "number of waiting sequences"
        for tenant in self.tenants.values():
            own = list(tenant.flows.values())
            assert all(flow.tenant is tenant for flow in own), "a flow of another tenant"
            assert tenant.num_waiting == sum(len(flow.waiting) for flow in own), "a tenant's waiting sequences"
            assert len(tenant.running) == sum(flow.num_running for flow in own), "a tenant's running sequences"
            assert set(tenant.ready) == {flow for flow in own if flow.is_ready}, "flows that are ready"
            assert (tenant in self._ready) == bool(tenant.ready), "tenants that are ready"
            assert all(flow.waiting for flow in tenant.ready), "nothing waits to be ready"
            for line in (tenant.running, *(flow.waiting for flow in own)):
                assert line == sorted(line, key=place), "a line out of order"
            for flow in own:
                assert all(s.request.flow is flow for s in flow.waiting), "in another flow's line"
                assert flow.num_running == sum(s.request.flow is flow for s in tenant.running), "a flow's running"

    # ---- counters

    def _come(self, flow: Flow) -> None:
        """It waits for its turn. Counters are raised: not having asked is no claim."""
        tenant = flow.tenant
        if not tenant.ready:
            others = self._ready or self.tenants.values()
            self._virtual = max(self._virtual, (min if self._ready else max)(map(by_service, others)))
            tenant.served = max(tenant.served, self._virtual - self.credit)
            self._ready[tenant] = None
        siblings = tenant.ready or tenant.flows.values()
        tenant.virtual = max(tenant.virtual, (min if tenant.ready else max)(map(by_service, siblings)))
        flow.served = max(flow.served, tenant.virtual - self.credit)
        tenant.ready[flow] = None
        flow.is_ready = True

    def _go(self, flow: Flow) -> None:
        if flow.is_ready:
            flow.is_ready = False
            del flow.tenant.ready[flow]
            if not flow.tenant.ready:
                del self._ready[flow.tenant]

    def _is_known(self, tenant: Tenant) -> bool:
        """Whether it is here or ahead. To forget others earns them no more than the credit."""
        return bool(tenant.num_waiting or tenant.running or tenant.served > self._virtual)

    def _is_known_flow(self, flow: Flow) -> bool:
        return bool(flow.waiting or flow.num_running or flow.served > flow.tenant.virtual)

    def _next(self) -> int:
        self._count += 1
        return self._count


class Ahead(NamedTuple):
    """Who has been served more, by how much, and its running sequences, newest first."""

    by: int
    running: list[Sequence]


class _Turn(NamedTuple):
    """A flow's next sequence, and those after it. Sorted by the first two."""

    rank: tuple[int, int, float, int]
    number: int
    flow: Flow
    sequence: Sequence
    others: Iterator[Sequence]


def _candidates(
    prefilling: Iterable[Sequence], flow: Flow, may_start: Callable[[Sequence], bool], admits: Callable[[Tenant], bool]
) -> Iterator[Sequence]:
    """Those whose prompts are under way, then those that wait. Each of the latter is gone from the line, or passed."""
    yield from prefilling
    index = 0
    while flow.is_ready and index < len(flow.waiting) and admits(flow.tenant):
        sequence = flow.waiting[index]
        if may_start(sequence):
            yield sequence
        if index < len(flow.waiting) and flow.waiting[index] is sequence:
            index += 1

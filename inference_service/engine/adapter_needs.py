"""Which adapters the waiting sequences need, which of them are asked for, and who makes room when none comes free.

Adapters may outnumber the room for them by far. So only the first in fair order are asked for, as many as fit at once;
these the pool does not evict for each other, and so no adapter goes that is about to be used. The order:

* Tenants take turns, each adapter counting for `lead` of its tenant's service.
* Service is compared in steps of `lead`; among equals an adapter that is there goes before one that is not, so that it
  serves all who wait for it before it makes room; then the earlier arrival.
* Adapters that were waited for longer than the age limit go before all. While seats or the KV cache are short, only
  those whose requests would be the next to start: of the tenant served least, and waiting for longer than what else it
  has, by another age limit. If they find no room because residents are in use, the least valuable of these admit
  nobody any more until there is; as many as it takes, but at most half of them at a time.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import NamedTuple, Protocol

from inference_service.engine.fairness import FairQueue
from inference_service.engine.flows import ALWAYS, Flow, Tenant
from inference_service.lora.adapter import AdapterState, Wanted
from shared.errors import LoraplexError

SORT_SECONDS = 0.05
SHORT = 128  # flows that are sorted whenever another comes


class Adapters(Protocol):
    """What waiting sequences ask of the slot pool; `lora.pool.AdapterPool` is one."""

    def want(self, line: Iterable[Wanted]) -> None:
        """Load the first of `line`, as many as fit at once, and keep these. Taken from `line` only as far as needed."""
        ...

    def require(self, digest: str, tenant: str) -> AdapterState:
        """Its state, after trying a FAILED one again if it is time; a READY one is not evicted before the next step."""
        ...

    def state(self, digest: str) -> AdapterState | None: ...

    def error(self, digest: str) -> LoraplexError | None:
        """Why it is FAILED."""
        ...

    def would_fit(self, digests: Set[str], idle: Set[str]) -> bool:
        """Whether adapters that are PLACING would find room, all together, once residents in `idle` are idle."""
        ...

    def is_pinned(self, digest: str) -> bool: ...

    def is_over_quota(self, digest: str) -> bool:
        """Whether one that is PLACING waits for others of its tenant to go."""
        ...


class Lost(NamedTuple):
    """An adapter that waiting sequences will not get."""

    flow: Flow
    error: LoraplexError


class AdapterNeeds:
    """Between the queue and the slot pool. In a step it looks only at adapters that may have come or gone.

    Args:
        queue: Whose waiting flows need adapters.
        adapters: The slot pool.
        age_limit: Seconds after which an adapter that is waited for makes another go.
    """

    def __init__(self, queue: FairQueue, adapters: Adapters, age_limit: float) -> None:
        self._queue = queue
        self._adapters = adapters
        self._age_limit = age_limit
        self.held: set[str] = set()  # being unloaded: not asked for
        self.drained: set[str] = set()  # making room: nobody is admitted
        self._sorted_at = -float("inf")
        self._asked: list[Flow] = []  # as far as the pool has read the line
        self._others: Iterator[Flow] = iter(())  # the rest of the line
        self._overdue: list[Flow] = []  # oldest first

    def look(self, now: float) -> list[Lost]:
        """Note which flows' adapters are there, and return those whose adapters failed."""
        queue, lost = self._queue, list[Lost]()
        newcomers, queue.newcomers = queue.newcomers, []
        is_short = len(queue.waiting) <= SHORT
        if now - self._sorted_at >= SORT_SECONDS or (newcomers and is_short):
            self._sort(now)
            watched = list(queue.waiting)
        else:
            watched = [*newcomers, *self._asked, *queue.ready_flows()]
        for flow in watched:
            if flow.digest is None or not flow.waiting:
                continue
            state = self._adapters.state(flow.digest)
            if state is AdapterState.FAILED and flow.digest not in self.held:
                state = self._adapters.require(flow.digest, flow.tenant.name)
                error = self._adapters.error(flow.digest) if state is AdapterState.FAILED else None
                if error is not None:
                    lost.append(Lost(flow, error))
            is_ready = state is AdapterState.READY and flow.digest not in self.drained
            if is_ready is not flow.is_ready or flow.changed_at == ALWAYS:
                queue.set_ready(flow, is_ready, now)
        return lost

    def ask(self, is_full: bool, may_run: Callable[[Tenant], bool]) -> None:
        """Ask for what is needed, and make room for what has waited too long.

        `is_full`: seats or memory are short. `may_run`: whether a tenant may have one more running sequence.
        """
        overdue = [flow for flow in self._overdue if flow.waiting and not flow.is_ready]
        if is_full:
            overdue = self._next_to_start(overdue, may_run)
        self._make_room(overdue)
        self._adapters.want(self._line(overdue))

    def keep(self, flow: Flow) -> None:
        """It waits from now on: its adapter, if it is there, stays until the next step asks for it."""
        if flow.digest is not None and self._adapters.state(flow.digest) is AdapterState.READY:
            self._adapters.require(flow.digest, flow.tenant.name)

    def in_order(self) -> Iterator[Flow]:
        """Flows that wait and need an adapter, the most urgent first."""
        flows: dict[Tenant, list[Flow]] = {}
        for flow in self._queue.waiting:
            if flow.digest is not None:
                flows.setdefault(flow.tenant, []).append(flow)
        turns: list[_Turn] = []
        for tenant, its_flows in flows.items():
            rest = iter(sorted(its_flows, key=self._urgency))
            heapq.heappush(turns, self._turn(next(rest), rest, tenant.served // self._queue.lead))
        while turns:
            turn = heapq.heappop(turns)
            yield turn.flow
            follower = next((flow for flow in turn.others if flow.waiting), None)
            if follower is not None:
                heapq.heappush(turns, self._turn(follower, turn.others, turn.number + 1))

    def _line(self, overdue: list[Flow]) -> Iterator[Wanted]:
        for flow in overdue:
            yield from self._wanted(flow, is_overdue=True)
        for flow in self._asked:
            yield from self._wanted(flow)
        for flow in self._others:
            self._asked.append(flow)
            yield from self._wanted(flow)

    def _wanted(self, flow: Flow, *, is_overdue: bool = False) -> Iterator[Wanted]:
        digest = flow.digest
        if digest is not None and flow.waiting and digest not in self.held and digest not in self.drained:
            prepare_seconds = flow.waiting[0].request.spec.prepare_seconds
            yield Wanted(digest, flow.tenant.name, prepare_seconds, is_overdue)

    # ---- the order

    def _sort(self, now: float) -> None:
        """The order changes as flows come and are served. A long line is sorted now and then only."""
        self._sorted_at = now
        self._asked, self._others = [], self.in_order()
        self._overdue = self._waited_too_long(now)

    def _urgency(self, flow: Flow) -> tuple[int, int, bool, float, int]:
        first = flow.waiting[0].request
        return -first.spec.priority, flow.served // self._queue.lead, not flow.is_ready, first.spec.arrival, first.order

    def _turn(self, flow: Flow, others: Iterator[Flow], number: int) -> "_Turn":
        return _Turn(number, not flow.is_ready, flow.waiting[0].request.spec.arrival, flow.number, flow, others)

    # ---- the age limit

    def _waited_too_long(self, now: float) -> list[Flow]:
        """Flows whose adapters were waited for longer than the limit, oldest first."""
        since = now - self._age_limit
        missing = (flow for flow in self._queue.waiting if not flow.is_ready and ALWAYS < flow.changed_at < since)
        return sorted((f for f in missing if f.digest not in self.held | self.drained), key=_changed_at)

    def _next_to_start(self, overdue: list[Flow], may_run: Callable[[Tenant], bool]) -> list[Flow]:
        """Those that are kept by their adapters and not by seats: others start before them who should not."""
        first: dict[Tenant, tuple[int, float]] = {}
        for flow in self._queue.ready_flows():
            if may_run(flow.tenant):
                first[flow.tenant] = min(_age(flow), first.get(flow.tenant, _LAST))
        least_served = min((tenant.served for tenant in first), default=0)
        found = []
        for flow in overdue:
            priority, arrival = _age(flow)
            is_passed = (priority, arrival + self._age_limit) < first.get(flow.tenant, _LAST)
            if is_passed and (not first or flow.tenant.served <= least_served) and may_run(flow.tenant):
                found.append(flow)
        return found

    def _make_room(self, overdue: list[Flow]) -> None:
        """While overdue adapters find no room, residents admit nobody until they are idle: as many as it takes."""
        adapters = self._adapters
        placing = [flow for flow in overdue if flow.digest and adapters.state(flow.digest) is AdapterState.PLACING]
        self.drained = {digest for digest in self.drained if placing and adapters.state(digest) is AdapterState.READY}
        used = self._used() if placing else {}
        at_most = max(len(used) // 2, 1)
        can_go = [digest for digest in used if digest not in self.drained and not adapters.is_pinned(digest)]
        can_go.sort(key=lambda digest: _value(used[digest]), reverse=True)
        placed: set[str] = set()
        for flow in placing:
            assert flow.digest is not None
            if adapters.is_over_quota(flow.digest):
                self._drain_own(flow.tenant, used, can_go, at_most)
                continue
            placed.add(flow.digest)
            while can_go and not adapters.would_fit(placed, self.drained):
                if len(self.drained & used.keys()) >= at_most:
                    return
                self.drained.add(can_go.pop())

    def _drain_own(self, tenant: Tenant, used: Mapping[str, Iterable[Flow]], can_go: list[str], at_most: int) -> None:
        """One of `can_go` that nobody but this tenant uses, unless one is drained already. The last is the first."""
        own = {digest for digest, users in used.items() if all(user.tenant is tenant for user in users)}
        if self.drained & own or len(self.drained & used.keys()) >= at_most:
            return
        for digest in reversed(can_go):
            if digest in own:
                self.drained.add(digest)
                can_go.remove(digest)
                return

    def _used(self) -> dict[str, dict[Flow, None]]:
        """Adapters that running sequences use, with these sequences' flows."""
        used: dict[str, dict[Flow, None]] = {}
        for tenant in self._queue.tenants.values():
            for sequence in tenant.running:
                flow = sequence.request.flow
                if flow.digest is not None:
                    used.setdefault(flow.digest, {})[flow] = None
        return used


class _Turn(NamedTuple):
    """A tenant's next flow, and those after it. `number`: its tenant's service in steps of `lead`, these included."""

    number: int
    is_missing: bool
    arrival: float
    flow_number: int
    flow: Flow
    others: Iterator[Flow]


_LAST = (1 << 62, float("inf"))


def _age(flow: Flow) -> tuple[int, float]:
    """Of its first sequence: the priority, highest first, and when it came."""
    spec = flow.waiting[0].request.spec
    return -spec.priority, spec.arrival


def _changed_at(flow: Flow) -> float:
    return flow.changed_at


def _value(flows: Iterable[Flow]) -> tuple[int, int, int]:
    """How much a resident is needed: who waits for it, who uses it, what it has served."""
    return (
        sum(len(flow.waiting) for flow in flows),
        sum(flow.num_running for flow in flows),
        sum(flow.served for flow in flows),
    )

"""What an engine has served, and its `EngineStats`. Torch-free."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from inference_service.engine.scheduler import Scheduler
from inference_service.engine.sequence import Request
from inference_service.lora.adapter import AdapterState
from inference_service.lora.pool import AdapterPool
from inference_service.stats import EngineStats, Tier, TokenCounts, Usage
from inference_service.types import GenerateSpec

MAX_ADAPTERS = 4096  # whose tokens are counted apart


class EngineCounters:
    """Counts since the start of the engine."""

    def __init__(self) -> None:
        self.tokens = TokenCounts()
        self.by_adapter: OrderedDict[str, TokenCounts] = OrderedDict()  # least recently served first
        self.hits: Counter[Tier] = Counter()

    def received(self, spec: GenerateSpec, state: AdapterState | None) -> None:
        """A request for an adapter in `state` was queued."""
        if spec.adapter_digest is not None:
            self.hits["gpu" if state is AdapterState.READY else spec.adapter_tier] += 1

    def started(self, request: Request) -> None:
        """A request was admitted."""
        self._add(request.spec, prompt=len(request.spec.prompt_ids))

    def generated(self, request: Request, count: int) -> None:
        """A sequence of `request` has `count` new tokens."""
        self._add(request.spec, generated=count)

    def _add(self, spec: GenerateSpec, prompt: int = 0, generated: int = 0) -> None:
        digest = spec.adapter_digest or ""
        of_adapter = self.by_adapter.setdefault(digest, TokenCounts())
        self.by_adapter.move_to_end(digest)
        if len(self.by_adapter) > MAX_ADAPTERS:
            self.by_adapter.popitem(last=False)
        for counts in (self.tokens, of_adapter):
            counts.prompt += prompt
            counts.generated += generated


def engine_stats(counters: EngineCounters, scheduler: Scheduler, pool: AdapterPool, now: float) -> EngineStats:
    """How the engine is doing at time `now`."""
    blocks, memory = scheduler.blocks, pool.memory()
    requests = scheduler.requests.values()
    waiting = [request for request in requests if not request.started]
    without_adapter = [request for request in waiting if not _has_adapter(pool, request.spec.adapter_digest)]
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        num_waiting_for_adapter=sum(len(request.live) for request in without_adapter),
        requests_running=_by_adapter(request for request in requests if request.started),
        requests_waiting=_by_adapter(waiting),
        kv_blocks=Usage(blocks.num_blocks - blocks.num_free, blocks.num_blocks),
        block_size=blocks.block_size,
        arena=memory.arena,
        arena_pinned_bytes=memory.pinned_bytes,
        arena_free_in_gaps=memory.free_in_gaps,
        slots=memory.slots,
        prefix_tokens_queried=scheduler.prefix_tokens_queried,
        prefix_tokens_hit=scheduler.prefix_tokens_hit,
        num_preemptions=scheduler.num_preemptions,
        tokens=counters.tokens,
        tokens_by_adapter=dict(counters.by_adapter),
        hits=dict(counters.hits),
        load_seconds=pool.counters.load_seconds,
        evictions=dict(pool.counters.evictions),
        needless_reloads=pool.counters.needless_reloads,
        moves=pool.counters.moves,
        moved_bytes=pool.counters.moved_bytes,
        loads_in_flight=pool.loads_in_flight(),
        load_failures=dict(pool.counters.failures),
        adapters_waiting=_in_queue_order(scheduler, {request.spec.adapter_digest for request in without_adapter}),
        waited_longest=max((now - request.spec.arrival for request in without_adapter), default=0.0),
    )


def _has_adapter(pool: AdapterPool, digest: str | None) -> bool:
    return digest is None or pool.state(digest) is AdapterState.READY


def _by_adapter(requests: Iterable[Request]) -> dict[str, int]:
    return dict(Counter(request.spec.adapter_digest or "" for request in requests))


def _in_queue_order(scheduler: Scheduler, digests: set[str | None]) -> list[str]:
    queued = dict.fromkeys(sequence.request.spec.adapter_digest for sequence in scheduler.waiting)
    return [digest for digest in queued if digest in digests and digest is not None]

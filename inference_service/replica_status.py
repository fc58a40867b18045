"""What the engine and the adapter process say of themselves, as GetReplicaStatus shows it to one caller."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from inference_service.stats import AdapterStats, EngineStats, LoadInFlight, Seconds, Usage
from inference_service.types import MemoryBudget
from loraplex.inference.v1 import control_pb2 as pb

# The version's name to show for a digest: empty if it has none, None if the caller may not see it.
NameOf = Callable[[str], str | None]

_PHASES = {
    "FETCHING": pb.LoadInFlight.PHASE_FETCHING,
    "PACKING": pb.LoadInFlight.PHASE_PACKING,
    "ACQUIRING": pb.LoadInFlight.PHASE_ACQUIRING,
    "PLACING": pb.LoadInFlight.PHASE_PLACING,
    "COPYING": pb.LoadInFlight.PHASE_COPYING,
}


def digests_of(engine: EngineStats | None, adapters: AdapterStats | None) -> list[str]:
    """Every adapter that `replica_status` names, once."""
    waiting = engine.adapters_waiting if engine else []
    return list(dict.fromkeys([*(load.digest for load in _loads(engine, adapters)), *waiting]))


def replica_status(
    engine: EngineStats | None, adapters: AdapterStats | None, memory: MemoryBudget | None, name_of: NameOf
) -> pb.GetReplicaStatusResponse:
    """The answer to a caller to whom `name_of` applies."""
    return pb.GetReplicaStatusResponse(
        memory=_memory(memory) if memory else None,
        engine=_engine(engine) if engine else None,
        adapters=_adapters(adapters) if adapters else None,
        loads_in_flight=[
            pb.LoadInFlight(
                adapter_version=name,
                digest=load.digest,
                phase=_PHASES[load.phase],
                progress=load.progress,
                elapsed_seconds=load.seconds,
                bytes_done=load.bytes_done,
                bytes_total=load.bytes_total,
            )
            for load in _loads(engine, adapters)
            if (name := name_of(load.digest)) is not None
        ],
        waiting_adapters=[
            pb.WaitingAdapter(
                adapter_version=name, digest=digest, waiting_requests=engine.requests_waiting.get(digest, 0)
            )
            for digest in engine.adapters_waiting
            if (name := name_of(digest)) is not None
        ]
        if engine
        else [],
    )


def _loads(engine: EngineStats | None, adapters: AdapterStats | None) -> list[LoadInFlight]:
    """Every load once. What the adapter process is loading says more than that the engine waits for it."""
    fetched = list(adapters.loads_in_flight) if adapters else []
    known = {load.digest for load in fetched}
    return fetched + [load for load in (engine.loads_in_flight if engine else []) if load.digest not in known]


def _engine(stats: EngineStats) -> pb.EngineStatus:
    return pb.EngineStatus(
        gpu=_tier(stats.arena, stats.arena_pinned_bytes, stats.slots.used),
        slots_used=stats.slots.used,
        slots_total=stats.slots.total,
        scattered_bytes=stats.arena_free_in_gaps,
        moved_bytes=stats.moved_bytes,
        running_sequences=stats.num_running,
        waiting_sequences=stats.num_waiting,
        waiting_for_adapter=stats.num_waiting_for_adapter,
        longest_wait_seconds=stats.waited_longest,
        kv_blocks_used=stats.kv_blocks.used,
        kv_blocks_total=stats.kv_blocks.total,
        kv_block_size=stats.block_size,
        prompt_tokens=stats.tokens.prompt,
        generated_tokens=stats.tokens.generated,
        prefix_tokens_queried=stats.prefix_tokens_queried,
        prefix_tokens_hit=stats.prefix_tokens_hit,
        preemptions=stats.num_preemptions,
        hits={str(tier): count for tier, count in stats.hits.items()},
        evictions=stats.evictions,
        load_seconds=_phases(stats.load_seconds),
        load_failures=stats.load_failures,
        needless_reloads=stats.needless_reloads,
    )


def _adapters(stats: AdapterStats) -> pb.AdapterStatus:
    return pb.AdapterStatus(
        host=_tier(stats.host, stats.host_held_bytes, stats.host_adapters),
        disk=_tier(stats.disk, 0, stats.disk_adapters),
        fetched_bytes=stats.fetched_bytes,
        load_seconds=_phases(stats.load_seconds),
        evictions=stats.evictions,
        failures=stats.failures,
        registry_revision=stats.registry_revision,
        base_model_conflict=stats.base_model_conflict,
    )


def _memory(budget: MemoryBudget) -> pb.MemoryBudget:
    return pb.MemoryBudget(
        total=budget.total,
        other=budget.other,
        weights=budget.weights,
        activations=budget.activations,
        reserve=budget.reserve,
        adapter_arena=budget.adapter_arena,
        kv_cache=budget.kv_cache,
        host_arena=budget.host_arena,
    )


def _tier(usage: Usage, held: int, count: int) -> pb.TierUsage:
    return pb.TierUsage(used_bytes=usage.used, budget_bytes=usage.total, held_bytes=held, num_adapters=count)


def _phases(seconds: Mapping[str, Seconds]) -> dict[str, pb.PhaseSeconds]:
    return {
        phase: pb.PhaseSeconds(
            count=of.count, sum_seconds=of.sum, median_seconds=of.quantile(0.5), p99_seconds=of.quantile(0.99)
        )
        for phase, of in seconds.items()
    }


def visible_name(versions: Iterable[str], may_see: Callable[[str], bool]) -> str | None:
    """Of the versions that have one digest, the first that a caller may see; see `NameOf`."""
    named: Sequence[str] = [version for version in versions if version]
    if not named:
        return ""
    return next((version for version in named if may_see(version)), None)

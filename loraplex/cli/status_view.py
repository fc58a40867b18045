"""How `loraplex status` shows what it has found: sections of text, the same on paper and on a screen."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from loraplex.cli.output import megabytes, short_digest, short_version
from loraplex.inference.v1 import control_pb2, inference_pb2

BAR_CELLS = 20
_TIERS = ("gpu", "host", "disk", "source")
_PHASES = ("resolve", "fetch", "pack", "prepare", "acquire", "place", "copy", "total")
_LEVELS = {level: name.removeprefix("LEVEL_") for name, level in control_pb2.LoadedAdapter.Level.items()}
_OWNERS = {owner: name.removeprefix("PIN_OWNER_") for name, owner in control_pb2.LoadedAdapter.PinOwner.items()}
_LOAD_PHASES = {phase: name.removeprefix("PHASE_") for name, phase in control_pb2.LoadInFlight.Phase.items()}


class Replica(NamedTuple):
    """What one inference service says; without a `model` it said no more than its health, and `problem` why if it
    refused to."""

    address: str
    health: str
    model: inference_pb2.GetModelInfoResponse | None = None
    status: control_pb2.GetReplicaStatusResponse | None = None
    adapters: tuple[control_pb2.LoadedAdapter, ...] = ()
    problem: str = ""


class Snapshot(NamedTuple):
    """Everything at one moment."""

    registry: str
    registry_health: str
    replicas: tuple[Replica, ...]

    @property
    def healths(self) -> list[str]:
        """Of the registry, then of the replicas."""
        return [self.registry_health, *(replica.health for replica in self.replicas)]


class Section(NamedTuple):
    """A table under a line of text; either may be missing. `spare`: columns for which a narrow terminal has no room."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[object, ...], ...] = ()
    spare: tuple[int, ...] = ()


def sections(snapshot: Snapshot) -> list[Section]:
    """Who serves, and then each replica from its sums to its single adapters."""
    services = [("registry", snapshot.registry, snapshot.registry_health)]
    services += [("inference", replica.address, replica.health) for replica in snapshot.replicas]
    found = [Section("", ("SERVICE", "ADDRESS", "HEALTH"), tuple(services))]
    found += [Section(f"{replica.address}: {replica.problem}") for replica in snapshot.replicas if replica.problem]
    for replica in snapshot.replicas:
        if replica.model is not None:
            found += _replica(replica, replica.model, with_address=len(snapshot.replicas) > 1)
    return found


def _replica(replica: Replica, model: inference_pb2.GetModelInfoResponse, *, with_address: bool) -> Iterator[Section]:
    name = model.base_model.removeprefix("baseModels/")
    where = f"{replica.address}: " if with_address else ""
    yield Section(f"{where}{name} ({model.architecture}) on {model.device}, {model.dtype}")
    status = replica.status
    if status is not None:
        if status.adapters.base_model_conflict:
            yield Section(f"BASE_MODEL_CONFLICT: {status.adapters.base_model_conflict}")
        yield from _sums(status)
        yield from _under_way(status)
    rows = sorted(replica.adapters, key=lambda a: (-a.level, -a.active_requests))
    columns = ("ADAPTER", "LEVEL", "RANK", "SIZE", "PINNED", "ACTIVE")
    yield Section("", columns, tuple(_adapter(adapter) for adapter in rows)) if rows else Section("no adapters")
    if status is not None:
        yield from _phases(status)


def _sums(status: control_pb2.GetReplicaStatusResponse) -> Iterator[Section]:
    engine, adapters = status.engine, status.adapters
    tiers: list[tuple[object, ...]] = []
    if status.HasField("engine"):
        slots = f"{engine.slots_used}/{engine.slots_total} slots"
        tiers.append(("GPU", *_tier(engine.gpu, "pinned"), _counts(engine.evictions), slots))
    if status.HasField("adapters"):
        for name, usage, held in (("HOST", adapters.host, "in use"), ("DISK", adapters.disk, "")):
            tiers.append((name, *_tier(usage, held), adapters.evictions.get(name.lower(), 0) or "", ""))
    if tiers:
        columns = ("TIER", "ADAPTERS", "BYTES", "BUDGET", "", "USED", "HELD", "EVICTED", "")
        yield Section("", columns, tuple(tiers), spare=tuple(map(columns.index, ("", "EVICTED", "HELD", "BUDGET"))))
    lines = [*_engine_lines(engine), *_memory_line(status.memory)] if status.HasField("engine") else []
    if status.HasField("adapters"):
        fetched = megabytes(adapters.fetched_bytes)
        lines.append(f"registry: seen up to revision {adapters.registry_revision}; {fetched} of adapters fetched")
    if lines:
        yield Section("\n".join(lines))


def _phases(status: control_pb2.GetReplicaStatusResponse) -> Iterator[Section]:
    phases = {**status.adapters.load_seconds, **status.engine.load_seconds}
    rows = [
        (phase, phases[phase].count, _time(phases[phase].median_seconds), _time(phases[phase].p99_seconds))
        for phase in _PHASES
        if phase in phases and phases[phase].count
    ]
    if rows:
        yield Section("", ("PHASE", "LOADS", "MEDIAN", "P99"), tuple(rows))


def _engine_lines(engine: control_pb2.EngineStatus) -> Iterator[str]:
    waiting = f"{engine.waiting_sequences} waiting"
    if engine.waiting_for_adapter:
        waiting += f" ({engine.waiting_for_adapter} for an adapter, up to {_time(engine.longest_wait_seconds)})"
    yield f"sequences: {engine.running_sequences} running, {waiting}, {engine.preemptions} preempted"
    cached = _share(engine.prefix_tokens_hit, engine.prefix_tokens_queried)
    yield (
        f"KV cache: {engine.kv_blocks_used}/{engine.kv_blocks_total} blocks of {engine.kv_block_size} tokens, "
        f"{cached} of prompt tokens found cached"
    )
    yield f"tokens: {engine.prompt_tokens} of prompts, {engine.generated_tokens} generated"
    total = sum(engine.hits.values())
    if total:
        shares = ", ".join(f"{tier} {_share(engine.hits[tier], total)}" for tier in _TIERS if tier in engine.hits)
        yield f"requests by adapter tier: {shares}; {engine.needless_reloads} needless reloads"


def _memory_line(memory: control_pb2.MemoryBudget) -> Iterator[str]:
    if memory.total:
        parts = ("weights", "kv_cache", "adapter_arena", "activations", "reserve", "other")
        sizes = [f"{name.replace('_', ' ')} {megabytes(size)}" for name in parts if (size := getattr(memory, name))]
        yield f"memory: {', '.join(sizes)} of {megabytes(memory.total)}"


def _under_way(status: control_pb2.GetReplicaStatusResponse) -> Iterator[Section]:
    if status.loads_in_flight:
        loads = [
            (
                _name(load.adapter_version, load.digest),
                _LOAD_PHASES[load.phase],
                bar(load.progress) if load.bytes_total else "",
                f"{load.progress:.0%}" if load.bytes_total else "",
                f"{megabytes(load.bytes_done)} of {megabytes(load.bytes_total)}" if load.bytes_total else "",
                _time(load.elapsed_seconds),
            )
            for load in status.loads_in_flight
        ]
        columns = ("LOADING", "PHASE", "", "DONE", "BYTES", "SINCE")
        yield Section("", columns, tuple(loads), spare=(columns.index(""),))
    if status.waiting_adapters:
        waiting = [(_name(a.adapter_version, a.digest), a.waiting_requests) for a in status.waiting_adapters]
        yield Section("", ("WAITED FOR", "REQUESTS"), tuple(waiting))
    failures = dict(status.adapters.failures)
    for reason, count in status.engine.load_failures.items():
        failures[reason] = max(failures.get(reason, 0), count)  # the engine hears of the adapter process's
    if failures:
        counts = _counts(failures)
        yield Section(f"loads that failed so far, each attempt and repeated ones of residency counted: {counts}")


def _adapter(adapter: control_pb2.LoadedAdapter) -> tuple[object, ...]:
    others = map(short_version, adapter.other_versions)
    return (
        ", ".join([_name(adapter.adapter_version, adapter.digest), *others]),
        _LEVELS[adapter.level],
        adapter.rank,
        megabytes(adapter.size_bytes),
        _pinned(adapter),
        adapter.active_requests,
    )


def _pinned(adapter: control_pb2.LoadedAdapter) -> str:
    """Whether it is, and by whom; replicas of before do not say by whom."""
    if adapter.pinned_by:
        return f"by {', '.join(_OWNERS[owner].lower() for owner in adapter.pinned_by)}"
    return "yes" if adapter.pinned else "no"


def _tier(usage: control_pb2.TierUsage, held: str) -> tuple[object, ...]:
    share = usage.used_bytes / usage.budget_bytes if usage.budget_bytes else 0.0
    holds = f"{megabytes(usage.held_bytes)} {held}" if usage.held_bytes else ""
    return (
        usage.num_adapters,
        megabytes(usage.used_bytes),
        megabytes(usage.budget_bytes),
        bar(share),
        f"{share:.0%}",
        holds,
    )


def bar(share: float) -> str:
    """A share from 0 to 1 as a bar."""
    filled = round(BAR_CELLS * min(max(share, 0.0), 1.0))
    return "█" * filled + "░" * (BAR_CELLS - filled)


def _name(version: str, digest: str) -> str:
    return short_version(version) or short_digest(digest)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

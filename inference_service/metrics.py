"""A replica's metrics for Prometheus: the names that gateways and public dashboards of vLLM read, and our own.

Names that begin with `vllm:` are a contract with others: the Kubernetes inference gateway picks a replica by them.
Everything is read from one `Snapshot`, so that a label set that is no longer true vanishes with the next.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from inference_service import metrics_labels as known
from inference_service.metrics_labels import from_zero
from inference_service.request_stats import RequestStats
from inference_service.stats import SECONDS_BOUNDS, AdapterStats, EngineStats, Seconds, TokenCounts
from inference_service.types import MemoryBudget, ResidentAdapter

MODEL = "model_name"
Labels = tuple[str, ...]
L = TypeVar("L", bound=Labels)


@dataclass(frozen=True)
class Snapshot:
    """What the supervisor knows of its replica at one moment. None: the process does not answer.

    Attributes:
        model: Id of the base model.
        max_adapters: Slots.
        memory: The device's budget, once the engine is warm.
        residents: Adapters on the device.
        in_host: Digests of the blobs in host memory.
        names: How clients name adapters, by digest.
        requests: Sums over all API processes that there have been.
        adapter_tokens: Served by all engines that there have been, by the name of the adapter.
        restarts: Processes that were started again, by what they are and why.
    """

    model: str
    max_adapters: int
    engine: EngineStats | None = None
    memory: MemoryBudget | None = None
    residents: tuple[ResidentAdapter, ...] = ()
    adapters: AdapterStats | None = None
    in_host: frozenset[str] = frozenset()
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    requests: RequestStats = field(default_factory=RequestStats)
    adapter_tokens: dict[str, TokenCounts] = field(default_factory=dict)
    restarts: dict[tuple[str, str], int] = field(default_factory=dict)


class ReplicaCollector(Collector):
    """Turns the latest snapshot into metrics. `clock` gives unix seconds, `monotonic` those that processes compare."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._snapshot = snapshot
        self._clock = clock
        self._monotonic = monotonic

    def collect(self) -> Iterator[Metric]:
        """All families."""
        now = self._snapshot()
        is_up = {("engine",): now.engine is not None, ("adapters",): now.adapters is not None}
        yield _gauges("loraplex_up", "Whether the process answers", ("process",), is_up)
        text = "Processes started again: they ended, or hung and were killed"
        yield _counters("loraplex_process_restarts", text, ("process", "reason"), now.restarts)
        yield from _residency(now)
        yield from _requests((now.model,), now.requests)
        yield from _waits_and_errors(now.requests)
        yield _adapter_tokens(now.adapter_tokens)
        if now.engine is not None:
            yield from _engine((now.model,), now.engine)
            yield from _loads(now.engine)
            yield from _slots(now.engine)
            yield _lora_requests_info(now, now.engine, self._clock())
        if now.memory is not None:
            yield _memory(now.memory)
        if now.adapters is not None:
            yield from _adapter_process(now.adapters)
            yield from _registry(now.adapters, self._monotonic())


def _residency(now: Snapshot) -> Iterator[Metric]:
    model, count = (now.model,), len(now.residents)
    yield _gauges("vllm:max_gpu_lora_adapters", "Most adapters on the device", (MODEL,), {model: now.max_adapters})
    yield _gauges("vllm:num_gpu_loaded_lora_adapters", "Adapters on the device", (MODEL,), {model: count})
    loaded: dict[tuple[str, ...], float] = {}
    pinned = {name for each in now.residents if each.pinned for name in now.names.get(each.digest, ())}
    for name in _names(now, (resident.digest for resident in now.residents)):
        loaded[name, "gpu", str(name in pinned).lower()] = 1
    for name in _names(now, sorted(now.in_host)):
        loaded[name, "cpu", "false"] = 1
    labels = ("adapter_name", "level", "pinned")
    yield _gauges("vllm:lora_adapter_loaded", "1 for an adapter on the device or in host memory", labels, loaded)


def _lora_requests_info(now: Snapshot, engine: EngineStats, seconds: float) -> Metric:
    """One series, with those on the device as running: an adapter that is warm and idle attracts its requests."""
    running = ",".join(_names(now, (resident.digest for resident in now.residents)))
    waiting = ",".join(_names(now, engine.adapters_waiting))
    return _gauges(
        "vllm:lora_requests_info",
        "When it was said which adapters are on the device and which are waited for",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        {(str(now.max_adapters), running, waiting): seconds},
    )


def _names(now: Snapshot, digests: Iterable[str]) -> list[str]:
    """How clients name these adapters, each name once: two versions of an adapter may share one.

    None that no request can use, or a gateway would send their requests here.
    """
    if now.adapters is not None and now.adapters.base_model_conflict:
        return []
    return list(dict.fromkeys(name for digest in digests for name in now.names.get(digest, ())))


def _engine(model: Labels, engine: EngineStats) -> Iterator[Metric]:
    label, blocks = (MODEL,), engine.kv_blocks
    used = blocks.used / blocks.total if blocks.total else 0.0
    yield _gauges("vllm:num_requests_running", "Sequences in steps", label, {model: engine.num_running})
    yield _gauges("vllm:num_requests_waiting", "Sequences in the queue", label, {model: engine.num_waiting})
    yield _gauges("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", label, {model: used})
    yield _gauges(
        "vllm:cache_config_info",
        "Geometry of the KV cache",
        ("block_size", "num_gpu_blocks"),
        {(str(engine.block_size), str(blocks.total)): 1},
    )
    for name, text, count in (
        ("vllm:prefix_cache_queries", "Prompt tokens looked for in the prefix cache", engine.prefix_tokens_queried),
        ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", engine.prefix_tokens_hit),
        ("vllm:num_preemptions", "Sequences that made room for others", engine.num_preemptions),
    ):
        yield _counters(name, text, label, {model: count})


def _loads(engine: EngineStats) -> Iterator[Metric]:
    """Adapters on their way to the device."""
    arena, pinned = engine.arena, engine.arena_pinned_bytes
    yield _gauges(
        "loraplex_arena_bytes",
        "Memory for adapters on the device; used is without pinned",
        ("state",),
        {("used",): arena.used - pinned, ("pinned",): pinned, ("free",): arena.total - arena.used},
    )
    total = engine.load_seconds.get("total", Seconds())
    yield _histograms("vllm:lora_adapter_load_seconds", "From the request for an adapter to READY", (), {(): total})
    phases = {(phase,): seconds for phase, seconds in engine.load_seconds.items() if phase != "total"}
    yield _histograms("loraplex_adapter_load_phase_seconds", "Parts of a load to the device", ("phase",), phases)
    hits: dict[Labels, int] = {(tier,): count for tier, count in engine.hits.items()}
    text = "Requests for an adapter, by the tier that held it"
    yield _counters("loraplex_adapter_hits", text, ("tier",), from_zero(known.TIERS, hits))
    evictions = from_zero(known.EVICTIONS, {(reason,): count for reason, count in engine.evictions.items()})
    yield _counters("loraplex_adapter_evictions", "Adapters that left the device", ("reason",), evictions)
    failures = from_zero(known.LOAD_FAILURES, {(reason,): count for reason, count in engine.load_failures.items()})
    yield _counters("loraplex_adapter_load_failures", "Loads to the device that failed", ("reason",), failures)
    num_waiting = len(engine.adapters_waiting)
    yield _gauges("loraplex_adapters_waiting", "Adapters that requests wait for", (), {(): num_waiting})
    yield _gauges("loraplex_adapter_wait_seconds", "Longest of these waits", (), {(): engine.waited_longest})


def _slots(engine: EngineStats) -> Iterator[Metric]:
    """How full the pool is, and what is done so that chunks fit."""
    slots = {("used",): engine.slots.used, ("free",): engine.slots.total - engine.slots.used}
    yield _gauges("loraplex_slots", "Adapters that can be on the device at once", ("state",), slots)
    text = "Free bytes for adapters outside the largest gap"
    yield _gauges("loraplex_arena_gap_bytes", text, (), {(): engine.arena_free_in_gaps})
    for name, text, count in (
        ("loraplex_arena_moves", "Chunks moved so that others fit", engine.moves),
        ("loraplex_arena_moved_bytes", "Bytes of these", engine.moved_bytes),
        (
            "loraplex_needless_reloads",
            "Adapters that were evicted while requests waited for them",
            engine.needless_reloads,
        ),
    ):
        yield _counters(name, text, (), {(): count})


def _adapter_process(adapters: AdapterStats) -> Iterator[Metric]:
    host, held, disk = adapters.host, adapters.host_held_bytes, adapters.disk
    yield _gauges(
        "loraplex_host_bytes",
        "Host memory for packed adapters; used is without held",
        ("state",),
        {("used",): host.used - held, ("held",): held, ("free",): host.total - host.used},
    )
    free = max(disk.total - disk.used, 0)
    yield _gauges("loraplex_disk_bytes", "Adapters on disk", ("state",), {("used",): disk.used, ("free",): free})
    counts = {("host",): adapters.host_adapters, ("disk",): adapters.disk_adapters}
    yield _gauges("loraplex_staged_adapters", "Adapters in a tier", ("tier",), counts)
    phases = {(phase,): seconds for phase, seconds in adapters.load_seconds.items()}
    yield _histograms("loraplex_adapter_stage_phase_seconds", "Parts of a load to host memory", ("phase",), phases)
    fetched = {(): adapters.fetched_bytes}
    yield _counters("loraplex_fetched_bytes", "Bytes of adapters downloaded", (), fetched)
    failures = from_zero(known.STAGE_FAILURES, {(reason,): count for reason, count in adapters.failures.items()})
    yield _counters("loraplex_stage_failures", "Resolutions and loads that failed", ("reason",), failures)
    evictions = from_zero(known.STAGE_EVICTIONS, {(tier,): count for tier, count in adapters.evictions.items()})
    yield _counters("loraplex_stage_evictions", "Adapters that left a tier for others", ("tier",), evictions)


def _registry(adapters: AdapterStats, now: float) -> Iterator[Metric]:
    """How far this replica follows the registry."""
    yield _gauges("loraplex_registry_revision", "Latest that is known here", (), {(): adapters.registry_revision})
    text = "Changes that the registry is known to have and that were not heard of"
    yield _gauges("loraplex_registry_lag_revisions", text, (), {(): adapters.registry_lag})
    text = "1 if the registry has another base model of this id, so that no adapter is served"
    yield _gauges("loraplex_base_model_conflict", text, (), {(): bool(adapters.base_model_conflict)})
    heard_at = adapters.registry_heard_at
    silence = {} if heard_at is None else {(): max(now - heard_at, 0.0)}
    yield _gauges("loraplex_registry_silence_seconds", "Since its watch was last up to date", (), silence)


def _memory(memory: MemoryBudget) -> Metric:
    kinds = {
        "weights": memory.weights,
        "activations": memory.activations,
        "reserve": memory.reserve,
        "adapter_arena": memory.adapter_arena,
        "kv_cache": memory.kv_cache,
        "other": memory.other,
        "unused": memory.unused,
    }
    text = "How the device's memory is divided; what is unknown on a CPU is 0"
    return _gauges("loraplex_memory_bytes", text, ("kind",), {(kind,): nbytes for kind, nbytes in kinds.items()})


def _requests(model: Labels, requests: RequestStats) -> Iterator[Metric]:
    label = (MODEL,)
    for name, text, seconds in (
        ("vllm:time_to_first_token_seconds", "From arrival to the first token", requests.first_token),
        ("vllm:inter_token_latency_seconds", "Between tokens of a sequence", requests.inter_token),
        ("vllm:e2e_request_latency_seconds", "From arrival to the end", requests.total),
        ("vllm:request_queue_time_seconds", "Until admission", requests.queue),
        ("vllm:request_prefill_time_seconds", "From admission to the first token", requests.prefill),
        ("vllm:request_decode_time_seconds", "From the first token to the last", requests.decode),
        ("vllm:request_inference_time_seconds", "From admission to the last token", requests.inference),
    ):
        yield _histograms(name, text, label, {model: seconds})
    yield _counters("vllm:prompt_tokens", "Tokens of prompts", label, {model: requests.tokens.prompt})
    yield _counters("vllm:generation_tokens", "Tokens of answers", label, {model: requests.tokens.generated})
    ends = from_zero(known.FINISHED, {(reason,): n for reason, n in requests.finished.items()})
    finished = {(*model, *reason): count for reason, count in ends.items()}
    yield _counters("vllm:request_success", "Requests by how they ended", (MODEL, "finished_reason"), finished)


def _waits_and_errors(requests: RequestStats) -> Iterator[Metric]:
    waits = {
        ("files",): requests.wait_files,
        ("adapter",): requests.wait_adapter,
        ("capacity",): requests.wait_capacity,
    }
    text = "Until admission: for an adapter's files, for its place on the device, and for anything else"
    yield _histograms("loraplex_queue_wait_seconds", text, ("reason",), waits)
    calls = from_zero(known.CALLS, {tuple(call.split()): count for call, count in sorted(requests.calls.items())})
    yield _counters("loraplex_calls", "Calls that ended, those that were not let in too", ("rpc", "code"), calls)
    errors = from_zero(known.REQUEST_ERRORS, {(reason,): n for reason, n in sorted(requests.errors.items())})
    yield _counters("loraplex_request_errors", "Requests refused, failed or left", ("reason",), errors)


def _adapter_tokens(served: Mapping[str, TokenCounts]) -> Metric:
    counts: dict[Labels, float] = {}
    for name, tokens in served.items():
        counts |= {(name, "prompt"): tokens.prompt, (name, "generated"): tokens.generated}
    return _counters("loraplex_adapter_tokens", "Tokens served", ("adapter_name", "kind"), counts)


def _gauges(name: str, text: str, labels: Labels, values: Mapping[L, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family


def _counters(name: str, text: str, labels: Labels, values: Mapping[L, float]) -> Metric:
    """`name` is without `_total`."""
    family = CounterMetricFamily(name, text, labels=labels)
    for of, value in values.items():
        family.add_metric(of, value)
    return family


def _histograms(name: str, text: str, labels: Labels, values: Mapping[L, Seconds]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for of, seconds in values.items():
        counts = zip((*map(str, SECONDS_BOUNDS), "+Inf"), accumulate(seconds.buckets), strict=True)
        family.add_metric(of, [(bound, float(count)) for bound, count in counts], seconds.sum)
    return family

"""Metrics of the engine process: its queue and KV cache, loads to the device, and the slot pool."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from inference_service import metrics_labels as known
from inference_service.metrics_families import MODEL, Labels, counters, gauges, histograms
from inference_service.metrics_labels import from_zero
from inference_service.stats import EngineStats, Seconds


def of_engine(model: Labels, engine: EngineStats) -> Iterator[Metric]:
    """All of them. `model`: the label of the base model."""
    yield from _steps(model, engine)
    yield from _loads(engine)
    yield from _slots(engine)


def _steps(model: Labels, engine: EngineStats) -> Iterator[Metric]:
    label, blocks = (MODEL,), engine.kv_blocks
    used = blocks.used / blocks.total if blocks.total else 0.0
    yield gauges("vllm:num_requests_running", "Sequences in steps", label, {model: engine.num_running})
    yield gauges("vllm:num_requests_waiting", "Sequences in the queue", label, {model: engine.num_waiting})
    yield gauges("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", label, {model: used})
    yield gauges(
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
        yield counters(name, text, label, {model: count})


def _loads(engine: EngineStats) -> Iterator[Metric]:
    """Adapters on their way to the device."""
    arena, pinned = engine.arena, engine.arena_pinned_bytes
    yield gauges(
        "loraplex_arena_bytes",
        "Memory for adapters on the device; used is without pinned",
        ("state",),
        {("used",): arena.used - pinned, ("pinned",): pinned, ("free",): arena.total - arena.used},
    )
    total = engine.load_seconds.get("total", Seconds())
    yield histograms("vllm:lora_adapter_load_seconds", "From the request for an adapter to READY", (), {(): total})
    phases = {(phase,): seconds for phase, seconds in engine.load_seconds.items() if phase != "total"}
    yield histograms("loraplex_adapter_load_phase_seconds", "Parts of a load to the device", ("phase",), phases)
    hits: dict[Labels, int] = {(tier,): count for tier, count in engine.hits.items()}
    text = "Requests for an adapter, by the tier that held it"
    yield counters("loraplex_adapter_hits", text, ("tier",), from_zero(known.TIERS, hits))
    evictions = from_zero(known.EVICTIONS, {(reason,): count for reason, count in engine.evictions.items()})
    yield counters("loraplex_adapter_evictions", "Adapters that left the device", ("reason",), evictions)
    failures = from_zero(known.LOAD_FAILURES, {(reason,): count for reason, count in engine.load_failures.items()})
    yield counters(
        "loraplex_adapter_load_failures", "Attempts at loads to the device that failed", ("reason",), failures
    )
    num_waiting = len(engine.adapters_waiting)
    yield gauges("loraplex_adapters_waiting", "Adapters that requests wait for", (), {(): num_waiting})
    yield gauges("loraplex_adapter_wait_seconds", "Longest of these waits", (), {(): engine.waited_longest})


def _slots(engine: EngineStats) -> Iterator[Metric]:
    """How full the pool is, and what is done so that chunks fit."""
    slots = {("used",): engine.slots.used, ("free",): engine.slots.total - engine.slots.used}
    yield gauges("loraplex_slots", "Adapters that can be on the device at once", ("state",), slots)
    text = "Free bytes for adapters outside the largest gap"
    yield gauges("loraplex_arena_gap_bytes", text, (), {(): engine.arena_free_in_gaps})
    for name, text, count in (
        ("loraplex_arena_moves", "Chunks moved so that others fit", engine.moves),
        ("loraplex_arena_moved_bytes", "Bytes of these", engine.moved_bytes),
        (
            "loraplex_needless_reloads",
            "Adapters that were evicted while requests waited for them",
            engine.needless_reloads,
        ),
    ):
        yield counters(name, text, (), {(): count})

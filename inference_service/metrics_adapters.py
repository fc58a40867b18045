"""Metrics of the adapter process: its memory, disk and downloads, and how far it follows the registry."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from inference_service import metrics_labels as known
from inference_service.metrics_families import counters, gauges, histograms
from inference_service.metrics_labels import from_zero
from inference_service.stats import AdapterStats


def of_adapters(adapters: AdapterStats, now: float) -> Iterator[Metric]:
    """All of them. `now`: monotonic seconds."""
    yield from _tiers(adapters)
    yield from _registry(adapters, now)


def _tiers(adapters: AdapterStats) -> Iterator[Metric]:
    host, held, disk = adapters.host, adapters.host_held_bytes, adapters.disk
    yield gauges(
        "loraplex_host_bytes",
        "Host memory for packed adapters; used is without held",
        ("state",),
        {("used",): host.used - held, ("held",): held, ("free",): host.total - host.used},
    )
    free = max(disk.total - disk.used, 0)
    yield gauges("loraplex_disk_bytes", "Adapters on disk", ("state",), {("used",): disk.used, ("free",): free})
    counts = {("host",): adapters.host_adapters, ("disk",): adapters.disk_adapters}
    yield gauges("loraplex_staged_adapters", "Adapters in a tier", ("tier",), counts)
    phases = {(phase,): seconds for phase, seconds in adapters.load_seconds.items()}
    yield histograms("loraplex_adapter_stage_phase_seconds", "Parts of a load to host memory", ("phase",), phases)
    fetched = {(): adapters.fetched_bytes}
    yield counters("loraplex_fetched_bytes", "Bytes of adapters downloaded", (), fetched)
    failures = from_zero(known.STAGE_FAILURES, {(reason,): count for reason, count in adapters.failures.items()})
    yield counters("loraplex_stage_failures", "Attempts at resolutions and loads that failed", ("reason",), failures)
    evictions = from_zero(known.STAGE_EVICTIONS, {(tier,): count for tier, count in adapters.evictions.items()})
    yield counters("loraplex_stage_evictions", "Adapters that left a tier for others", ("tier",), evictions)


def _registry(adapters: AdapterStats, now: float) -> Iterator[Metric]:
    """How far this replica follows the registry."""
    yield gauges("loraplex_registry_revision", "Latest that is known here", (), {(): adapters.registry_revision})
    text = "Changes that the registry is known to have and that were not heard of"
    yield gauges("loraplex_registry_lag_revisions", text, (), {(): adapters.registry_lag})
    text = "1 if the registry has another base model of this id, so that no adapter is served"
    yield gauges("loraplex_base_model_conflict", text, (), {(): bool(adapters.base_model_conflict)})
    heard_at = adapters.registry_heard_at
    silence = {} if heard_at is None else {(): max(now - heard_at, 0.0)}
    yield gauges("loraplex_registry_silence_seconds", "Since its watch was last up to date", (), silence)

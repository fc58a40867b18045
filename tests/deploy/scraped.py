"""Scrapes of the real collectors, with every family that they can show: what Prometheus would know the services by."""

import asyncio
import tempfile
import time
import types
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import grpc
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from inference_service.metrics import ReplicaCollector, Snapshot
from inference_service.request_stats import RequestMeter
from inference_service.types import SequenceDelta, Started
from registry_service.adapter_cache import AdapterCache
from registry_service.config import RegistryConfig
from registry_service.metrics import RegistryMetrics, RegistryState
from registry_service.purging import Purger
from registry_service.server import start
from registry_service.watch import Watches
from shared.auth.rules import RULES
from shared.errors import AdapterUnloaded

# What Prometheus adds to every series of a ServiceMonitor's target.
TARGET_LABELS = {"namespace", "pod", "job", "instance", "container", "endpoint", "service"}
SYNTHETIC = {"up"}
INFERENCE, REGISTRY = JOBS = ("loraplex-inference", "loraplex-registry")  # by the monitors' jobLabel
ANY = "any"  # a label value that only traffic decides
REQUEST = {"prepare_seconds": 0.1, "submitted": 0.0, "num_prompt": 1}


class Series(NamedTuple):
    """All label sets of one name, and the jobs that show it."""

    labels: list[dict[str, str]]
    jobs: set[str]

    def has(self, label: str) -> bool:
        return label in TARGET_LABELS or any(label in labels for labels in self.labels)

    def values(self, label: str) -> set[str]:
        return {labels[label] for labels in self.labels if label in labels}


def scraped() -> dict[str, Series]:
    """Series by name, read from the text format."""
    snapshot = filled(Snapshot, {"requests": _request_stats()})
    replica = generate_latest(ReplicaCollector(lambda: snapshot)).decode()
    found: dict[str, Series] = {name: Series([{}], set(JOBS)) for name in SYNTHETIC}
    for job, text in ((INFERENCE, replica), (REGISTRY, asyncio.run(_registry_text()))):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                series = found.setdefault(sample.name, Series([], set()))
                series.labels.append(dict(sample.labels))
                series.jobs.add(job)
    return found


async def _registry_text() -> str:
    """Of a running registry, as if every RPC had ended with every code."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/registry.db"
        running = await start(RegistryConfig(listen="127.0.0.1:0", database=url))
        database, metrics = running.database, RegistryMetrics()
        for method in RULES:
            for code in grpc.StatusCode if "registry" in method else ():
                metrics.begin(method, None)(code)
        watches = Watches(database, running.log, 1.0)
        purger = Purger(database, timedelta(days=1))
        metrics.collector.register(RegistryState(database, running.log, AdapterCache(database, 1), watches, purger))
        text = generate_latest(metrics.collector).decode()
        await running.stop()
        return text


def filled(kind: Any, known: dict[str, Any] | None = None) -> Any:
    """A value of a type with nothing empty in it, so that no family is without samples."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return filled(next(arg for arg in args if arg is not type(None)))
    if origin is Literal:
        return args[0]
    if origin is dict:
        keys = get_args(args[0]) if get_origin(args[0]) is Literal else [filled(args[0])]
        return {key: filled(args[1]) for key in keys}
    if origin in (list, tuple, set, frozenset):
        return origin([filled(args[0])])
    if is_dataclass(kind) or hasattr(kind, "__struct_fields__") or hasattr(kind, "_fields"):
        known = known or {}
        return kind(**{name: known.get(name) or _of_field(kind, name, hint) for name, hint in _hints(kind).items()})
    return {int: 1, float: 1.0, str: ANY, bool: True, bytes: b"1"}[kind]


def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    names = getattr(kind, "__struct_fields__", None) or getattr(kind, "_fields", None) or [f.name for f in fields(kind)]
    return {name: hints[name] for name in names}


def _of_field(kind: Any, name: str, hint: Any) -> Any:
    # The buckets of a histogram have a length of their own.
    return kind().buckets if name == "buckets" else filled(hint)


def _request_stats() -> Any:
    """Of requests that ended in each way."""
    meter = RequestMeter()
    for reason in ("stop", "length"):
        with meter.stream(time.monotonic(), **REQUEST) as times:
            times.observe(Started("r", 0, 0.25, 0.5))
            times.observe(SequenceDelta("r", 0, [1], None, reason))
    for error in (AdapterUnloaded("gone"), asyncio.CancelledError()):
        try:
            with meter.stream(time.monotonic(), **REQUEST):
                raise error
        except (AdapterUnloaded, asyncio.CancelledError):
            pass
    meter.ended("QUEUE_FULL")
    for code in grpc.StatusCode:
        meter.begin("/loraplex.inference.v1.InferenceService/Generate", None)(code)
    return meter.stats

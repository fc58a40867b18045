"""A replica's metrics for Prometheus: the names that gateways and public dashboards of vLLM read, and our own.

Names that begin with `vllm:` are a contract with others: the Kubernetes inference gateway picks a replica by them.
Everything is read from one `Snapshot`, so that a label set that is no longer true vanishes with the next.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from inference_service import metrics_labels as known
from inference_service.metrics_adapters import of_adapters
from inference_service.metrics_engine import of_engine
from inference_service.metrics_families import MODEL, counters, gauges
from inference_service.metrics_labels import from_zero
from inference_service.metrics_requests import of_requests
from inference_service.request_stats import RequestStats
from inference_service.stats import AdapterStats, EngineStats, TokenCounts
from inference_service.types import MemoryBudget, ResidentAdapter


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
        is_api_up: All API processes answer.
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
    is_api_up: bool = False


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
        is_up = {"engine": now.engine is not None, "adapters": now.adapters is not None, "api": now.is_api_up}
        up = {(process,): answers for process, answers in is_up.items()}
        yield gauges("loraplex_up", "Whether the process answers, and of several each", ("process",), up)
        text = "Processes started again: they ended, or hung and were killed"
        restarts = from_zero(known.RESTARTS, now.restarts)
        yield counters("loraplex_process_restarts", text, ("process", "reason"), restarts)
        yield from _residency(now)
        yield from of_requests((now.model,), now.requests, now.adapter_tokens)
        if now.engine is not None:
            yield from of_engine((now.model,), now.engine)
            yield _lora_requests_info(now, now.engine, self._clock())
        if now.memory is not None:
            yield _memory(now.memory)
        if now.adapters is not None:
            yield from of_adapters(now.adapters, self._monotonic())


def _residency(now: Snapshot) -> Iterator[Metric]:
    model, count = (now.model,), len(now.residents)
    yield gauges("vllm:max_gpu_lora_adapters", "Most adapters on the device", (MODEL,), {model: now.max_adapters})
    yield gauges("vllm:num_gpu_loaded_lora_adapters", "Adapters on the device", (MODEL,), {model: count})
    loaded: dict[tuple[str, ...], float] = {}
    pinned = {name for each in now.residents if each.pinned for name in now.names.get(each.digest, ())}
    for name in _names(now, (resident.digest for resident in now.residents)):
        loaded[name, "gpu", str(name in pinned).lower()] = 1
    for name in _names(now, sorted(now.in_host)):
        loaded[name, "cpu", "false"] = 1
    labels = ("adapter_name", "level", "pinned")
    yield gauges("vllm:lora_adapter_loaded", "1 for an adapter on the device or in host memory", labels, loaded)


def _lora_requests_info(now: Snapshot, engine: EngineStats, seconds: float) -> Metric:
    """One series, with those on the device as running: an adapter that is warm and idle attracts its requests."""
    running = ",".join(_names(now, (resident.digest for resident in now.residents)))
    waiting = ",".join(_names(now, engine.adapters_waiting))
    return gauges(
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
    return gauges("loraplex_memory_bytes", text, ("kind",), {(kind,): nbytes for kind, nbytes in kinds.items()})

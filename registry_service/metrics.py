"""The registry's metrics for Prometheus: its calls, its change log and watches, its cache, its database.

Every label has few values: names of RPCs, gRPC's codes, and words of this file.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loraplex.registry.v1 import registry_pb2
from registry_service.adapter_cache import AdapterCache
from registry_service.change_log import ChangeLog
from registry_service.database import MAX_OVERFLOW, Database
from registry_service.purging import Purger
from registry_service.watch import Watches
from shared.auth.rules import RULES
from shared.call_observers import EndCall

BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0)
_OTHER = "other"
_SERVICE = f"/{registry_pb2.DESCRIPTOR.services_by_name['AdapterRegistryService'].full_name}/"
# What alerts look at begins at 0: Prometheus sees no growth in a series that begins with its first event.
_FROM_ZERO = ("OK", "DATA_LOSS", "INTERNAL", "UNAVAILABLE", "UNKNOWN")


class RegistryMetrics:
    """Counts the calls that a server handles (a `CallObserver`) and the waits for the database.

    `collector` is what to serve.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # when a series began: one more for each
        self.collector = CollectorRegistry()
        self._calls = Counter(
            "loraplex_registry_requests", "Calls that ended", ("rpc", "code"), registry=self.collector
        )
        for method, code in product(RULES, _FROM_ZERO):
            if method.startswith(_SERVICE):
                self._calls.labels(method.removeprefix(_SERVICE), code)
        self._seconds = Histogram(
            "loraplex_registry_request_seconds",
            "How long calls took, but for watches",
            ("rpc", "code"),
            registry=self.collector,
            buckets=BUCKETS,
        )
        self._running = Gauge("loraplex_registry_requests_running", "Calls", ("rpc",), registry=self.collector)
        self._pool_waits = Histogram(
            "loraplex_registry_pool_wait_seconds",
            "Until a transaction had a connection, and on SQLite the right to write",
            registry=self.collector,
            buckets=BUCKETS,
        )

    def begin(self, method: str, context: Any) -> EndCall:
        """A call begins."""
        rule, began = RULES.get(method), time.monotonic()
        rpc = _OTHER if rule is None else method.rpartition("/")[2]
        running = self._running.labels(rpc)
        running.inc()

        def end(code: grpc.StatusCode) -> None:
            running.dec()
            self._calls.labels(rpc, code.name).inc()
            if rule is not None and not rule.is_endless:
                self._seconds.labels(rpc, code.name).observe(time.monotonic() - began)

        return end

    def connected(self, seconds: float) -> None:
        """A transaction waited for so long until it had its connection."""
        self._pool_waits.observe(seconds)


@dataclass(frozen=True)
class RegistryState(Collector):
    """What the parts of a registry say of themselves when they are asked. Read from another thread than theirs."""

    database: Database
    log: ChangeLog
    cache: AdapterCache
    watches: Watches
    purger: Purger
    clock: Callable[[], float] = time.monotonic

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._changes()
        yield from self._database()
        cache = self.cache
        yield _gauge("loraplex_registry_cached_adapters", "Adapters that are resolved from memory", len(cache))
        lookups = {"hit": cache.num_hits, "absent": cache.num_absent, "miss": cache.num_misses}
        text = "Look-ups of adapters: in memory, known not to exist, and asked of the database"
        yield _counters("loraplex_registry_cache_lookups", text, "outcome", lookups)
        purged = self.purger.total._asdict()
        yield _counters("loraplex_registry_purged", "What this registry deleted for good", "kind", purged)

    def _changes(self) -> Iterator[Metric]:
        now, revision = self.clock(), self.log.position.revision
        open_watches = list(self.watches.progress)
        behind = max((revision - watch.revision for watch in open_watches), default=0)
        sending = [watch.sending_since for watch in open_watches if watch.sending_since is not None]
        for name, text, value in (
            ("revision", "Latest change that this registry has read", revision),
            ("log_lag_revisions", "Committed changes that it has not read", self.log.lag),
            ("log_age_seconds", "Since it looked for changes", now - self.log.read_at),
            ("watchers", "Open watches", len(open_watches)),
            ("watch_lag_revisions", "Changes that the slowest watch has not been told", max(behind, 0)),
            ("watch_lag_seconds", "How long the slowest watch has not taken what it is sent", _longest(now, sending)),
        ):
            yield _gauge(f"loraplex_registry_{name}", text, value)

    def _database(self) -> Iterator[Metric]:
        yield _gauge("loraplex_registry_database_up", "Whether the last transaction reached it", self.database.is_up)
        database = self.database
        pools = {"transactions": _connections(database.engine.pool), "lookups": _connections(database.lookups.pool)}
        for name, text in (
            ("in_use", "Connections that are in use"),
            ("idle", "Connections that are not"),
            ("size", "Connections that are kept for use"),
            ("overflow", "Connections beyond those"),
            ("capacity", "Connections that there may be, those beyond included"),
        ):
            values = {purpose: numbers[name] for purpose, numbers in pools.items()}
            yield _gauges(f"loraplex_registry_pool_{name}", text, "purpose", values)


def _connections(pool: Any) -> dict[str, float]:
    return {
        "in_use": pool.checkedout(),
        "idle": pool.checkedin(),
        "size": pool.size(),
        "overflow": max(pool.overflow(), 0),
        "capacity": pool.size() + MAX_OVERFLOW,
    }


def _longest(now: float, since: list[float]) -> float:
    return now - min(since) if since else 0.0


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for of, value in values.items():
        family.add_metric((of,), value)
    return family


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """`name` is without `_total`."""
    family = CounterMetricFamily(name, text, labels=(label,))
    for of, value in values.items():
        family.add_metric((of,), value)
    return family

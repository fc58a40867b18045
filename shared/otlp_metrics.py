"""Metrics sent to a collector over OTLP. Imported only where `shared.tracing` says that there are any."""

import threading
from collections.abc import Sequence
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import Histogram
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

from shared.spans import LAST_EXPORT_SECONDS, resource_of


class OtlpMetrics:
    """The metrics of one process. They go out by themselves, every OTEL_METRIC_EXPORT_INTERVAL milliseconds."""

    def __init__(self, endpoint: str, service: str, process: str) -> None:
        """`endpoint`: http://HOST:PORT of the collector; empty: what the OTEL_… variables say, which count for the rest
        as well (headers, certificates, resource attributes, interval, temporality)."""
        self._exporter = OTLPMetricExporter(endpoint or None)
        reader = PeriodicExportingMetricReader(self._exporter)
        self._provider = MeterProvider([reader], resource_of(service, process), shutdown_on_exit=False)
        self._meter = self._provider.get_meter("loraplex", version("loraplex"))

    def seconds(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        """A histogram of durations, whose buckets end at `bounds`."""
        return self._meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=bounds)

    def close(self) -> None:
        """Send what is left, if the collector takes it within a moment. Blocks."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-metrics", daemon=True)
        sending.start()
        sending.join(LAST_EXPORT_SECONDS)
        if sending.is_alive():
            self._exporter.shutdown()  # it tries no more

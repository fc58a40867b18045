"""An OpenTelemetry collector that keeps what it is sent over OTLP, on a real socket."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

SERVER, CLIENT, INTERNAL = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_INTERNAL


class Kept(NamedTuple):
    """A span. Ids are hexadecimal; `resource` and `attributes` are plain values; times are nanoseconds."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    has_failed: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Measured(NamedTuple):
    """A histogram of one label set, as it was sent last. `resource` and `attributes` are plain values."""

    count: int
    sum: float
    bounds: list[float]
    attributes: dict[str, Any]
    resource: dict[str, Any]


class MetricsCollector(MetricsServiceServicer):
    """Keeps the latest of each histogram; metrics are sent as sums since the start of their process."""

    def __init__(self) -> None:
        self._latest: dict[tuple[Any, ...], Measured] = {}

    def Export(  # noqa: N802
        self, request: ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> ExportMetricsServiceResponse:
        for of_resource in request.resource_metrics:
            resource = _plain(of_resource.resource.attributes)
            for metric in (metric for scope in of_resource.scope_metrics for metric in scope.metrics):
                for point in metric.histogram.data_points:
                    attributes = _plain(point.attributes)
                    key = (metric.name, resource["service.instance.id"], *sorted(attributes.items()))
                    self._latest[key] = Measured(
                        point.count, point.sum, list(point.explicit_bounds), attributes, resource
                    )
        return ExportMetricsServiceResponse()

    def of(self, name: str) -> list[Measured]:
        """What was sent of a histogram."""
        return [measured for (named, *_), measured in list(self._latest.items()) if named == name]


class Collector(TraceServiceServicer):
    def __init__(self) -> None:
        self.endpoint = ""
        self.metrics = MetricsCollector()
        self._spans: list[Kept] = []
        self._lock = threading.Lock()

    def Export(self, request: ExportTraceServiceRequest, context: grpc.ServicerContext) -> ExportTraceServiceResponse:  # noqa: N802
        with self._lock:
            for of_resource in request.resource_spans:
                resource = _plain(of_resource.resource.attributes)
                self._spans += [_kept(span, resource) for scope in of_resource.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse()

    def spans(self) -> list[Kept]:
        """Everything that has come, in order of beginning."""
        with self._lock:
            return sorted(self._spans, key=lambda span: span.start)

    def names(self, trace_id: str) -> set[tuple[str, int]]:
        """Name and kind of all spans of a trace."""
        return {(span.name, span.kind) for span in self.spans() if span.trace_id == trace_id}

    def one(self, name: str, kind: int = INTERNAL, trace_id: str = "") -> Kept:
        """The only span of this name, in this trace if one is named."""
        found = [s for s in self.spans() if (s.name, s.kind) == (name, kind) and trace_id in ("", s.trace_id)]
        assert len(found) == 1, f"{len(found)} of {name} among {[(s.name, s.kind) for s in self.spans()]}"
        return found[0]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens at `endpoint`."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    add_TraceServiceServicer_to_server(collector, server)
    add_MetricsServiceServicer_to_server(collector.metrics, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _kept(span: Span, resource: dict[str, Any]) -> Kept:
    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    times = (span.start_time_unix_nano, span.end_time_unix_nano)
    return Kept(span.name, span.kind, *ids, *times, span.status.code == 2, _plain(span.attributes), resource)


def _plain(attributes: list[KeyValue]) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None

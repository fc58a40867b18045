"""Spans of OpenTelemetry, sent to a collector over OTLP. Imported only where `shared.tracing` says that there are any.

Contexts are W3C's, in the metadata of calls and in messages between processes. Within a process they follow the task.
"""

import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import grpc
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.auth.rules import RULES
from shared.call_observers import EndCall

Attributes = Mapping[str, str | bool | int | float | Sequence[str] | Sequence[float]]

TRACEPARENT = "traceparent"
LAST_EXPORT_SECONDS = 2.0  # that the end of a process waits for the collector
_W3C = TraceContextTextMapPropagator()
# Statuses that are the server's fault, by the semantic conventions of RPCs.
_FAULTS = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}


class Tracing:
    """The spans of one process; a `CallObserver`, which makes one of each call that a server handles.

    Endless streams (watches) have none: their span would be told when they end. Neither have the calls that replicas
    make by themselves, again and again, unless their caller traces them.
    """

    def __init__(self, endpoint: str, service: str, process: str) -> None:
        """`endpoint`: http://HOST:PORT of the collector; empty: what the OTEL_… variables say, which count for the rest
        as well (sampler, headers, certificates, resource attributes, batches)."""
        self._provider = TracerProvider(resource=resource_of(service, process), shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint or None)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("loraplex", version("loraplex"))

    def begin(self, method: str, context: Any) -> EndCall:
        """A call begins; its span is the current one of the task from now on."""
        carrier = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        parent, rule = _W3C.extract(carrier), RULES.get(method)
        has_parent = trace.get_current_span(parent).get_span_context().is_valid
        if rule is not None and (rule.is_endless or (rule.is_periodic and not has_parent)):
            return lambda code: None
        span = self._start(method, SpanKind.SERVER, parent)
        contexts.attach(trace.set_span_in_context(span))  # each call has a task, and so a context, of its own

        def end(code: grpc.StatusCode) -> None:
            _end_call(span, code, is_fault=code in _FAULTS)

        return end

    def client_interceptors(self) -> list[Any]:
        """For channels on which calls are made for a request that is traced; no other call is."""
        return [_TracedUnary(self)]

    @contextmanager
    def continued(self, name: str, traceparent: str) -> Iterator[None]:
        """A span of this process below the one of another that `traceparent` names, for as long as the block runs."""
        parent = _W3C.extract({TRACEPARENT: traceparent})
        with self._tracer.start_as_current_span(name, parent, record_exception=False, set_status_on_exception=False):
            yield

    def current(self) -> "CallSpan":
        """The span of the call that this task handles."""
        return CallSpan(self._tracer, trace.get_current_span())

    def traceparent(self) -> str:
        """The current span's context, for a message to another process; empty if there is none."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier)
        return carrier.get(TRACEPARENT, "")

    def close(self) -> None:
        """Send what is left, if the collector takes it within a moment. Blocks."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(LAST_EXPORT_SECONDS)
        if sending.is_alive():
            self._exporter.shutdown()  # it tries no more

    def _start(self, method: str, kind: SpanKind, parent: Any = None) -> Span:
        service, _, rpc = method.strip("/").partition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": rpc}
        return self._tracer.start_span(f"{service}/{rpc}", parent, kind, attributes)


class CallSpan:
    """The span of a call, for who knows more of it. A stream may be closed by another task than the one it began in."""

    def __init__(self, tracer: trace.Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def is_recording(self) -> bool:
        """Whether it is kept: what is expensive to say of it need not be said otherwise."""
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; empty if there is no span."""
        found = self._span.get_span_context()
        return trace.format_trace_id(found.trace_id) if found.is_valid else ""

    def annotate(self, attributes: Attributes, error: str = "") -> None:
        """Say more of it. `error`: reason for which it failed."""
        self._span.set_attributes(attributes)
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))

    def add_children(self, phases: Iterable[tuple[str, float, float, Attributes]]) -> None:
        """Spans below it that have ended already: (name, start, end, attributes), in seconds of the monotonic clock."""
        offset, parent = _unix_offset(), trace.set_span_in_context(self._span)
        for name, start, end, attributes in phases:
            span = self._tracer.start_span(name, parent, attributes=attributes, start_time=int(start * 1e9) + offset)
            span.end(int(max(start, end) * 1e9) + offset)


def resource_of(service: str, process: str) -> Resource:
    """Who sends spans and metrics: this process, and what the OTEL_… variables say of it."""
    own = {
        "service.name": service,
        "service.version": version("loraplex"),
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        "loraplex.process": process,
    }
    return Resource.create(own).merge(OTELResourceDetector().detect())


def _unix_offset() -> int:
    """Nanoseconds from the monotonic clock to unix time. Somebody else may run between two looks at the clocks."""
    looks = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(3)]
    before, unix, _ = min(looks, key=lambda look: look[2] - look[0])
    return unix - before


def _end_call(span: Span, code: grpc.StatusCode, *, is_fault: bool) -> None:
    span.set_attribute("rpc.grpc.status_code", code.value[0])
    if is_fault:
        span.set_status(Status(StatusCode.ERROR, code.name))
    span.end()


class _TracedUnary(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """A span for each call that is made for a traced request; its context goes along."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        if not trace.get_current_span().get_span_context().is_valid:
            return await continuation(client_call_details, request)
        method = client_call_details.method
        span = self._tracing._start(method.decode() if isinstance(method, bytes) else method, SpanKind.CLIENT)
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, trace.set_span_in_context(span))
        metadata = grpc.aio.Metadata(*(client_call_details.metadata or ()), *carrier.items())
        code = grpc.StatusCode.CANCELLED
        try:
            call = await continuation(client_call_details._replace(metadata=metadata), request)
            code = await call.code()
            return call
        finally:
            _end_call(span, code, is_fault=code is not grpc.StatusCode.OK)

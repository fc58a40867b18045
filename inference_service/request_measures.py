"""The durations of Generate requests under the names of GenAI's conventions, for collectors that are sent metrics.

They are those of `inference_service.metrics`, which Prometheus reads. The model is the base model: adapters are too
many to be told apart in a label.
"""

from typing import Protocol

from inference_service.request_record import Attributes, RequestRecord
from inference_service.request_spans import operation_of

# As the conventions advise.
_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_OUTPUT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class Histogram(Protocol):
    """OpenTelemetry's, which is not imported unless metrics are sent."""

    def record(self, amount: float, attributes: Attributes) -> None: ...


class Metrics(Protocol):
    """`shared.otlp_metrics.OtlpMetrics`."""

    def seconds(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram: ...


class RequestMeasures:
    """A reader of records."""

    def __init__(self, metrics: Metrics) -> None:
        self._total = metrics.seconds("gen_ai.server.request.duration", "From arrival to the end", _DURATION)
        self._first = metrics.seconds(
            "gen_ai.server.time_to_first_token", "From arrival to the first token", _FIRST_TOKEN
        )
        self._further = metrics.seconds(
            "gen_ai.server.time_per_output_token", "Of each token after the first", _OUTPUT_TOKEN
        )

    def __call__(self, record: RequestRecord) -> None:
        """A request has ended. Times until tokens are of those only that were answered."""
        about: Attributes = {
            "gen_ai.operation.name": operation_of(record),
            "gen_ai.provider.name": "loraplex",
            "gen_ai.request.model": record.model,
        }
        failed: Attributes = {"error.type": record.error} if record.error else {}
        self._total.record(record.ended - record.arrival, {**about, **failed})
        times = record.times
        if record.error or record.answer is None or times is None or times.first is None:
            return
        self._first.record(times.first - record.arrival, about)
        num_tokens = max(sequence.num_tokens for sequence in record.answer.sequences)
        if num_tokens > 1:
            self._further.record((times.last - times.first) / (num_tokens - 1), about)

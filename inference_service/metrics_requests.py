"""Metrics of requests, summed over the API processes: their times and tokens, how they ended, what they waited for."""

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric

from inference_service import metrics_labels as known
from inference_service.metrics_families import MODEL, Labels, counters, histograms
from inference_service.metrics_labels import from_zero
from inference_service.request_stats import RequestStats
from inference_service.stats import TokenCounts


def of_requests(model: Labels, requests: RequestStats, served: Mapping[str, TokenCounts]) -> Iterator[Metric]:
    """All of them. `model`: the label of the base model. `served`: tokens by the names of adapters."""
    yield from _times_and_ends(model, requests)
    yield from _waits_and_errors(requests)
    yield _adapter_tokens(served)


def _times_and_ends(model: Labels, requests: RequestStats) -> Iterator[Metric]:
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
        yield histograms(name, text, label, {model: seconds})
    yield counters("vllm:prompt_tokens", "Tokens of prompts", label, {model: requests.tokens.prompt})
    yield counters("vllm:generation_tokens", "Tokens of answers", label, {model: requests.tokens.generated})
    ends = from_zero(known.FINISHED, {(reason,): n for reason, n in requests.finished.items()})
    finished = {(*model, *reason): count for reason, count in ends.items()}
    yield counters("vllm:request_success", "Requests by how they ended", (MODEL, "finished_reason"), finished)


def _waits_and_errors(requests: RequestStats) -> Iterator[Metric]:
    waits = {
        ("files",): requests.wait_files,
        ("adapter",): requests.wait_adapter,
        ("capacity",): requests.wait_capacity,
    }
    text = "Until admission: for an adapter's files, for its place on the device, and for anything else"
    yield histograms("loraplex_queue_wait_seconds", text, ("reason",), waits)
    calls = from_zero(known.CALLS, {tuple(call.split()): count for call, count in sorted(requests.calls.items())})
    yield counters("loraplex_calls", "Calls that ended, those that were not let in too", ("rpc", "code"), calls)
    errors = from_zero(known.REQUEST_ERRORS, {(reason,): n for reason, n in sorted(requests.errors.items())})
    yield counters("loraplex_request_errors", "Requests refused, failed or left", ("reason",), errors)


def _adapter_tokens(served: Mapping[str, TokenCounts]) -> Metric:
    counts: dict[Labels, float] = {}
    for name, tokens in served.items():
        counts |= {(name, "prompt"): tokens.prompt, (name, "generated"): tokens.generated}
    return counters("loraplex_adapter_tokens", "Tokens served", ("adapter_name", "kind"), counts)

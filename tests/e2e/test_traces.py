"""One trace of a request through both services' processes, as a collector gets it; and the line that logs tell."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from examples.stack import INFERENCE_SERVICE, REGISTRY_SERVICE, Stack, register, wait_for_base_model
from loraplex.inference.v1 import inference_pb2 as pb
from shared.base_model import MODULES, parse_config
from tests.bench.random_adapters import write_adapters
from tests.inference_service.serving_fakes import raw_config
from tests.shared.otlp_collector import CLIENT, INTERNAL, SERVER, Collector, collecting

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GENERATE = f"{INFERENCE_SERVICE}/Generate"
RESOLVE = f"{REGISTRY_SERVICE}/ResolveAdapter"
DURATION = "gen_ai.server.request.duration"
PHASES = ("tokenize", "load adapter", "queue", "prefill", "decode")
SPANS = {(GENERATE, SERVER), (RESOLVE, CLIENT), (RESOLVE, SERVER), ("prepare adapter", INTERNAL)}
SPANS |= {(phase, INTERNAL) for phase in PHASES}


class Traced(NamedTuple):
    """What is left of a stack that has answered one request in a trace of its caller's, and one that has none."""

    collector: Collector
    started: pb.Started
    finished: pb.Finished
    lines: list[dict]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    folder = tmp_path_factory.mktemp("traced")
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(raw_config()))
    write_adapters(folder / "root", ["pirate"], parse_config(raw_config()), 4, MODULES)
    with collecting() as collector, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
        responses = asyncio.run(_ask(folder, collector))
    lines = [json.loads(line) for line in (folder / "inference.log").read_text().splitlines() if line[:1] == "{"]
    requests = [line for line in lines if line["logger"] == "loraplex.requests"]
    return Traced(collector, responses[0].started, responses[-1].finished, requests)


async def _ask(folder: Path, collector: Collector) -> list[pb.GenerateResponse]:
    otlp = f"--otlp-endpoint={collector.endpoint}"
    flags = ["--load-format=dummy", "--adapter-memory=1MiB", "--host-memory=1MiB", "--kv-cache-memory=8MiB", otlp]
    roots = {"root": folder / "root"}
    stack = Stack(folder, model=folder / "tiny", flags=flags, registry_flags=[otlp], roots=roots)
    async with stack, stack.client() as client:
        await wait_for_base_model(client, "baseModels/tiny")
        await register(client, "pirate", "file://root/pirate", "baseModels/tiny")
        request = pb.GenerateRequest(adapter="pirate", token_ids=pb.TokenIds(ids=[1, 2, 3]))
        request.stop.MergeFrom(pb.Stop(max_tokens=4, ignore_eos=True))
        request.sampling.temperature = 0.5
        metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("x-request-id", "order-66"))
        responses = [response async for response in client.inference.Generate(request, metadata=metadata)]
        async with asyncio.timeout(60):
            while not (collector.names(TRACE) >= SPANS and collector.metrics.of(DURATION)):  # noqa: ASYNC110 - they come
                await asyncio.sleep(0.05)
        return responses


def test_the_call_is_in_its_callers_trace_and_says_what_was_asked_and_answered(traced: Traced) -> None:
    span = traced.collector.one(GENERATE, SERVER)
    assert (span.trace_id, span.parent_id) == (TRACE, PARENT)
    assert span.resource["service.name"] == "loraplex-inference"
    told = {
        "rpc.system": "grpc",
        "rpc.grpc.status_code": 0,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "pirate",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.response.model": traced.started.adapter_version,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "loraplex.adapter.digest": traced.started.adapter_digest,
        "loraplex.tenant": "default",
        "loraplex.request_id": "order-66",
    }
    assert told.items() <= span.attributes.items()


def test_the_times_of_a_request_follow_each_other_within_its_call(traced: Traced) -> None:
    call = traced.collector.one(GENERATE, SERVER)
    phases = [traced.collector.one(name) for name in PHASES]
    assert {(phase.trace_id, phase.parent_id) for phase in phases} == {(TRACE, call.span_id)}
    for earlier, later in pairwise(phases):
        assert earlier.start <= earlier.end <= later.start
    slack = 1_000_000_000  # clocks are compared, on a machine that has other things to do
    assert call.start <= phases[0].start + slack
    assert phases[-1].end <= call.end + slack
    assert phases[3].end > phases[3].start, "the prompt was not computed in no time"
    assert [phase.attributes.get("loraplex.tokens") for phase in phases] == [3, None, None, 3, 4]


def test_the_registry_is_asked_in_the_same_trace(traced: Traced) -> None:
    """API process → adapter process → registry."""
    call = traced.collector.one(GENERATE, SERVER)
    prepared = traced.collector.one("prepare adapter")
    asked = traced.collector.one(RESOLVE, CLIENT, TRACE)
    answered = traced.collector.one(RESOLVE, SERVER, TRACE)
    assert {span.trace_id for span in (prepared, asked, answered)} == {TRACE}
    assert (prepared.parent_id, asked.parent_id, answered.parent_id) == (call.span_id, prepared.span_id, asked.span_id)
    processes = [span.resource["loraplex.process"] for span in (call, prepared, asked, answered)]
    assert processes == ["api", "adapters", "adapters", "registry"]
    assert answered.resource["service.name"] == "loraplex-registry"


def test_what_nobody_traces_makes_no_spans_below_others(traced: Traced) -> None:
    """Heartbeats and watches: the registry's own spans of them have no parent, and a watch has none."""
    others = [span for span in traced.collector.spans() if span.trace_id != TRACE]
    assert {span.kind for span in others} == {SERVER}
    assert not any(span.parent_id for span in others)
    assert not any(span.name.endswith("/WatchAdapters") for span in others)


def test_no_prompt_is_in_traces_and_logs(traced: Traced) -> None:
    assert not any("messages" in key for span in traced.collector.spans() for key in span.attributes)
    assert not any({"prompt", "answers"} & line.keys() for line in traced.lines)


def test_a_line_tells_of_the_request(traced: Traced) -> None:
    (line,) = traced.lines
    assert traced.started.request_id == line["request_id"] == "order-66"
    assert (line["tenant"], line["adapter"], line["outcome"]) == ("default", "pirate", "length")
    assert (line["adapter_version"], line["adapter_digest"], line["trace_id"]) == (
        traced.started.adapter_version, traced.started.adapter_digest, TRACE,
    )  # fmt: skip
    assert (line["prompt_tokens"], line["completion_tokens"], line["cached_tokens"]) == (3, 4, 0)
    assert line["total_seconds"] >= traced.finished.timings.total_seconds - 0.001  # which were told before the end
    assert line["first_token_seconds"] <= line["total_seconds"]


def test_the_same_request_is_measured_under_the_names_of_genai(traced: Traced) -> None:
    about = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "loraplex",
        "gen_ai.request.model": "tiny",
    }
    (total,) = traced.collector.metrics.of(DURATION)
    (first,) = traced.collector.metrics.of("gen_ai.server.time_to_first_token")
    (further,) = traced.collector.metrics.of("gen_ai.server.time_per_output_token")
    for measured in (total, first, further):
        assert (measured.count, measured.attributes) == (1, about)
        assert measured.resource["loraplex.process"] == "api"
    assert (total.bounds[0], total.bounds[-1]) == (0.01, 81.92), "those that the conventions advise"
    timings = traced.finished.timings
    assert 0 < first.sum <= timings.first_token_seconds <= timings.total_seconds <= total.sum
    assert 0 <= 3 * further.sum <= total.sum - first.sum  # 0: they came together

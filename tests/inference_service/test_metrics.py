"""What a scrape says, over HTTP and as Prometheus reads it: of a snapshot, and of a running replica."""

import asyncio
import dataclasses
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from examples.stack import Stack, register, wait_for_base_model
from inference_service import metrics_labels
from inference_service.metrics import ReplicaCollector, Snapshot
from inference_service.metrics_feed import FORGET_NAMES_SECONDS, AdapterNames, ApiReports, ReplicaFeed
from inference_service.request_stats import ApiReport, RequestMeter, RequestStats, add_up
from inference_service.stats import AdapterStats, EngineStats, Seconds, TokenCounts, Usage
from inference_service.types import MemoryBudget, ResidentAdapter, SequenceDelta, StagedAdapter, Started
from shared.base_model import MODULES, parse_config
from shared.errors import BY_REASON, AdapterNotFound, AdapterUnloaded, InvalidArgument
from shared.metrics import MetricsServer
from tests.bench.random_adapters import write_adapters
from tests.inference_service.serving_fakes import raw_config


def some(cls, **known):
    """A struct of zeros but for what is `known`."""
    zero = {"int": 0, "float": 0.0, "float | None": None, "Usage": Usage(0, 0), "TokenCounts": TokenCounts()}
    values = {}
    for name in cls.__struct_fields__:
        kind = str(getattr(cls.__annotations__[name], "__name__", cls.__annotations__[name]))
        values[name] = zero.get(kind, {} if kind.startswith("dict") else [])
    return cls(**(values | known))


def seconds(*durations: float) -> Seconds:
    histogram = Seconds()
    for duration in durations:
        histogram.add(duration)
    return histogram


FULL = Snapshot(
    model="tiny",
    max_adapters=4,
    engine=some(
        EngineStats, num_running=3, num_waiting=2, kv_blocks=Usage(25, 100), block_size=16, arena=Usage(700, 1000),
        arena_pinned_bytes=100, load_seconds={"total": seconds(0.02, 70.0), "copy": seconds(0.02)},
        adapters_waiting=["c"], evictions={"bytes": 2}, prefix_tokens_queried=40, prefix_tokens_hit=30,
    ),
    memory=MemoryBudget(total=100, weights=10, kv_cache=50, num_blocks=5),
    residents=(ResidentAdapter("a", 300, 8, ("registry",), 0), ResidentAdapter("b", 400, 8, (), 2)),
    adapters=some(AdapterStats, host=Usage(50, 100), host_held_bytes=20, disk=Usage(1, 5)),
    in_host=frozenset({"c"}),
    names={"a": ("pirate", "pirate@2"), "b": ("pirate",), "c": ("acme/poet",)},
)  # fmt: skip


class Scrape:
    """Samples of one GET by name."""

    def __init__(self, port: int) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            self.content_type = answer.headers["Content-Type"]
            self.text = answer.read().decode()
        self.samples: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                self.samples.setdefault(sample.name, []).append(sample)

    def one(self, name: str) -> Sample:
        (sample,) = self.samples[name]
        return sample

    def by(self, name: str, label: str) -> dict[str, float]:
        return {sample.labels[label]: sample.value for sample in self.samples.get(name, [])}

    def counted(self, name: str, label: str) -> dict[str, float]:
        """Those of `by` that are not 0."""
        return {value: count for value, count in self.by(name, label).items() if count}


@pytest.fixture
def snapshots() -> list[Snapshot]:
    return [FULL]


@pytest.fixture
def port(snapshots: list[Snapshot]) -> Iterator[int]:
    server = MetricsServer("127.0.0.1:0", ReplicaCollector(lambda: snapshots[-1], lambda: 1234.5))
    yield server.port
    server.close()


def test_what_a_gateway_reads(port: int) -> None:
    scrape = Scrape(port)
    assert scrape.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert scrape.one("vllm:num_requests_waiting").value == 2
    assert scrape.one("vllm:num_requests_running").value == 3
    assert scrape.one("vllm:kv_cache_usage_perc").value == 0.25
    assert scrape.one("vllm:cache_config_info").labels == {"block_size": "16", "num_gpu_blocks": "100"}
    info = scrape.one("vllm:lora_requests_info")
    assert info.value == 1234.5
    assert info.labels == {
        "max_lora": "4",
        "running_lora_adapters": "pirate,pirate@2",
        "waiting_lora_adapters": "acme/poet",
    }
    assert scrape.one("vllm:num_gpu_loaded_lora_adapters").value == 2
    assert scrape.one("vllm:max_gpu_lora_adapters").value == 4
    loaded = {tuple(sample.labels.values()) for sample in scrape.samples["vllm:lora_adapter_loaded"]}
    assert loaded == {("pirate", "gpu", "true"), ("pirate@2", "gpu", "true"), ("acme/poet", "cpu", "false")}


def test_a_replica_with_another_base_model_than_the_registry_s_attracts_no_adapter_s_requests(
    port: int, snapshots: list[Snapshot]
) -> None:
    assert Scrape(port).one("loraplex_base_model_conflict").value == 0
    conflict = some(AdapterStats, base_model_conflict="another tiny")
    snapshots.append(dataclasses.replace(FULL, adapters=conflict))
    scrape = Scrape(port)
    assert scrape.one("loraplex_base_model_conflict").value == 1
    info = scrape.one("vllm:lora_requests_info").labels
    assert (info["running_lora_adapters"], info["waiting_lora_adapters"]) == ("", "")
    assert "vllm:lora_adapter_loaded" not in scrape.samples
    assert scrape.one("vllm:num_gpu_loaded_lora_adapters").value == 2, "they take their room all the same"


def test_restarts_are_counted_by_process_and_reason(port: int, snapshots: list[Snapshot]) -> None:
    feed = ReplicaFeed("tiny", 4, "ipc:///no/engine", "ipc:///no/adapters")
    for role, was_hung in (("engine", True), ("api", False), ("engine", True), ("engine", False)):
        feed.on_restart(role, was_hung=was_hung)
    snapshots.append(replace(FULL, restarts=feed.restarts))
    found = {tuple(s.labels.values()): s.value for s in Scrape(port).samples["loraplex_process_restarts_total"]}
    none = dict.fromkeys(product(("adapters", "api", "engine"), ("end", "hang")), 0)
    assert found == none | {("engine", "hang"): 2, ("api", "end"): 1, ("engine", "end"): 1}


def test_head_is_get_without_a_body(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    lengths = {}
    for method in ("HEAD", "GET"):
        connection.request(method, "/metrics")
        answer = connection.getresponse()
        lengths[method] = int(answer.headers["Content-Length"]), len(answer.read())
    connection.close()
    assert lengths["HEAD"] == (lengths["GET"][0], 0)


def test_histograms_are_cumulative(port: int) -> None:
    scrape = Scrape(port)
    buckets = scrape.by("vllm:lora_adapter_load_seconds_bucket", "le")
    assert (buckets["0.01"], buckets["0.025"], buckets["60.0"], buckets["+Inf"]) == (0, 1, 1, 2)
    assert scrape.one("vllm:lora_adapter_load_seconds_count").value == 2
    assert scrape.one("vllm:lora_adapter_load_seconds_sum").value == pytest.approx(70.02)


def test_memory_is_stated_and_adds_up(port: int) -> None:
    scrape = Scrape(port)
    assert sum(scrape.by("loraplex_memory_bytes", "kind").values()) == 100
    assert scrape.by("loraplex_arena_bytes", "state") == {"used": 600, "pinned": 100, "free": 300}
    assert scrape.by("loraplex_host_bytes", "state") == {"used": 30, "held": 20, "free": 50}


def test_old_label_sets_vanish_and_a_dead_engine_says_nothing(port: int, snapshots: list[Snapshot]) -> None:
    Scrape(port)
    snapshots.append(Snapshot("tiny", 4, some(EngineStats, adapters_waiting=[])))
    scrape = Scrape(port)
    assert scrape.one("vllm:lora_requests_info").labels["running_lora_adapters"] == ""
    assert "vllm:lora_adapter_loaded" not in scrape.samples
    snapshots.append(Snapshot("tiny", 4))
    scrape = Scrape(port)
    assert "vllm:num_requests_waiting" not in scrape.samples
    assert scrape.by("loraplex_up", "process") == {"engine": 0, "adapters": 0, "api": 0}
    assert scrape.one("vllm:max_gpu_lora_adapters").value == 4
    assert scrape.one("vllm:num_gpu_loaded_lora_adapters").value == 0


def test_counters_of_known_labels_begin_at_0(port: int, snapshots: list[Snapshot]) -> None:
    """So that the first event of a kind is growth, which `rate` and `increase` see."""
    snapshots.append(Snapshot("tiny", 4, some(EngineStats), adapters=some(AdapterStats)))
    scrape = Scrape(port)
    for name, label, expected in (
        ("vllm:request_success_total", "finished_reason", {"stop", "length", "abort", "error"}),
        ("loraplex_adapter_evictions_total", "reason", {"bytes", "slots", "unload"}),
        ("loraplex_stage_evictions_total", "tier", {"host", "disk"}),
        ("loraplex_adapter_hits_total", "tier", {"gpu", "host", "disk", "source"}),
    ):
        assert scrape.by(name, label) == dict.fromkeys(expected, 0), name
    for name, some_of_them in (
        ("loraplex_request_errors_total", {"ENGINE_UNAVAILABLE", "INTERNAL", "PERMISSION_DENIED", "CANCELLED"}),
        ("loraplex_stage_failures_total", {"SOURCE_UNAVAILABLE", "REGISTRY_UNAVAILABLE", "ADAPTER_NOT_FOUND"}),
        ("loraplex_adapter_load_failures_total", {"ADAPTER_MEMORY", "TENANT_QUOTA", "INTERNAL"}),
    ):
        assert some_of_them <= scrape.by(name, "reason").keys()
        assert scrape.counted(name, "reason") == {}
    told = {(s.labels["rpc"], s.labels["code"]): s.value for s in scrape.samples["loraplex_calls_total"]}
    assert told["Generate", "OK"] == told["Generate", "UNAVAILABLE"] == 0
    assert [sample.value for sample in scrape.samples["loraplex_process_restarts_total"]] == [0] * 6


def test_every_reason_of_generate_is_known_before_it_comes() -> None:
    """A new error must be put into `metrics_labels`, or be one that Generate never ends with."""
    elsewhere = {
        "ADAPTER_DELETED", "ALREADY_EXISTS", "BASE_MODEL_NOT_FOUND", "BASE_MODEL_UNKNOWN", "ETAG_MISMATCH",
        "FAILED_PRECONDITION", "NAMESPACE_QUOTA", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED",
        "UNIMPLEMENTED", "VERSION_IN_USE", "WATCH_COMPACTED", "WATCH_TOO_SLOW",
    }  # fmt: skip
    known = {reason for (reason,) in metrics_labels.REQUEST_ERRORS}
    assert known - {"CANCELLED"} == BY_REASON.keys() - elsewhere
    assert {reason for (reason,) in metrics_labels.LOAD_FAILURES} <= known


def test_a_count_of_a_label_that_is_not_known_is_shown_too(port: int, snapshots: list[Snapshot]) -> None:
    snapshots.append(Snapshot("tiny", 4, requests=RequestStats(errors={"INTERNAL": 2, "NEW": 1})))
    assert Scrape(port).counted("loraplex_request_errors_total", "reason") == {"INTERNAL": 2, "NEW": 1}


def test_only_metrics_are_served_and_a_taken_address_is_told(port: int) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10)
    with pytest.raises(InvalidArgument, match="metrics_listen"):
        MetricsServer(f"127.0.0.1:{port}", ReplicaCollector(lambda: FULL))


def test_a_request_is_counted_however_it_ends() -> None:
    meter = RequestMeter()
    arrival = time.monotonic()
    request = {"prepare_seconds": 0.125, "submitted": arrival, "num_prompt": 1}
    with meter.stream(arrival, **request | {"num_prompt": 7}) as times:
        times.observe(Started("r", 0, 0.25, 0.5))
        times.observe(SequenceDelta("r", 0, [8, 9]))
        times.observe(SequenceDelta("r", 0, [2, 3, 4], None, "length"))
    with pytest.raises(AdapterUnloaded), meter.stream(arrival, **request):
        raise AdapterUnloaded("gone")
    with pytest.raises(asyncio.CancelledError), meter.stream(arrival, **request):
        raise asyncio.CancelledError
    for reason in ("", "QUEUE_FULL", "QUEUE_FULL"):
        meter.ended(reason)
    stats = add_up([meter.stats, meter.stats])
    assert stats.errors == {"QUEUE_FULL": 4}
    assert (stats.wait_files.sum, stats.wait_adapter.sum, stats.wait_capacity.sum) == (0.75, 1.0, 0.5)
    assert stats.finished == {"length": 2, "error": 2, "abort": 2}
    assert (stats.tokens.prompt, stats.tokens.generated) == (18, 10)
    assert (stats.first_token.count, stats.inter_token.count, stats.total.count) == (2, 8, 6)
    assert (stats.queue.sum, stats.decode.count) == (1.5, 2)
    assert stats.inference.sum == pytest.approx(stats.prefill.sum + stats.decode.sum)


def test_names_are_those_lately_asked_for() -> None:
    names = AdapterNames()
    for number in range(9):
        names.add("a", [f"n{number}"], now=float(number))
    names.add("b", ["other"], now=0.0)
    staged = [StagedAdapter("namespaces/acme/adapters/poet/versions/2", d, "HOST", 8, 1) for d in ("a", "c")]
    assert names.all(staged) == {"a": tuple(f"n{n}" for n in range(1, 9)), "b": ("other",), "c": ("acme/poet",)}
    names.forget({"a"}, FORGET_NAMES_SECONDS + 1)
    assert set(names.all([])) == {"a"}


def test_counts_of_processes_that_ended_stay(caplog: pytest.LogCaptureFixture) -> None:
    reports = ApiReports()
    for pid, count in ((1, 5), (2, 7), (1, 6)):
        stats = {"tokens": {"prompt": 0, "generated": count}}
        reports.hear(json.dumps({"pid": pid, "stats": stats, "references": {"a": ["x"]}}))
    reports.hear("nonsense")
    assert "malformed report" in caplog.text
    assert reports.total().tokens.generated == 13


def metrics_port(log: Path) -> int:
    found = re.search(r'"message": "metrics", "port": (\d+)', log.read_text())
    assert found
    return int(found[1])


async def until(condition, seconds: float = 60.0):
    async with asyncio.timeout(seconds):
        while not (found := await asyncio.to_thread(condition)):  # noqa: ASYNC110 - another process makes it true
            await asyncio.sleep(0.1)
    return found


async def test_a_running_stack(tmp_path: Path) -> None:
    """Both services, with weights of a shape and no checkpoint; what they did is seen over HTTP."""
    model = tmp_path / "Tiny-Shape"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(raw_config()))
    write_adapters(tmp_path / "root", ["pirate", "poet"], parse_config(raw_config()), 4, MODULES)
    flags = ["--load-format=dummy", "--dummy-seed=3", "--kv-cache-memory=1MiB", "--adapter-memory=1MiB"]
    flags += ["--max-adapters=1", "--host-memory=1MiB"]
    roots, also = {"root": tmp_path / "root"}, ["--metrics-listen=127.0.0.1:0"]
    async with (
        Stack(tmp_path, model=model, flags=flags, registry_flags=also, roots=roots) as stack,
        stack.client() as client,
    ):
        await wait_for_base_model(client, "baseModels/tiny-shape")
        replica, registry = (metrics_port(tmp_path / f"{name}.log") for name in ("inference", "registry"))

        async def ask(adapter: str, max_tokens: int) -> list[int]:
            stop = {"max_tokens": max_tokens, "ignore_eos": True}
            events = client.generate([1, 2, 3], adapter=adapter, temperature=0, stop=stop)
            return [token for event in [event async for event in events] for token in event.delta.token_ids]

        assert await ask("", 5) == await ask("", 5)
        with pytest.raises(AdapterNotFound):
            await ask("nobody", 1)
        for name in ("pirate", "poet"):
            await register(client, name, f"file://root/{name}", "baseModels/tiny-shape")
        for reference in ("pirate", "pirate@1", "namespaces/default/adapters/pirate"):
            await ask(reference, 2)
        await until(lambda: residents(replica) == "pirate,pirate@1,namespaces/default/adapters/pirate")
        await ask("poet", 1)
        await until(lambda: residents(replica) == "poet")
        await until(lambda: calls(Scrape(replica)) == {("Generate", "OK"): 6, ("Generate", "NOT_FOUND"): 1})
        await until(lambda: ("default/poet@1", "generated") in adapter_tokens(Scrape(replica)))
        await until(lambda: Scrape(replica).one("loraplex_registry_lag_revisions").value == 0)
        _check_replica(Scrape(replica))
        log = (tmp_path / "inference.log").read_text()
        assert "device memory in MiB: weights" in log
        assert "a sequence may have " in log
        assert log.count("the model has no tokenizer.json: texts and chats are refused") == 1
        await until(lambda: Scrape(registry).one("loraplex_registry_watch_lag_revisions").value == 0)
        _check_registry(Scrape(registry))


def calls(scrape: Scrape, name: str = "loraplex_calls_total") -> dict[tuple[str, str], float]:
    return {(s.labels["rpc"], s.labels["code"]): s.value for s in scrape.samples.get(name, []) if s.value}


def residents(port: int) -> str:
    info = Scrape(port).samples.get("vllm:lora_requests_info")
    return info[0].labels["running_lora_adapters"] if info else ""


def adapter_tokens(scrape: Scrape) -> dict[tuple[str, str], float]:
    samples = scrape.samples["loraplex_adapter_tokens_total"]
    return {(s.labels["adapter_name"], s.labels["kind"]): s.value for s in samples if s.value}


def _check_replica(scrape: Scrape) -> None:
    assert scrape.counted("vllm:request_success_total", "finished_reason") == {"length": 6}
    assert scrape.counted("loraplex_request_errors_total", "reason") == {"ADAPTER_NOT_FOUND": 1}
    assert scrape.one("vllm:generation_tokens_total").value == 17
    assert scrape.one("vllm:prompt_tokens_total").value == 18
    assert scrape.one("vllm:time_to_first_token_seconds_count").value == 6
    assert scrape.one("vllm:inter_token_latency_seconds_count").value == 11
    assert scrape.one("vllm:request_prefill_time_seconds_sum").value > 0, "admission was before the step, not after"
    assert scrape.one("vllm:num_requests_running").value == 0
    assert scrape.by("loraplex_up", "process") == {"engine": 1, "adapters": 1, "api": 1}
    assert scrape.by("loraplex_memory_bytes", "kind")["adapter_arena"] == 1 << 20
    assert scrape.by("loraplex_memory_bytes", "kind")["weights"] > 0
    assert scrape.one("vllm:num_gpu_loaded_lora_adapters").value == 1
    assert scrape.by("loraplex_slots", "state") == {"used": 1, "free": 0}
    assert scrape.by("loraplex_adapter_evictions_total", "reason")["slots"] == 1
    assert scrape.one("vllm:lora_adapter_load_seconds_count").value == 2
    levels = {(s.labels["adapter_name"], s.labels["level"]) for s in scrape.samples["vllm:lora_adapter_loaded"]}
    assert {("poet", "gpu"), ("poet", "cpu"), ("pirate", "cpu")} <= levels
    assert adapter_tokens(scrape) == {
        ("base model", "prompt"): 6, ("base model", "generated"): 10,
        ("default/pirate@1", "prompt"): 9, ("default/pirate@1", "generated"): 6,
        ("default/poet@1", "prompt"): 3, ("default/poet@1", "generated"): 1,
    }  # fmt: skip
    waits = scrape.by("loraplex_queue_wait_seconds_count", "reason")
    assert waits == {"files": 6, "adapter": 6, "capacity": 6}
    assert scrape.one("loraplex_registry_revision").value > 0
    assert 0 <= scrape.one("loraplex_registry_silence_seconds").value < 60


def _check_registry(scrape: Scrape) -> None:
    """Of the registry that the replica asked and watches."""
    told = calls(scrape, "loraplex_registry_requests_total")
    assert told["RegisterAdapter", "OK"] == 2
    assert told["ResolveAdapter", "NOT_FOUND"] == 1
    assert told["ResolveAdapter", "OK"] >= 2
    assert scrape.one("loraplex_registry_watchers").value == 1
    assert scrape.one("loraplex_registry_database_up").value == 1


def test_reports_survive_encoding() -> None:
    meter = RequestMeter()
    meter.name("a", "pirate")
    report = msgspec.json.decode(msgspec.json.encode(meter.report()), type=ApiReport)
    assert report.references == {"a": ["pirate"]}
    assert report.stats == RequestStats()
    assert meter.report().references == {}

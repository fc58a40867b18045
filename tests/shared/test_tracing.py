"""Tracing is off unless it is asked for, and whatever happens to it harms nobody."""

import contextvars
import subprocess
import sys

import pytest
from grpc import StatusCode

from shared import spans
from shared.config import ConfigError, load
from shared.errors import InvalidArgument
from shared.tracing import start_metrics, start_tracing
from tests.shared.otlp_collector import INTERNAL, collecting

VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


def test_without_it_opentelemetry_is_not_imported() -> None:
    script = (
        "import sys, registry_service.server, inference_service.server, inference_service.adapters.process\n"
        "from shared.tracing import start_metrics, start_tracing\n"
        "assert start_tracing('', 'a', 'b', {}) is start_metrics('', 'a', 'b', {}) is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("endpoint", "env", "is_on"),
    [
        ("", {}, False),
        ("http://127.0.0.1:1", {}, True),
        ("", {VARIABLE: "http://127.0.0.1:1"}, True),
        ("", {VARIABLE: ""}, False),
        ("http://127.0.0.1:1", {"OTEL_SDK_DISABLED": "TRUE"}, False),
        ("", {VARIABLE: "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_flags_and_variables_switch_it(endpoint: str, env: dict[str, str], is_on: bool) -> None:
    tracing = start_tracing(endpoint, "loraplex-test", "test", env)
    assert (tracing is not None) == is_on
    if tracing is not None:
        tracing.close()


@pytest.mark.parametrize(
    ("endpoint", "env", "is_on"),
    [
        ("http://127.0.0.1:1", {}, False),  # many collectors take traces only
        ("http://127.0.0.1:1", {"OTEL_METRICS_EXPORTER": "otlp"}, True),
        ("", {"OTEL_METRICS_EXPORTER": "otlp", VARIABLE: "http://127.0.0.1:1"}, True),
        ("", {"OTEL_METRICS_EXPORTER": "otlp"}, False),
        ("http://127.0.0.1:1", {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_metrics_are_sent_where_they_are_wanted(endpoint: str, env: dict[str, str], is_on: bool) -> None:
    metrics = start_metrics(endpoint, "loraplex-test", "test", env)
    assert (metrics is not None) == is_on
    if metrics is not None:
        metrics.close()


@pytest.mark.parametrize(
    "endpoint", ["collector:4317", "grpc://collector:4317", "http://", "http://collector:1/v1/traces"]
)
def test_a_wrong_endpoint_is_a_wrong_setting(endpoint: str) -> None:
    from registry_service.config import RegistryConfig

    with pytest.raises(ConfigError, match=r"--otlp-endpoint .*http://HOST:PORT"):
        load(RegistryConfig, toml=None, env={}, prefix="", flags={"otlp_endpoint": endpoint})


def test_without_the_packages_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shared.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delattr("shared.spans")
    with pytest.raises(InvalidArgument, match=r"otlp_endpoint.*loraplex\[tracing\]"):
        start_tracing("http://127.0.0.1:1", "loraplex-test", "test", {})


def test_operators_variables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "LAST_EXPORT_SECONDS", 60)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "theirs")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging")
    with collecting() as collector:
        tracing = start_tracing(collector.endpoint, "loraplex-test", "test")
        assert tracing is not None
        with tracing.continued("work", f"00-{'a' * 32}-{'b' * 16}-01"):
            tracing.current().add_children([("part", 1.0, 2.5, {})])
            assert tracing.current().trace_id == "a" * 32
        tracing.close()
        work, part = collector.one("work"), collector.one("part", INTERNAL)
    assert (work.trace_id, work.parent_id, part.parent_id) == ("a" * 32, "b" * 16, work.span_id)
    assert part.end - part.start == 1_500_000_000
    assert work.resource["service.name"] == "theirs"
    assert work.resource["deployment.environment.name"] == "staging"
    assert work.resource["loraplex.process"] == "test"


class _Call:
    def __init__(self, *metadata: tuple[str, str]) -> None:
        self.metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.metadata


def test_what_replicas_call_by_themselves_is_traced_only_for_who_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "LAST_EXPORT_SECONDS", 60)
    traced, service = (
        _Call(("traceparent", f"00-{'a' * 32}-{'b' * 16}-01")),
        "loraplex.registry.v1.AdapterRegistryService",
    )
    with collecting() as collector:
        tracing = start_tracing(collector.endpoint, "loraplex-test", "test", {})
        assert tracing is not None
        calls = [(_Call(), "ReportReplicaState"), (_Call(), "RegisterBaseModel"), (_Call(), "WatchAdapters")]
        for call, rpc in [*calls, (traced, "RegisterBaseModel"), (traced, "WatchAdapters"), (_Call(), "GetAdapter")]:
            contextvars.copy_context().run(lambda c=call, r=rpc: tracing.begin(f"/{service}/{r}", c)(StatusCode.OK))
        tracing.close()
        names = sorted(span.name for span in collector.spans())
    assert names == [f"{service}/GetAdapter", f"{service}/RegisterBaseModel"]


def test_a_collector_that_is_gone_delays_the_end_by_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "LAST_EXPORT_SECONDS", 0.05)
    tracing = start_tracing("http://127.0.0.1:1", "loraplex-test", "test")
    assert tracing is not None
    with tracing.continued("lost", ""):
        pass
    tracing.close()

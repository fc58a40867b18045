"""What logs and traces tell of a request, however it ends, and that prompts are in neither unless asked for."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from inference_service import server
from inference_service.request_log import write_line
from inference_service.request_record import MAX_TEXT, RequestJournal, RequestRecord
from inference_service.request_spans import add_spans
from inference_service.request_stats import RequestMeter
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1.inference_pb2_grpc import InferenceServiceStub
from shared import spans
from shared.auth.caller import ANONYMOUS, Caller
from shared.auth.settings import AccessSettings
from shared.limits import LimitSettings
from shared.rates import TenantBuckets
from shared.tracing import start_tracing
from tests.inference_service.serving_fakes import DIGEST, SERVICE, FakeAdapters, FakeEngine, byte_model, saying
from tests.shared.auth.token_files import token, write_callers
from tests.shared.otlp_collector import SERVER, Collector, collecting

GENERATE = f"{SERVICE}/Generate"
SECRET = "the merger is on"
SMALL_WINDOW = (("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0))  # of 64 KiB


class Told:
    """What came of a server's requests. The spans are complete when the server has ended."""

    def __init__(self, collector: Collector, meter: RequestMeter, caplog: pytest.LogCaptureFixture) -> None:
        self.collector = collector
        self.meter = meter
        self._caplog = caplog

    @property
    def line(self) -> dict:
        (record,) = [record for record in self._caplog.records if record.name == "loraplex.requests"]
        return vars(record)

    @property
    def span(self):
        return self.collector.one(GENERATE, SERVER)


@pytest.fixture
def telling(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spans, "LAST_EXPORT_SECONDS", 60)
    caplog.set_level(logging.INFO, "loraplex.requests")

    @asynccontextmanager
    async def run(
        engine: FakeEngine,
        *,
        keeps_text: bool = False,
        slow_client_seconds: float = 60.0,
        access: AccessSettings | None = None,
        requests: TenantBuckets | None = None,
    ) -> AsyncIterator[tuple[Told, InferenceServiceStub]]:
        with collecting() as collector:
            tracing = start_tracing(collector.endpoint, "loraplex-inference", "api", {})
            assert tracing is not None
            meter = RequestMeter()
            readers = [add_spans, write_line]
            journal = RequestJournal("tiny", meter, readers, keeps_text=keeps_text, span=tracing.current)
            api = await server.start(
                "127.0.0.1:0",
                byte_model(),
                engine,
                FakeAdapters(),
                journal=journal,
                observers=[tracing],
                limits=LimitSettings(slow_client_seconds=slow_client_seconds),
                access=access,
                requests=requests,
            )
            async with grpc.aio.insecure_channel(f"127.0.0.1:{api.port}", SMALL_WINDOW) as channel:
                yield Told(collector, meter, caplog), InferenceServiceStub(channel)
            await api.stop(0.0)
            tracing.close()

    return run


def chat(**fields: object) -> pb.GenerateRequest:
    message = pb.ChatMessage(role="user", content=SECRET)
    return pb.GenerateRequest(chat=pb.Chat(messages=[message]), **fields)  # type: ignore[arg-type]


async def read(stream) -> list[pb.GenerateResponse]:
    return [response async for response in stream]


async def test_words_are_in_neither_log_nor_trace(telling) -> None:
    async with telling(FakeEngine(saying(SECRET))) as (told, stub):
        timings = (await read(stub.Generate(chat(adapter="pirate", request_id="mine"))))[-1].finished.timings
    assert SECRET not in json.dumps(told.line, default=str)
    assert not any(SECRET in str(span) for span in told.collector.spans())
    assert (told.line["request_id"], told.line["adapter_digest"], told.line["outcome"]) == ("mine", DIGEST, "stop")
    seconds = told.line["queue_seconds"], told.line["adapter_seconds"]
    assert seconds == pytest.approx((timings.queue_seconds, timings.adapter_seconds), abs=1e-6)  # as the caller is told
    assert seconds == pytest.approx((0.25, 0.5 + told.line["prepare_seconds"]), abs=2e-6)
    assert told.span.attributes["gen_ai.operation.name"] == "chat"
    assert told.span.attributes["gen_ai.usage.output_tokens"] == len(SECRET) + 1


async def test_words_are_in_both_when_asked_for_and_cut_when_they_are_many(telling) -> None:
    engine = FakeEngine(saying("x" * (MAX_TEXT + 5), size=1000))
    async with telling(engine, keeps_text=True) as (told, stub):
        await read(stub.Generate(chat()))
    assert told.line["prompt"] == [{"role": "user", "content": SECRET}]
    (answer,) = told.line["answers"]
    assert answer == "x" * MAX_TEXT
    (asked,) = json.loads(told.span.attributes["gen_ai.input.messages"])
    assert asked == {"role": "user", "parts": [{"type": "text", "content": SECRET}]}
    (said,) = json.loads(told.span.attributes["gen_ai.output.messages"])
    assert said == {"role": "assistant", "parts": [{"type": "text", "content": answer}]}


async def test_a_prompt_of_text_is_told_as_text(telling) -> None:
    async with telling(FakeEngine(saying("Paris")), keeps_text=True) as (told, stub):
        await read(stub.Generate(pb.GenerateRequest(text=SECRET)))
    assert (told.line["prompt"], told.line["answers"]) == (SECRET, ["Paris"])


async def test_a_refused_request_is_told_with_its_reason(telling) -> None:
    async with telling(FakeEngine()) as (told, stub):
        with pytest.raises(grpc.aio.AioRpcError):
            await read(stub.Generate(chat(adapter="nobody")))
    assert (told.line["outcome"], told.line["adapter"], told.line["tenant"]) == (
        "ADAPTER_NOT_FOUND", "nobody", "default",
    )  # fmt: skip
    assert "prompt_tokens" not in told.line
    assert told.line["trace_id"] == told.span.trace_id
    assert (told.span.attributes["error.type"], told.span.attributes["rpc.grpc.status_code"]) == (
        "ADAPTER_NOT_FOUND",
        5,
    )
    assert told.span.has_failed
    assert told.meter.stats.errors == {"ADAPTER_NOT_FOUND": 1}


async def refusal(stub: InferenceServiceStub, request: pb.GenerateRequest, caller: str = "") -> grpc.aio.AioRpcError:
    metadata = (("authorization", f"Bearer {token(caller)}"),) if caller else ()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(stub.Generate(request, metadata=metadata))
    return caught.value


@pytest.mark.parametrize(
    ("caller", "adapter", "outcome", "code"),
    [
        ("reader-a", "!!!", "INVALID_ARGUMENT", grpc.StatusCode.INVALID_ARGUMENT),
        ("reader-a", "team-b/pirate", "ADAPTER_NOT_FOUND", grpc.StatusCode.NOT_FOUND),
        ("replica", "team-a/pirate", "PERMISSION_DENIED", grpc.StatusCode.PERMISSION_DENIED),
    ],
)
async def test_a_known_caller_who_is_not_let_in_is_told_of(
    telling, tmp_path: Path, caller: str, adapter: str, outcome: str, code: grpc.StatusCode
) -> None:
    access = AccessSettings(auth_token_file=str(write_callers(tmp_path / "tokens.toml")))
    async with telling(FakeEngine(), access=access) as (told, stub):
        error = await refusal(stub, chat(adapter=adapter, request_id="mine"), caller)
    assert error.code() is code
    tenant = "team-a" if caller == "reader-a" else "default"
    facts = {"outcome": outcome, "adapter": adapter, "request_id": "mine", "tenant": tenant}
    assert {name: told.line[name] for name in facts} == facts
    assert told.line["trace_id"] == told.span.trace_id
    assert told.span.attributes["error.type"] == outcome
    assert told.meter.stats.errors == {outcome: 1}


async def test_a_blend_of_anothers_adapter_is_told_of(telling, tmp_path: Path) -> None:
    access = AccessSettings(auth_token_file=str(write_callers(tmp_path / "tokens.toml")))
    blend = [pb.BlendPart(reference="mine", weight=1), pb.BlendPart(reference="team-b/pirate", weight=2)]
    async with telling(FakeEngine(), access=access) as (told, stub):
        await refusal(stub, chat(blend=blend), "reader-a")
    assert (told.line["outcome"], told.line["adapter"]) == ("ADAPTER_NOT_FOUND", "1*mine+2*team-b/pirate")


async def test_a_tenant_beyond_its_rate_is_told_of(telling) -> None:
    buckets = LimitSettings(tenant_burst_seconds=1.0).buckets(0.001, {})
    async with telling(FakeEngine(), requests=buckets) as (told, stub):
        await read(stub.Generate(chat()))
        await refusal(stub, chat())
        assert told.meter.stats.errors == {"RATE_LIMITED": 1}


async def test_nobody_is_told_of_who_is_not_known_and_of_no_other_call(telling, tmp_path: Path) -> None:
    access = AccessSettings(auth_token_file=str(write_callers(tmp_path / "tokens.toml")))
    async with telling(FakeEngine(), access=access) as (told, stub):
        await refusal(stub, chat(), "stranger")
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Tokenize(
                pb.TokenizeRequest(adapter="!!!", text="x"), metadata=(("authorization", "Bearer token-reader-a"),)
            )
        assert told.meter.stats.errors == {}


async def test_what_is_refused_for_its_length_is_told_shortly(telling) -> None:
    messages = [pb.ChatMessage(role="user", content="y" * 9_000)] * 20
    request = pb.GenerateRequest(adapter="pirate", request_id="z" * 100_000, chat=pb.Chat(messages=messages))
    async with telling(FakeEngine(), keeps_text=True) as (told, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(stub.Generate(request))
    assert told.line["outcome"] == "INVALID_ARGUMENT", caught.value
    assert len(json.dumps({key: told.line[key] for key in ("adapter", "request_id", "prompt")})) < 20_000


async def test_a_reader_that_fails_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    def broken(record: RequestRecord) -> None:
        raise RuntimeError("no disk")

    journal = RequestJournal("tiny", RequestMeter(), [broken])
    api = await server.start("127.0.0.1:0", byte_model(), FakeEngine(), FakeAdapters(), journal=journal)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel:
        assert (await read(InferenceServiceStub(channel).Generate(chat())))[-1].HasField("finished")
    await api.stop(0.0)
    assert "no disk" in caplog.text


async def test_a_request_whose_caller_leaves_is_told_as_far_as_it_came(telling) -> None:
    engine = FakeEngine(saying("half", end=""))
    async with telling(engine) as (told, stub):
        stream = stub.Generate(chat())
        while not (await stream.read()).HasField("delta"):
            pass
        stream.cancel()
        await engine.closed.wait()
    assert told.line["outcome"] == "CANCELLED"
    assert told.line["completion_tokens"] >= 1
    assert told.span.attributes["rpc.grpc.status_code"] == 1
    assert told.span.attributes["gen_ai.response.finish_reasons"] == []
    assert {"queue", "prefill", "decode"} <= {span.name for span in told.collector.spans()}


async def test_a_client_that_does_not_read_is_told_as_one_that_was_too_slow(telling) -> None:
    engine = FakeEngine(saying("x" * 200_000, size=100, end="never"))
    async with telling(engine, slow_client_seconds=0.3) as (told, stub):
        output = {"token_ids": True, "logprobs": 1}
        stream = stub.Generate(pb.GenerateRequest(text="Hi", request_id="mine", output=output))
        async with asyncio.timeout(60):
            await engine.closed.wait()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read(stream)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (told.line["outcome"], told.line["request_id"], told.line["tenant"]) == (
        "CLIENT_TOO_SLOW",
        "mine",
        "default",
    )
    assert told.meter.stats.errors == {"CLIENT_TOO_SLOW": 1}
    assert (told.span.attributes["error.type"], told.span.attributes["rpc.grpc.status_code"]) == ("CLIENT_TOO_SLOW", 8)


@dataclass
class Context:
    """Of a call that has `remaining` seconds left."""

    remaining: float | None
    caller: Caller = ANONYMOUS

    def time_remaining(self) -> float | None:
        return self.remaining

    def invocation_metadata(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize("end", [asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize(
    ("remaining", "outcome"), [(None, "CANCELLED"), (5.0, "CANCELLED"), (0.0, "DEADLINE_UNREACHABLE")]
)
def test_what_its_deadline_ends_was_not_left_by_its_client(
    end: type[BaseException], remaining: float | None, outcome: str
) -> None:
    told: list[str] = []
    journal = RequestJournal("tiny", RequestMeter(), [lambda record: told.append(record.error)])
    with pytest.raises(end), journal.request(chat(), Context(remaining), 0.0):
        raise end
    assert told == [outcome]
    assert journal.meter.stats.errors == {outcome: 1}

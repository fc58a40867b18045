"""Generate over a real socket: what streams, what is refused, and what is freed."""

import asyncio

import grpc
import pytest

from inference_service.types import BlendPart, PreparedAdapter, SequenceDelta
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1.inference_pb2_grpc import InferenceServiceStub
from shared.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnloaded,
    Draining,
    EngineUnavailable,
    InvalidArgument,
    LoraplexError,
)
from shared.status import from_rpc_error
from tests.inference_service.serving_fakes import (
    BLEND,
    DIGEST,
    EOS,
    FakeAdapters,
    FakeEngine,
    byte_model,
    saying,
    serving,
)

INF, NAN = float("inf"), float("nan")


def request(**fields: object) -> pb.GenerateRequest:
    if not {"text", "token_ids", "chat"} & set(fields):
        fields["text"] = "Hi"
    return pb.GenerateRequest(**fields)


async def generate(channel: grpc.aio.Channel, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in InferenceServiceStub(channel).Generate(message, timeout=20)]


async def failure(channel: grpc.aio.Channel, message: pb.GenerateRequest) -> LoraplexError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(channel, message)
    return from_rpc_error(caught.value)


def text_of(responses: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(r.delta.text for r in responses if r.HasField("delta") and r.delta.index == index)


def finished(responses: list[pb.GenerateResponse]) -> list[pb.Finished]:
    return [r.finished for r in responses if r.HasField("finished")]


async def test_stream_has_started_deltas_and_finished() -> None:
    engine = FakeEngine(saying("héllo"))
    async with serving(engine) as (_, channel):
        responses = await generate(channel, request(request_id="r1", output=pb.Output(token_ids=True)))
    started = responses[0].started
    assert (started.request_id, started.base_model, started.adapter_version) == ("r1", "baseModels/tiny", "")
    assert (started.prompt_tokens, started.cached_tokens) == (2, 3)
    assert text_of(responses) == "héllo"
    ids = [i for r in responses if r.HasField("delta") for i in r.delta.token_ids]
    assert ids == [*"héllo".encode(), EOS]  # EOS counts, and has no text
    (end,) = finished(responses)
    assert end == responses[-1].finished
    assert end.finish_reason == pb.Finished.FINISH_REASON_STOP
    assert end.WhichOneof("matched_stop") is None
    assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens) == (2, 7, 3)
    assert (end.timings.queue_seconds, end.timings.adapter_seconds) == (0.25, 0.5)
    assert 0 < end.timings.first_token_seconds <= end.timings.total_seconds
    assert engine.num_open == 0


async def test_unset_fields_take_their_defaults_and_zero_is_zero() -> None:
    engine = FakeEngine()
    async with serving(engine) as (_, channel):
        await generate(channel, request())
        await generate(channel, request(sampling=pb.Sampling(temperature=0, seed=0), stop=pb.Stop(min_tokens=0)))
        await generate(channel, request(stop=pb.Stop(max_tokens=1000)))
    default, zero, long = engine.specs
    assert (default.sampling.temperature, default.sampling.top_p, default.sampling.n) == (1.0, 1.0, 1)
    assert default.stop.max_tokens == 126  # to the end of the context
    assert (default.logprobs, default.prompt_logprobs) == (None, None)
    assert (zero.sampling.temperature, zero.sampling.seed) == (0.0, 0)
    assert long.stop.max_tokens == 126
    assert len({spec.request_id for spec in engine.specs}) == 3


async def test_all_settings_reach_the_engine() -> None:
    engine = FakeEngine()
    sampling = pb.Sampling(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=7, repetition_penalty=1.5, presence_penalty=-1,
        frequency_penalty=2, logit_bias={3: -100}, n=1,
    )  # fmt: skip
    stop = pb.Stop(max_tokens=9, min_tokens=2, token_ids=[5, 5, 6], ignore_eos=True)
    output = pb.Output(logprobs=0, prompt_logprobs=2)
    message = request(sampling=sampling, stop=stop, output=output, priority=-3, cache_salt="s")
    async with serving(engine) as (_, channel):
        await generate(channel, message)
    spec = engine.specs[0]
    assert spec.sampling.logit_bias == {3: -100.0}
    assert (spec.sampling.top_k, spec.sampling.min_p, spec.sampling.seed) == (5, 0.1, 7)
    assert (spec.stop.max_tokens, spec.stop.min_tokens, spec.stop.token_ids) == (9, 2, (5, 6))
    assert spec.stop.ignore_eos
    assert (spec.logprobs, spec.prompt_logprobs, spec.priority, spec.cache_salt) == (0, 2, -3, "s")
    assert spec.tenant == "default"


async def test_adapter_is_resolved_and_named() -> None:
    engine, adapters = FakeEngine(), FakeAdapters()
    async with serving(engine, adapters) as (_, channel):
        responses = await generate(channel, request(adapter="pirate@prod", session_id="s", request_id="r"))
        await generate(channel, request(adapter="default/pirate", request_id="r"))
    assert responses[0].started.adapter_version == "namespaces/default/adapters/pirate/versions/2"
    assert responses[0].started.adapter_digest == engine.specs[0].adapter_digest == DIGEST
    assert all(spec.prepare_seconds > 0 for spec in engine.specs)
    assert adapters.prepared == [("default/pirate@prod", "s"), ("default/pirate", "r")]


async def test_unknown_adapter_is_an_error_and_never_the_base_model() -> None:
    engine, adapters = FakeEngine(), FakeAdapters()
    async with serving(engine, adapters) as (_, channel):
        assert isinstance(await failure(channel, request(adapter="nobody")), AdapterNotFound)
        # A namespace where the caller has no role is not looked up at all.
        assert isinstance(await failure(channel, request(adapter="others/pirate")), AdapterNotFound)
    assert engine.specs == []
    assert [reference for reference, _ in adapters.prepared] == ["default/nobody"]


async def test_logprobs_of_prompt_and_output() -> None:
    engine = FakeEngine(saying("ab"))
    async with serving(engine) as (_, channel):
        responses = await generate(channel, request(output=pb.Output(logprobs=1, prompt_logprobs=1)))
    assert responses[1].prompt_logprobs.tokens[0].top[0].token_id == 8
    entries = [e for r in responses if r.HasField("delta") for e in r.delta.logprobs]
    assert [(e.token_id, e.logprob, e.top[0].token_id) for e in entries] == [(97, -0.5, 97), (98, -0.5, 98)]


async def test_max_tokens_zero_scores_the_prompt() -> None:
    engine = FakeEngine(saying("", end="length"))
    async with serving(engine) as (_, channel):
        scoring = request(stop=pb.Stop(max_tokens=0), output=pb.Output(prompt_logprobs=0), text="x" * 128)
        responses = await generate(channel, scoring)
    assert [r.WhichOneof("event") for r in responses] == ["started", "prompt_logprobs", "finished"]
    assert responses[-1].finished.finish_reason == pb.Finished.FINISH_REASON_LENGTH
    assert engine.specs[0].stop.max_tokens == 0


@pytest.mark.parametrize("size", [1, 2, 100])
async def test_stop_string_cuts_text_ids_logprobs_and_usage(size: int) -> None:
    engine = FakeEngine(saying("one STOP two", size=size, end="never"))
    message = request(stop=pb.Stop(strings=["XX", "STOP"]), output=pb.Output(token_ids=True, logprobs=0))
    async with serving(engine) as (_, channel):
        responses = await generate(channel, message)
    assert text_of(responses) == "one "
    deltas = [r.delta for r in responses if r.HasField("delta")]
    assert bytes(i for d in deltas for i in d.token_ids) == b"one STOP"
    assert [e.token_id for d in deltas for e in d.logprobs] == list(b"one STOP")
    (end,) = finished(responses)
    assert (end.stop_string, end.usage.completion_tokens) == ("STOP", 8)
    assert end.finish_reason == pb.Finished.FINISH_REASON_STOP
    assert engine.aborted == [(engine.specs[0].request_id, 0)]
    assert engine.num_open == 0


async def test_stop_token_is_reported_and_has_no_text() -> None:
    def script(spec):
        yield SequenceDelta(spec.request_id, 0, [97], None)
        yield SequenceDelta(spec.request_id, 0, [98], None, "stop", 98)

    async with serving(FakeEngine(script)) as (_, channel):
        responses = await generate(channel, request(stop=pb.Stop(token_ids=[98])))
    (end,) = finished(responses)
    assert text_of(responses) == "a"
    assert (end.stop_token_id, end.usage.completion_tokens) == (98, 2)


async def test_sequences_interleave_and_end_by_themselves() -> None:
    def script(spec):
        for index, text in ((0, "ab"), (1, "cSd"), (0, "c"), (1, "ee"), (2, "z")):
            yield SequenceDelta(spec.request_id, index, list(text.encode()))
        yield SequenceDelta(spec.request_id, 2, [], None, "length")
        yield SequenceDelta(spec.request_id, 0, [EOS], None, "stop")

    engine = FakeEngine(script)
    async with serving(engine) as (_, channel):
        responses = await generate(channel, request(sampling=pb.Sampling(n=3), stop=pb.Stop(strings=["S"])))
    assert [text_of(responses, index) for index in range(3)] == ["abc", "c", "z"]
    assert [(f.index, f.usage.completion_tokens) for f in finished(responses)] == [(1, 2), (2, 1), (0, 4)]
    assert [index for _, index in engine.aborted] == [1]
    assert engine.num_open == 0


async def test_text_held_back_is_given_out_at_the_end() -> None:
    async with serving(FakeEngine(saying("abcST", end="length"))) as (_, channel):
        responses = await generate(channel, request(stop=pb.Stop(strings=["STOP"])))
    assert text_of(responses) == "abcST"
    assert finished(responses)[0].finish_reason == pb.Finished.FINISH_REASON_LENGTH


async def test_no_delta_ends_within_a_character() -> None:
    text = "né 👩‍👩‍👧 ok 漢字"
    async with serving(FakeEngine(saying(text))) as (_, channel):
        responses = await generate(channel, request())
    assert text_of(responses) == text
    assert all("�" not in r.delta.text for r in responses if r.HasField("delta"))


async def test_without_tokenizer_only_ids_are_served() -> None:
    engine = FakeEngine(saying("hi"))
    async with serving(engine, model=byte_model(with_tokenizer=False)) as (_, channel):
        responses = await generate(channel, request(token_ids=pb.TokenIds(ids=[5, 6])))
        ids = [i for r in responses if r.HasField("delta") for i in r.delta.token_ids]
        assert ids == [*b"hi", EOS]
        assert text_of(responses) == ""
        for message in (
            request(text="x"),
            request(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])),
            request(token_ids=pb.TokenIds(ids=[5]), stop=pb.Stop(strings=["x"])),
        ):
            assert isinstance(await failure(channel, message), InvalidArgument)


async def test_chat_prompt_goes_through_the_template() -> None:
    engine = FakeEngine()
    chat = pb.Chat(messages=[pb.ChatMessage(role="system", content="be"), pb.ChatMessage(role="user", content="x")])
    async with serving(engine) as (_, channel):
        await generate(channel, request(chat=chat))
    assert bytes(engine.specs[0].prompt_ids) == b"<system>be<user>x>"


def chat(*messages: tuple[str, str]) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages])


BAD = [
    (pb.GenerateRequest(), "prompt"),
    (request(text=""), "prompt.text"),
    (request(text="x" * 128), "prompt.text"),
    (request(text="x" * 129, stop=pb.Stop(max_tokens=0)), "prompt.text"),
    (request(token_ids=pb.TokenIds()), "prompt.token_ids"),
    (request(token_ids=pb.TokenIds(ids=[1, 260])), "prompt.token_ids[1]"),
    (request(token_ids=pb.TokenIds(ids=[-1])), "prompt.token_ids[0]"),
    (request(token_ids=pb.TokenIds(ids=[1] * 128)), "prompt.token_ids"),
    (request(chat=pb.Chat()), "prompt.chat.messages"),
    (request(chat=chat(("boss", "x"))), "prompt.chat.messages[0].role"),
    (request(chat=chat(("user", "x" * 128))), "prompt.chat"),
    (request(adapter="Not An Id"), "adapter"),
    (request(adapter="pirate@"), "adapter"),
    (request(request_id="x" * 257), "request_id"),
    (request(cache_salt="x" * 257), "cache_salt"),
    (request(session_id="x" * 257), "session_id"),
    *((request(sampling=pb.Sampling(temperature=v)), "sampling.temperature") for v in (-0.1, NAN, INF)),
    *((request(sampling=pb.Sampling(top_p=v)), "sampling.top_p") for v in (0, -0.1, 1.1, NAN)),
    (request(sampling=pb.Sampling(top_k=-1)), "sampling.top_k"),
    *((request(sampling=pb.Sampling(min_p=v)), "sampling.min_p") for v in (-0.1, 1.1, NAN)),
    (request(sampling=pb.Sampling(seed=-1)), "sampling.seed"),
    *((request(sampling=pb.Sampling(repetition_penalty=v)), "sampling.repetition_penalty") for v in (0, -1, NAN, INF)),
    *((request(sampling=pb.Sampling(presence_penalty=v)), "sampling.presence_penalty") for v in (-2.1, 2.1, NAN)),
    *((request(sampling=pb.Sampling(frequency_penalty=v)), "sampling.frequency_penalty") for v in (-2.1, 2.1, NAN)),
    *((request(sampling=pb.Sampling(logit_bias={1: v})), "sampling.logit_bias[1]") for v in (-100.1, 100.1, NAN)),
    (request(sampling=pb.Sampling(logit_bias={260: 1})), "sampling.logit_bias[260]"),
    *((request(sampling=pb.Sampling(n=v)), "sampling.n") for v in (0, -1, 9, 17)),
    (request(stop=pb.Stop(max_tokens=-1)), "stop.max_tokens"),
    (request(stop=pb.Stop(min_tokens=-1)), "stop.min_tokens"),
    (request(stop=pb.Stop(max_tokens=1, min_tokens=2)), "stop.min_tokens"),
    (request(stop=pb.Stop(strings=[""])), "stop.strings[0]"),
    (request(stop=pb.Stop(strings=["a", "x" * 257])), "stop.strings[1]"),
    (request(stop=pb.Stop(strings=["a"] * 17)), "stop.strings"),
    (request(stop=pb.Stop(token_ids=[260])), "stop.token_ids[0]"),
    (request(stop=pb.Stop(token_ids=[1] * 257)), "stop.token_ids"),
    *((request(output=pb.Output(logprobs=v)), "output.logprobs") for v in (-1, 21)),
    *((request(output=pb.Output(prompt_logprobs=v)), "output.prompt_logprobs") for v in (-1, 21)),
]


async def test_every_bad_field_is_named() -> None:
    engine, adapters = FakeEngine(), FakeAdapters()
    async with serving(engine, adapters) as (_, channel):
        for message, field in BAD:
            error = await failure(channel, message)
            assert isinstance(error, InvalidArgument), message
            assert [v.field for v in error.violations] == [field], message
    assert engine.specs == []
    assert adapters.prepared == []


async def test_everything_wrong_is_told_at_once() -> None:
    message = request(
        text="",
        sampling=pb.Sampling(top_p=2, n=0),
        stop=pb.Stop(strings=[""]),
        output=pb.Output(logprobs=99),
    )
    async with serving(FakeEngine()) as (_, channel):
        error = await failure(channel, message)
    fields = {v.field for v in error.violations}
    assert fields == {"prompt.text", "sampling.top_p", "sampling.n", "stop.strings[0]", "output.logprobs"}


async def test_a_name_that_cannot_be_read_is_told_alone() -> None:
    """It says who may, which is settled before anything else is looked at."""
    async with serving(FakeEngine()) as (_, channel):
        error = await failure(channel, request(text="", adapter="?"))
    assert {v.field for v in error.violations} == {"adapter"}


async def test_refusal_of_the_template_names_the_chat() -> None:
    model = byte_model(template="{{ raise_exception('no system role') }}")
    async with serving(FakeEngine(), model=model) as (_, channel):
        error = await failure(channel, request(chat=chat(("user", "x"))))
    assert [v.field for v in error.violations] == ["prompt.chat"]
    assert "no system role" in error.message


def parts(*named: tuple[str, float]) -> list[pb.BlendPart]:
    return [pb.BlendPart(reference=reference, weight=weight) for reference, weight in named]


async def test_a_blend_is_prepared_as_one_adapter_and_told_as_its_parts() -> None:
    engine, adapters = FakeEngine(saying("aye")), FakeAdapters()
    async with serving(engine, adapters) as (_, channel):
        message = request(blend=parts(("pirate", 0.5), ("default/pirate@2", -2)), session_id="s")
        told = await generate(channel, message)
    sent = (BlendPart("default/pirate", 0.5), BlendPart("default/pirate@2", -2.0))
    assert adapters.blended == [(sent, "s")]
    assert engine.specs[0].adapter_digest == BLEND
    started = told[0].started
    assert (started.adapter_version, started.adapter_digest) == ("", BLEND)
    version = "namespaces/default/adapters/pirate/versions/2"
    assert [(p.adapter_version, p.adapter_digest, p.weight) for p in started.blend] == [
        (version, DIGEST, 0.5),
        (version, DIGEST, -2.0),
    ]
    assert text_of(told) == "aye"


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"blend": parts(("pirate", 0))}, {"blend[0].weight"}),
        ({"blend": parts(("pirate", 1), ("pirate", NAN))}, {"blend[1].weight"}),
        ({"blend": parts(("pirate", INF), ("pirate", -INF))}, {"blend[0].weight", "blend[1].weight"}),
        ({"blend": parts(("pirate", 1001))}, {"blend[0].weight"}),
        ({"blend": parts(*[("pirate", 1.0)] * 9)}, {"blend"}),
        ({"blend": parts(("pirate", 1)), "adapter": "pirate"}, {"blend"}),
        ({"blend": parts(("pirate", 0)), "sampling": pb.Sampling(top_p=2)}, {"blend[0].weight", "sampling.top_p"}),
    ],
)
async def test_what_is_wrong_with_a_blend_is_named(fields: dict[str, object], wrong: set[str]) -> None:
    adapters = FakeAdapters()
    async with serving(FakeEngine(), adapters) as (_, channel):
        error = await failure(channel, request(**fields))
    assert isinstance(error, InvalidArgument)
    assert {violation.field for violation in error.violations} == wrong
    assert adapters.blended == []


@pytest.mark.parametrize("reference", ["", "No/No/No"])
async def test_a_part_that_names_no_adapter_is_refused(reference: str) -> None:
    async with serving(FakeEngine()) as (_, channel):
        error = await failure(channel, request(blend=parts(("pirate", 1), (reference, 1))))
    assert isinstance(error, InvalidArgument)
    assert [violation.field for violation in error.violations] == ["blend[1].reference"]


async def test_a_part_that_is_not_there_is_not_found() -> None:
    async with serving(FakeEngine()) as (_, channel):
        error = await failure(channel, request(blend=parts(("pirate", 1), ("parrot", 1))))
    assert isinstance(error, AdapterNotFound)


async def test_an_adapter_acts_from_its_last_activation_on_or_not_at_all() -> None:
    engine, adapters = FakeEngine(), FakeAdapters()
    activated = PreparedAdapter("v", DIGEST, 8, 1, activation=(1, 2), tier="disk")
    adapters.others["default/late"] = activated
    async with serving(engine, adapters) as (_, channel):
        told = []
        for ids in ([1, 2, 5, 1, 2, 6], [1, 2], [2, 1]):
            told += await generate(channel, request(adapter="late", token_ids=pb.TokenIds(ids=ids)))
    seen = [(spec.adapter_digest, spec.adapter_start, spec.adapter_tier) for spec in engine.specs]
    assert seen == [(DIGEST, 3, "disk"), (DIGEST, 0, "disk"), (None, 0, "host")]
    digests = [r.started.adapter_digest for r in told if r.HasField("started")]
    assert digests == [DIGEST] * 3  # it is what was asked for, active or not


async def test_an_error_in_the_engine_ends_only_its_stream() -> None:
    engine = FakeEngine(saying("hello"))
    async with serving(engine) as (_, channel):
        engine.error = AdapterUnloaded("unloaded by force")
        assert isinstance(await failure(channel, request()), AdapterUnloaded)
        engine.error = None
        assert text_of(await generate(channel, request())) == "hello"


async def test_a_cancelled_call_frees_the_engine() -> None:
    engine = FakeEngine(saying("hello", end="never"))
    async with serving(engine) as (_, channel):
        call = InferenceServiceStub(channel).Generate(request())
        await call.read()
        call.cancel()
        await asyncio.wait_for(engine.closed.wait(), 60)
    assert engine.num_open == 0


async def test_a_client_that_does_not_read_and_goes_frees_the_engine() -> None:
    engine = FakeEngine(saying("x" * 3_000_000, size=10_000, end="never"))
    async with serving(engine) as (_, channel):
        call = InferenceServiceStub(channel).Generate(request())
        await call.read()
        await asyncio.sleep(0.3)  # the server now waits for the window to open
        assert engine.num_open == 1
        call.cancel()
        await asyncio.wait_for(engine.closed.wait(), 60)
    assert engine.num_open == 0


async def test_an_expired_deadline_frees_the_engine_and_is_passed_on() -> None:
    engine = FakeEngine(saying("hello", end="never"))
    async with serving(engine) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in InferenceServiceStub(channel).Generate(request(), timeout=2.0):
                pass
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(engine.closed.wait(), 60)
        no_deadline = InferenceServiceStub(channel).Generate(request())
        await no_deadline.read()
        no_deadline.cancel()
    assert 0 < engine.specs[0].deadline - engine.specs[0].arrival < 10  # the clocks are read one after the other
    assert engine.specs[1].deadline is None


async def test_engine_death_ends_streams_at_once_and_readiness_follows() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    async with serving(engine) as (api, channel):
        call = InferenceServiceStub(channel).Generate(request())
        await call.read()
        engine.die()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert isinstance(from_rpc_error(caught.value), EngineUnavailable)
        assert api.availability.engine is None
        assert isinstance(await failure(channel, request()), EngineUnavailable)
        engine.error = None
        engine.down.clear()
        engine.up.set()
        while api.availability.engine is None:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        assert text_of(await generate(channel, request())) == "hello"


async def test_drain_refuses_new_streams_and_lets_running_ones_finish() -> None:
    engine = FakeEngine(saying("hello"))
    engine.gate.clear()
    async with serving(engine) as (api, channel):
        running = aiter(InferenceServiceStub(channel).Generate(request()))
        await anext(running)
        stopping = asyncio.create_task(api.stop(100))
        while not api.availability.is_draining:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)
        assert isinstance(await failure(channel, request()), Draining)
        engine.gate.set()
        assert text_of([response async for response in running]) == "hello"
        await asyncio.wait_for(stopping, 60)


async def test_drain_cuts_what_outlives_its_grace() -> None:
    engine = FakeEngine(saying("hello", end="never"))
    async with serving(engine) as (api, channel):
        call = InferenceServiceStub(channel).Generate(request())
        await anext(aiter(call))
        stopping = asyncio.create_task(api.stop(0.2))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [response async for response in call]
        error = from_rpc_error(caught.value)
        assert isinstance(error, EngineUnavailable)
        assert error.message == "the replica is shutting down"
        await asyncio.wait_for(stopping, 60)
        await asyncio.wait_for(engine.closed.wait(), 60)


@pytest.mark.parametrize("kind", [AdapterUnloaded, AdapterInvalid])
async def test_an_adapter_that_ends_its_request_is_named_as_it_was_asked_for(kind: type[LoraplexError]) -> None:
    engine = FakeEngine()
    named = {"adapter_version": "namespaces/default/adapters/pirate/versions/2", "digest": DIGEST}
    async with serving(engine) as (_, channel):
        engine.error = kind("what is wrong", metadata={"file": "x"})
        error = await failure(channel, request(adapter="pirate"))
        of_blend = await failure(channel, request(blend=parts(("pirate", 0.5), ("default/pirate@2", -2))))
        of_base = await failure(channel, request())
    assert isinstance(error, kind)
    assert (error.message, error.metadata) == ("pirate: what is wrong", {"file": "x", **named})
    assert of_blend.message == "0.5*pirate+-2*default/pirate@2: what is wrong"
    assert of_blend.metadata == {"file": "x", "digest": BLEND}
    assert (of_base.message, of_base.metadata) == ("what is wrong", {"file": "x"})


async def test_prompts_that_cannot_fit_are_refused_before_tokenizing() -> None:
    engine = FakeEngine()
    async with serving(engine) as (_, channel):
        for fields, field in [
            ({"text": "x" * (64 * 128 + 1)}, "prompt.text"),
            ({"token_ids": pb.TokenIds(ids=[1] * 1_000_000)}, "prompt.token_ids"),
            ({"chat": chat(*[("user", "x")] * 1025)}, "prompt.chat.messages"),
        ]:
            error = await failure(channel, request(**fields))
            assert [v.field for v in error.violations] == [field]
    assert engine.specs == []


async def test_an_error_with_thousands_of_violations_keeps_its_type() -> None:
    bias = {1000 + token: 0.0 for token in range(4000)}
    async with serving(FakeEngine()) as (_, channel):
        error = await failure(channel, request(sampling=pb.Sampling(logit_bias=bias)))
    assert isinstance(error, InvalidArgument)
    assert len(error.violations) == 16
    assert error.message.endswith("; and 3984 more")

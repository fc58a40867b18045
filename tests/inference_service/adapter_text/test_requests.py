"""Requests of adapters with text of their own, over a real socket."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import msgspec
import pytest
from tokenizers import AddedToken

from inference_service.types import GenerateSpec, PreparedAdapter, SequenceDelta
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1.inference_pb2_grpc import InferenceServiceStub
from shared.errors import AdapterInvalid, InvalidArgument
from tests.inference_service.adapter_text.bases import ENDLESS, SHOUT, changed, entries, with_added, write_base
from tests.inference_service.serving_fakes import EOS, FakeAdapters, FakeEngine, saying, serving
from tests.inference_service.test_generate import failure, finished, generate, request, text_of

CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
TOKENS = with_added(AddedToken("<tool>", special=False), AddedToken("<end>", special=True))


def adapters_with(**texts: dict[str, bytes]) -> FakeAdapters:
    """`default/NAME` for each name, with these files."""
    fakes = FakeAdapters()
    for name, files in texts.items():
        fakes.texts[f"sha256:{name}"] = files
        fakes.others[f"default/{name}"] = PreparedAdapter(
            f"namespaces/default/adapters/{name}/versions/1", f"sha256:{name}", 8, 5000, texts=entries(files)
        )
    return fakes


async def test_generate_uses_the_adapters_template_and_tokenizer_from_prompt_to_stop_string(tmp_path: Path) -> None:
    def script(spec: GenerateSpec) -> list[SequenceDelta]:
        said = ([104, 0xC3], [0xA9, 258], [33, 63], [63])
        return [SequenceDelta(spec.request_id, 0, list(ids)) for ids in said]

    engine, model = FakeEngine(script), write_base(tmp_path / "base")
    fakes = adapters_with(own={"tokenizer.json": TOKENS, "chat_template.jinja": (SHOUT + "<tool>").encode()})
    async with serving(engine, fakes, model) as (_, channel):
        message = request(adapter="own", chat=CHAT, stop=pb.Stop(strings=["!?"], token_ids=[259]))
        message.output.token_ids = True
        told = await generate(channel, message)
    assert engine.specs[0].prompt_ids == [*b"[USER] hi\n", EOS, 258]
    assert text_of(told) == "hé<tool>"
    assert [i for r in told if r.HasField("delta") for i in r.delta.token_ids] == [104, 0xC3, 0xA9, 258, 33, 63]
    assert finished(told)[0].stop_string == "!?"
    assert engine.aborted == [(engine.specs[0].request_id, 0)]


async def test_the_eos_token_of_an_adapters_tokenizer_ends_its_requests(tmp_path: Path) -> None:
    engine = FakeEngine()
    ends = {"tokenizer.json": TOKENS, "tokenizer_config.json": b'{"eos_token": "<end>"}'}
    fakes = adapters_with(
        ends=ends, plain={"tokenizer.json": TOKENS}, like_base={"tokenizer_config.json": b'{"eos_token": "<bos>"}'}
    )
    model = write_base(tmp_path / "base")
    model = replace(model, config=replace(model.config, eos_token_ids=(EOS, EOS + 1)))
    async with serving(engine, fakes, model) as (_, channel):
        for name in ("ends", "plain", "like_base", ""):
            await generate(channel, request(adapter=name))
        fakes.others["default/ends"] = msgspec.structs.replace(fakes.others["default/ends"], activation=(7,))
        await generate(channel, request(adapter="ends"))  # does not act, and its text is its own
        parts = [pb.BlendPart(reference=name, weight=1.0) for name in ("ends", "plain")]
        await generate(channel, request(blend=parts))
    assert [spec.stop.eos_ids for spec in engine.specs] == [(259,), (), (), (), (259,), ()]
    assert engine.specs[4].adapter_digest is None


async def test_what_is_held_back_comes_at_the_end_and_stop_ids_have_no_text(tmp_path: Path) -> None:
    def script(spec: GenerateSpec) -> list[SequenceDelta]:
        ends = [SequenceDelta(spec.request_id, 0, [0xC3], None, "length")]
        stops = [SequenceDelta(spec.request_id, 1, [258, 259], None, "stop", 259)]
        return [SequenceDelta(spec.request_id, 0, [104]), *stops, *ends]

    fakes = adapters_with(own={"tokenizer.json": TOKENS})
    async with serving(FakeEngine(script), fakes, write_base(tmp_path / "base")) as (_, channel):
        told = await generate(channel, request(adapter="own", sampling=pb.Sampling(n=2)))
    assert (text_of(told, 0), text_of(told, 1)) == ("h\ufffd", "<tool>")


async def test_tokenize_and_detokenize_take_the_adapters_tokenizer(tmp_path: Path) -> None:
    fakes = adapters_with(own={"tokenizer.json": TOKENS}, talk={"chat_template.jinja": SHOUT.encode()})
    async with serving(FakeEngine(), fakes, write_base(tmp_path / "base")) as (_, channel):
        stub = InferenceServiceStub(channel)
        told = await stub.Tokenize(pb.TokenizeRequest(adapter="own", text="a<tool>"))
        assert (list(told.token_ids), list(told.tokens)) == ([97, 258], ["a", "<tool>"])
        base = await stub.Tokenize(pb.TokenizeRequest(text="a<tool>"))
        assert list(base.token_ids) == list(b"a<tool>")
        chat = await stub.Tokenize(pb.TokenizeRequest(adapter="talk", chat=CHAT))
        assert list(chat.token_ids) == [*b"[USER] hi\n", EOS]
        assert (await stub.Detokenize(pb.DetokenizeRequest(adapter="own", token_ids=[97, 258]))).text == "a<tool>"
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=[97, 258]))).text == "a"


async def test_token_ids_go_as_far_as_the_adapters_vocabulary(tmp_path: Path) -> None:
    fakes = adapters_with(own={"tokenizer.json": with_added("<a>", "<b>", "<c>", "<d>")})
    key = "default/own"
    fakes.others[key] = PreparedAdapter("v", "sha256:own", 8, 1, texts=fakes.others[key].texts, extra_vocab=2)
    engine = FakeEngine()
    async with serving(engine, fakes, write_base(tmp_path / "base")) as (_, channel):
        ids = {"token_ids": pb.TokenIds(ids=[261]), "stop": pb.Stop(token_ids=[261])}
        ids["sampling"] = pb.Sampling(logit_bias={261: 1.0})
        await generate(channel, request(adapter="own", **ids))
        assert engine.specs[0].extra_vocab == 2
        for wrong in (request(**ids), request(adapter="pirate", **ids)):
            error = await failure(channel, wrong)
            fields = {violation.field for violation in error.violations}
            assert fields == {"prompt.token_ids[0]", "stop.token_ids[0]", "sampling.logit_bias[261]"}
        await generate(channel, request(adapter="own", text="<d>"))
        assert engine.specs[-1].prompt_ids == [261]


async def test_a_hostile_template_fails_its_own_requests_only(tmp_path: Path) -> None:
    fakes = adapters_with(
        hostile={"chat_template.jinja": ENDLESS.encode()}, good={"chat_template.jinja": SHOUT.encode()}
    )
    async with serving(FakeEngine(saying("ok")), fakes, write_base(tmp_path / "base")) as (_, channel):
        await generate(channel, request(adapter="good", chat=CHAT))  # its worker is up
        hostile = asyncio.create_task(failure(channel, request(adapter="hostile", chat=CHAT)))
        num_rounds = 0
        while not hostile.done():
            num_rounds += 1
            for adapter in ("", "pirate", "good"):
                assert text_of(await generate(channel, request(adapter=adapter, chat=CHAT))) == "ok"
            await asyncio.sleep(0.05)
        error = await hostile
        assert isinstance(error, AdapterInvalid)
        assert error.metadata["file"] == "chat_template.jinja"
        assert num_rounds > 3  # of three requests each, in what time the hostile template has
        assert text_of(await generate(channel, request(adapter="hostile"))) == "ok"  # text needs no template


async def test_what_only_chats_need_fails_only_chats_and_every_fault_names_the_adapter(tmp_path: Path) -> None:
    wrong = {"type": "RobertaProcessing", "sep": ["<end>", 999], "cls": ["<bos>", 257]}
    ends = changed(TOKENS, post_processor={**wrong, "trim_offsets": True, "add_prefix_space": False})
    fakes = adapters_with(
        dear={"tokenizer.json": TOKENS, "chat_template.jinja": b"{{ 9 ** (9 ** 9) }}"},
        ends={"tokenizer.json": ends},
        other={"tokenizer.json": TOKENS, "tokenizer_config.json": b'{"eos_token": "<new>"}'},
    )
    ids, engine = pb.TokenIds(ids=[97, 258]), FakeEngine(saying("ok"))
    async with serving(engine, fakes, write_base(tmp_path / "base")) as (_, channel):
        stub = InferenceServiceStub(channel)
        for _ in range(2):
            chat = await failure(channel, request(adapter="dear", chat=CHAT))
            assert text_of(await generate(channel, request(adapter="dear", text="a<tool>"))) == "ok"
            assert text_of(await generate(channel, request(adapter="dear", token_ids=ids))) == "ok"
        text = await failure(channel, request(adapter="ends", text="a"))
        assert text_of(await generate(channel, request(adapter="ends", token_ids=ids))) == "ok"
        both = await failure(channel, request(adapter="other", token_ids=ids))
        with pytest.raises(grpc.aio.AioRpcError, match=r"ends: tokenizer\.json: its post_processor adds the id 999"):
            await stub.Tokenize(pb.TokenizeRequest(adapter="ends", text="a"))
        with pytest.raises(grpc.aio.AioRpcError, match=r"other: tokenizer_config\.json: eos_token"):
            await stub.Detokenize(pb.DetokenizeRequest(adapter="other", token_ids=[97]))
    for error, name, file, said in (
        (chat, "dear", "chat_template.jinja", "takes too much time or memory to be rendered"),
        (text, "ends", "tokenizer.json", "its post_processor adds the id 999"),
        (both, "other", "tokenizer_config.json", 'eos_token "<new>" is not among the added tokens'),
    ):
        assert isinstance(error, AdapterInvalid)
        assert error.message.startswith(f"{name}: {file}: {said}")
        version = f"namespaces/default/adapters/{name}/versions/1"
        assert error.metadata == {"file": file, "digest": f"sha256:{name}", "adapter_version": version}


async def test_messages_that_a_template_refuses_are_the_callers_fault(tmp_path: Path) -> None:
    fakes = adapters_with(strict={"chat_template.jinja": b"{{ raise_exception('system first') }}"})
    async with serving(FakeEngine(), fakes, write_base(tmp_path / "base")) as (_, channel):
        error = await failure(channel, request(adapter="strict", chat=CHAT))
    assert isinstance(error, InvalidArgument)
    assert [(v.field, "system first" in v.description) for v in error.violations] == [("prompt.chat", True)]


async def test_a_fault_of_an_adapters_own_template_or_tokenizer_is_told_as_the_adapters(tmp_path: Path) -> None:
    fakes = adapters_with(
        broken={"chat_template.jinja": b"{{ frob(1) }}"},
        empty={"chat_template.jinja": b"{# nothing #}"},
        endless={"chat_template.jinja": b"{{ 'x' * 99999 }}"},
    )
    model = write_base(tmp_path / "base")
    async with serving(FakeEngine(), fakes, model) as (_, channel):
        for name, said in [
            ("broken", "the chat template refuses it: 'frob' is undefined"),
            ("empty", "has no tokens"),
            ("endless", "has 99999 bytes; no text of more than "),
        ]:
            error = await failure(channel, request(adapter=name, chat=CHAT))
            (violation,) = error.violations
            version = f"namespaces/default/adapters/{name}/versions/1"
            assert violation.field == "prompt.chat"
            assert violation.description.startswith(said)
            assert violation.description.endswith(f"; the chat template is that of {version}, so look there as well")
        stub = InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="adapters/broken/versions/1, so look there"):
            await stub.Tokenize(pb.TokenizeRequest(adapter="broken", chat=CHAT))


async def test_an_adapter_may_bring_the_template_that_its_base_model_lacks(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    model = write_base(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    object.__setattr__(model, "chat_template", None)
    fakes = adapters_with(talk={"chat_template.jinja": b"{{ messages[0].content }}"})
    engine = FakeEngine()
    async with serving(engine, fakes, model) as (_, channel):
        assert (await failure(channel, request(chat=CHAT))).violations[0].field == "prompt.chat"
        await generate(channel, request(adapter="talk", chat=CHAT))
    assert engine.specs[0].prompt_ids == list(b"hi")


async def test_a_stream_goes_on_with_what_its_worker_holds(tmp_path: Path) -> None:
    fakes = adapters_with(own={"tokenizer.json": TOKENS})
    engine = FakeEngine(saying("hello", size=1))
    engine.gate.clear()
    async with serving(engine, fakes, write_base(tmp_path / "base")) as (_, channel):
        stream = InferenceServiceStub(channel).Generate(request(adapter="own"), timeout=20)
        assert (await stream.read()).HasField("started")
        fakes.texts.clear()  # what its worker forgets cannot be read again
        engine.gate.set()
        told = []
        while (response := await stream.read()) is not grpc.aio.EOF:
            told.append(response)
        assert told[-1].HasField("finished")  # the worker holds it
    assert engine.num_open == 0

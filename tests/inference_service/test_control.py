"""Model info, tokenizing, and what a replica holds."""

from collections.abc import Sequence

import grpc
import pytest

from inference_service.types import PinOwner, ResidentAdapter, StagedAdapter
from loraplex.inference.v1 import control_pb2 as control
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1.control_pb2_grpc import AdapterControlServiceStub
from loraplex.inference.v1.inference_pb2_grpc import InferenceServiceStub
from shared.errors import AdapterNotFound, EngineUnavailable, InvalidArgument, LoraplexError
from shared.status import from_rpc_error
from tests.inference_service.serving_fakes import DIGEST, EOS, FakeAdapters, FakeEngine, byte_model, serving

VERSION = "namespaces/default/adapters/pirate/versions/2"
LEVEL = control.LoadedAdapter


async def failure(call: grpc.aio.UnaryUnaryCall) -> LoraplexError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def staged(number: int, level: str = "DISK", namespace: str = "default") -> StagedAdapter:
    return StagedAdapter(f"namespaces/{namespace}/adapters/a{number:03}/versions/1", digest(number), level, 8, 100)


async def test_model_info_comes_from_model_and_engine() -> None:
    engine = FakeEngine()
    async with serving(engine) as (api, channel):
        info = await InferenceServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
        api.availability.engine = None
        call = InferenceServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert isinstance(await failure(call), EngineUnavailable)
    assert (info.base_model, info.architecture) == ("baseModels/tiny", "LlamaForCausalLM")
    assert (info.max_model_len, info.vocab_size, list(info.eos_token_ids)) == (128, 260, [EOS])
    assert (info.kv_cache_tokens, info.adapter_memory_bytes, info.max_num_seqs) == (640, 1 << 20, 8)
    assert info.has_tokenizer
    assert info.has_chat_template


async def test_tokenize_and_detokenize() -> None:
    async with serving(FakeEngine()) as (_, channel):
        stub = InferenceServiceStub(channel)
        answer = await stub.Tokenize(pb.TokenizeRequest(text="hé", adapter="pirate"))
        assert bytes(answer.token_ids).decode() == "hé"
        assert list(answer.tokens) == ["h", "�", "�"]
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])
        assert bytes((await stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids) == b"<user>x>"
        assert list((await stub.Tokenize(pb.TokenizeRequest(text=""))).token_ids) == []
        ids = [*b"hi", EOS]
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=True))).text == "hi"
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "hi<eos>"


async def test_tokenize_and_detokenize_refuse() -> None:
    async with serving(FakeEngine()) as (_, channel):
        stub = InferenceServiceStub(channel)
        assert isinstance(await failure(stub.Tokenize(pb.TokenizeRequest())), InvalidArgument)
        assert isinstance(await failure(stub.Tokenize(pb.TokenizeRequest(text="x", adapter="no"))), AdapterNotFound)
        assert isinstance(await failure(stub.Detokenize(pb.DetokenizeRequest(adapter="no"))), AdapterNotFound)
        error = await failure(stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 260])))
        assert [v.field for v in error.violations] == ["token_ids[1]"]
    async with serving(FakeEngine(), model=byte_model(with_tokenizer=False)) as (_, channel):
        stub = InferenceServiceStub(channel)
        assert isinstance(await failure(stub.Tokenize(pb.TokenizeRequest(text="x"))), InvalidArgument)
        assert isinstance(await failure(stub.Detokenize(pb.DetokenizeRequest(token_ids=[1]))), InvalidArgument)


async def test_load_waits_for_the_gpu_or_says_where_it_is() -> None:
    engine = FakeEngine()
    async with serving(engine) as (_, channel):
        stub = AdapterControlServiceStub(channel)
        first = await stub.LoadAdapter(control.LoadAdapterRequest(reference="pirate"))
        assert (first.adapter.level, first.adapter.adapter_version) == (LEVEL.LEVEL_DISK, VERSION)
        second = await stub.LoadAdapter(control.LoadAdapterRequest(reference="pirate@2", pinned=True, wait=True))
        assert (second.adapter.level, second.adapter.pinned, second.adapter.rank) == (LEVEL.LEVEL_GPU, True, 8)
        assert (second.adapter.digest, second.adapter.active_requests) == (DIGEST, 2)
        for reference, kind in (("nobody", AdapterNotFound), ("others/x", AdapterNotFound), ("!", InvalidArgument)):
            call = stub.LoadAdapter(control.LoadAdapterRequest(reference=reference))
            assert isinstance(await failure(call), kind)
    assert engine.calls == [("load", DIGEST, False, False), ("load", DIGEST, True, True)]
    assert all(seconds > 0 for seconds in engine.prepare_seconds)


@pytest.mark.parametrize("name", ["pirate", "pirate@2", f"pirate@{DIGEST}", VERSION, DIGEST])
async def test_unload_by_any_name_frees_gpu_and_host(name: str) -> None:
    engine, adapters = FakeEngine(), FakeAdapters()
    engine.resident = [ResidentAdapter(DIGEST, 4096, 8, ("operator",), 0)]
    adapters.staged.append(StagedAdapter(VERSION, DIGEST, "HOST", 8, 1000))
    async with serving(engine, adapters) as (_, channel):
        stub = AdapterControlServiceStub(channel)
        answer = await stub.UnloadAdapter(control.UnloadAdapterRequest(adapter=name, force=True))
        again = await stub.UnloadAdapter(control.UnloadAdapterRequest(adapter=name))
    assert (answer.freed_bytes, again.freed_bytes) == (5096, 0)
    assert engine.calls == [("unload", DIGEST, True), ("unload", DIGEST, False)]
    assert adapters.dropped == [DIGEST, DIGEST]
    assert adapters.prepared == []


@pytest.mark.parametrize(("on_device", "in_host", "freed"), [(0, 0, 0), (4096, 0, 4096), (0, 1000, 1000)])
async def test_unload_counts_each_tier_by_itself(on_device: int, in_host: int, freed: int) -> None:
    engine, adapters = FakeEngine(), FakeAdapters()
    engine.resident = [ResidentAdapter(digest(1), 77, 8, (), 0)]
    adapters.staged += [staged(1, "HOST")]
    if on_device:
        engine.resident.append(ResidentAdapter(DIGEST, on_device, 8, (), 0))
    if in_host:
        adapters.staged.append(StagedAdapter(VERSION, DIGEST, "HOST", 8, in_host))
    async with serving(engine, adapters) as (_, channel):
        stub = AdapterControlServiceStub(channel)
        answer = await stub.UnloadAdapter(control.UnloadAdapterRequest(adapter="pirate"))
    assert (answer.freed_bytes, answer.device_bytes, answer.host_bytes) == (freed, on_device, in_host)
    assert [a.digest for a in engine.resident] == [digest(1)]
    assert adapters.prepared == []


@pytest.mark.parametrize(("pinned_by", "comes_back"), [(("operator",), False), (("operator", "registry"), True)])
async def test_unload_says_whether_the_registry_brings_it_back(
    pinned_by: tuple[PinOwner, ...], comes_back: bool
) -> None:
    engine = FakeEngine()
    engine.resident = [ResidentAdapter(digest(1), 77, 8, ("registry",), 0), ResidentAdapter(DIGEST, 9, 8, pinned_by, 0)]
    async with serving(engine) as (_, channel):
        request = control.UnloadAdapterRequest(adapter="pirate")
        answer = await AdapterControlServiceStub(channel).UnloadAdapter(request)
    assert answer.comes_back is comes_back


@pytest.mark.parametrize(
    ("name", "others"), [("pirate", ["b", "c"]), (VERSION, ["b", "c"]), (DIGEST, ["b", "c", "pirate"])]
)
async def test_unload_says_which_other_adapters_share_the_memory(name: str, others: list[str]) -> None:
    engine, adapters = FakeEngine(), FakeAdapters()
    engine.resident = [ResidentAdapter(DIGEST, 4096, 8, (), 0)]
    names = {other: f"namespaces/default/adapters/{other}/versions/2" for other in ("c", "b", "pirate")}

    async def of_all(digests: Sequence[str]) -> dict[str, list[str]]:
        return {digest: ["", *names.values()] for digest in digests}

    adapters.names = of_all  # type: ignore[method-assign]
    async with serving(engine, adapters) as (_, channel):
        request = control.UnloadAdapterRequest(adapter=name)
        answer = await AdapterControlServiceStub(channel).UnloadAdapter(request)
    assert list(answer.shared_with) == [names[other] for other in others]
    assert answer.freed_bytes == 4096


@pytest.mark.parametrize("name", ["nobody", "pirate@3", digest(1), f"pirate@{digest(1)}", "others/pirate@2"])
async def test_unload_of_what_is_not_here(name: str) -> None:
    engine = FakeEngine()
    async with serving(engine) as (_, channel):
        call = AdapterControlServiceStub(channel).UnloadAdapter(control.UnloadAdapterRequest(adapter=name))
        assert isinstance(await failure(call), AdapterNotFound)
    assert engine.calls == []


async def test_malformed_names_and_tokens_are_refused() -> None:
    async with serving(FakeEngine()) as (_, channel):
        stub = AdapterControlServiceStub(channel)
        for name in ("", "sha256:xyz", "a b"):
            call = stub.UnloadAdapter(control.UnloadAdapterRequest(adapter=name))
            assert [v.field for v in (await failure(call)).violations] == ["adapter"]
        for token in ("!", "aGVsbG8=", "é"):
            call = stub.ListLoadedAdapters(control.ListLoadedAdaptersRequest(page_token=token))
            assert [v.field for v in (await failure(call)).violations] == ["page_token"]
        call = stub.ListLoadedAdapters(control.ListLoadedAdaptersRequest(page_size=-1))
        assert [v.field for v in (await failure(call)).violations] == ["page_size"]


async def test_list_merges_tiers_by_digest_and_pages() -> None:
    engine, adapters = FakeEngine(), FakeAdapters()
    adapters.staged = [staged(3), staged(1), staged(1, "HOST"), staged(2), staged(9, namespace="others")]
    engine.resident = [ResidentAdapter(digest(2), 77, 4, ("operator", "registry"), 1)]
    async with serving(engine, adapters) as (_, channel):
        stub = AdapterControlServiceStub(channel)
        first = await stub.ListLoadedAdapters(control.ListLoadedAdaptersRequest(page_size=2))
        token = first.next_page_token
        second = await stub.ListLoadedAdapters(control.ListLoadedAdaptersRequest(page_size=2, page_token=token))
    found = [*first.adapters, *second.adapters]
    assert [(a.digest, a.level) for a in found] == [
        (digest(1), LEVEL.LEVEL_HOST), (digest(2), LEVEL.LEVEL_GPU), (digest(3), LEVEL.LEVEL_DISK),
    ]  # fmt: skip
    assert (found[1].size_bytes, found[1].pinned, found[1].adapter_version) == (77, True, staged(2).version)
    assert list(found[1].pinned_by) == [LEVEL.PIN_OWNER_OPERATOR, LEVEL.PIN_OWNER_RESIDENCY]
    assert not found[0].pinned_by
    assert (len(first.adapters), second.next_page_token) == (2, "")


@pytest.mark.parametrize("num_others", [0, 2, 20])
async def test_the_list_has_the_other_versions_of_the_same_content(num_others: int) -> None:
    engine, adapters = FakeEngine(), FakeAdapters()
    first, *others = (f"namespaces/default/adapters/a{number:02}/versions/1" for number in range(1 + num_others))
    adapters.staged = [StagedAdapter(name, DIGEST, "HOST", 8, 100) for name in (*reversed(others), first)]

    async def of_all(digests: Sequence[str]) -> dict[str, list[str]]:
        return {digest: ["", first, *others] for digest in digests}

    adapters.names = of_all  # type: ignore[method-assign]
    async with serving(engine, adapters) as (_, channel):
        found = await AdapterControlServiceStub(channel).ListLoadedAdapters(control.ListLoadedAdaptersRequest())
    (adapter,) = found.adapters
    assert adapter.adapter_version == first
    assert list(adapter.other_versions) == others[:8]


async def test_a_resident_adapter_that_is_in_no_other_tier_keeps_its_name() -> None:
    engine, adapters = FakeEngine(), FakeAdapters()
    adapters.staged = []
    adapters.resolved = {digest(2): staged(2).version}
    engine.resident = [ResidentAdapter(digest(1), 77, 4, (), 0), ResidentAdapter(digest(2), 77, 8, (), 0)]
    async with serving(engine, adapters) as (_, channel):
        found = await AdapterControlServiceStub(channel).ListLoadedAdapters(control.ListLoadedAdaptersRequest())
    assert [(a.digest, a.adapter_version, a.rank, a.level) for a in found.adapters] == [
        (digest(1), "", 4, LEVEL.LEVEL_GPU), (digest(2), staged(2).version, 8, LEVEL.LEVEL_GPU),
    ]  # fmt: skip


async def test_what_is_too_long_is_refused_before_it_is_converted() -> None:
    async with serving(FakeEngine()) as (_, channel):
        stub = InferenceServiceStub(channel)
        largest = await stub.Tokenize(pb.TokenizeRequest(text="x" * (64 * 128)))
        assert len(largest.token_ids) == len(largest.tokens) == 64 * 128
        error = await failure(stub.Tokenize(pb.TokenizeRequest(text="x" * (64 * 128 + 1))))
        assert [v.field for v in error.violations] == ["prompt.text"]
        assert (
            error.message == "prompt.text: has 8193 bytes; no text of more than 8192 fits into this replica's context"
        )
        long = pb.Chat(messages=[pb.ChatMessage(role="user", content="é" * 2049)] * 2)
        many = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")] * 1025)
        for chat in (long, many):
            error = await failure(stub.Tokenize(pb.TokenizeRequest(chat=chat)))
            assert [v.field for v in error.violations] == ["prompt.chat.messages"]
        assert len((await stub.Detokenize(pb.DetokenizeRequest(token_ids=[65] * 131_072))).text) == 131_072
        for count in (131_073, 2_000_000):
            error = await failure(stub.Detokenize(pb.DetokenizeRequest(token_ids=[65] * count)))
            assert [v.field for v in error.violations] == ["token_ids"]


async def test_a_template_that_makes_too_much_of_a_chat_is_refused() -> None:
    model = byte_model(template="{% for i in range(200) %}{{ messages[0].content }}{% endfor %}")
    async with serving(FakeEngine(), model=model) as (_, channel):
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * 50)])
        error = await failure(InferenceServiceStub(channel).Tokenize(pb.TokenizeRequest(chat=chat)))
    assert [v.field for v in error.violations] == ["prompt.chat"]

"""The adapter that an inference gateway names in a header, through the whole of a real API server."""

import grpc
import pytest

from inference_service.model_header import MODEL_HEADER, OLD_MODEL_HEADER
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1.inference_pb2_grpc import InferenceServiceStub
from shared.errors import AdapterNotFound, InvalidArgument
from shared.status import from_rpc_error
from tests.inference_service.serving_fakes import DIGEST, FakeAdapters, FakeEngine, serving


def named(*names, header=MODEL_HEADER):
    return [(header, name) for name in names]


async def generate(channel, headers, **fields):
    request = pb.GenerateRequest(text="Hi", **fields)
    return [event async for event in InferenceServiceStub(channel).Generate(request, metadata=headers, timeout=20)]


@pytest.mark.parametrize(
    ("names", "fields", "prepared"),
    [
        (["pirate@prod"], {"session_id": "s"}, ["default/pirate@prod"]),
        (["namespaces/default/adapters/pirate"], {}, ["default/pirate"]),
        (["tiny"], {}, []),  # the base model's id
        (["baseModels/tiny"], {}, []),
        (["nobody"], {"adapter": "pirate"}, ["default/pirate"]),  # the request's own name counts
        ([""], {"adapter": "pirate"}, ["default/pirate"]),
        (["nobody"], {"blend": [{"reference": "pirate", "weight": 1}]}, ["default/pirate"]),
        ([], {}, []),
    ],
)
async def test_the_header_counts_where_the_request_names_none(names, fields, prepared):
    engine, adapters = FakeEngine(), FakeAdapters()
    async with serving(engine, adapters) as (_, channel):
        events = await generate(channel, named(*names), **fields)
    assert [reference for reference, _ in adapters.prepared] == prepared
    assert (engine.specs[0].adapter_digest is not None) == bool(prepared)
    if "blend" not in fields:
        assert events[0].started.adapter_digest == (DIGEST if prepared else "")


@pytest.mark.parametrize(
    ("new", "prepared"), [([], ["default/pirate@old"]), (["pirate"], ["default/pirate"]), (["tiny"], [])]
)
async def test_the_old_name_counts_where_the_new_one_is_missing(new, prepared):
    assert OLD_MODEL_HEADER == "x-gateway-model-name-rewrite"
    adapters = FakeAdapters()
    async with serving(FakeEngine(), adapters) as (_, channel):
        await generate(channel, named("pirate@old", header=OLD_MODEL_HEADER) + named(*new))
    assert [reference for reference, _ in adapters.prepared] == prepared


async def test_tokenizing_follows_it_too():
    adapters = FakeAdapters()
    async with serving(FakeEngine(), adapters) as (_, channel):
        stub = InferenceServiceStub(channel)
        await stub.Tokenize(pb.TokenizeRequest(text="Hi"), metadata=named("pirate"))
        await stub.Detokenize(pb.DetokenizeRequest(token_ids=[72]), metadata=named("pirate"))
        await stub.Tokenize(pb.TokenizeRequest(text="Hi"), metadata=named("tiny"))
    assert [reference for reference, _ in adapters.prepared] == ["default/pirate"] * 2


@pytest.mark.parametrize("header", [MODEL_HEADER, OLD_MODEL_HEADER])
@pytest.mark.parametrize("names", [[""], ["Not An Id"], ["pirate@"], ["a/b/c"], ["pirate", "pirate"], ["tiny", "tiny"]])
async def test_what_is_no_name_is_an_error_that_names_the_header(names, header):
    engine, adapters = FakeEngine(), FakeAdapters()
    async with serving(engine, adapters) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(channel, named(*names, header=header))
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidArgument)
    assert [violation.field for violation in error.violations] == [header]
    assert (engine.specs, adapters.prepared) == ([], [])


async def test_an_adapter_unknown_or_of_others_is_never_the_base_model():
    engine, adapters = FakeEngine(), FakeAdapters()
    async with serving(engine, adapters) as (_, channel):
        for name in ("nobody", "others/pirate"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(channel, named(name))
            assert isinstance(from_rpc_error(caught.value), AdapterNotFound)
    assert engine.specs == []
    assert [reference for reference, _ in adapters.prepared] == ["default/nobody"]  # the other was not looked up

"""What `Client.generate` sends, and what it does not take."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from loraplex import Client
from loraplex.client import INFERENCE_SERVICE
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1 import inference_pb2_grpc
from shared.grpc_server import create_server

PARTS = [{"reference": "pirate", "weight": 0.7}, {"reference": "team/json@prod", "weight": -0.3}]
Asked = tuple[Client, list[pb.GenerateRequest]]


class Listening(inference_pb2_grpc.InferenceServiceServicer):
    """Keeps what it is asked."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # type: ignore[override]  # noqa: N802
        self.requests.append(request)
        yield pb.GenerateResponse()


@pytest_asyncio.fixture
async def asked() -> AsyncIterator[Asked]:
    servicer = Listening()
    found = await create_server(
        "127.0.0.1:0",
        lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server),  # type: ignore[no-untyped-call]
        [INFERENCE_SERVICE],
    )
    await found.server.start()
    await found.readiness.set(serving=True)
    async with Client(f"127.0.0.1:{found.port}") as client:
        yield client, servicer.requests
    await found.server.stop(None)


async def sent(asked: Asked, *arguments: Any, **named: Any) -> pb.GenerateRequest:
    client, requests = asked
    assert len([event async for event in client.generate(*arguments, timeout=20, **named)]) == 1
    return requests.pop()


async def test_a_blend_is_sent_as_it_is_given(asked: Asked) -> None:
    blend = [pb.BlendPart(reference="pirate", weight=0.7), pb.BlendPart(reference="team/json@prod", weight=-0.3)]
    sampling = pb.Sampling(temperature=0)
    assert await sent(asked, "Hi", blend=PARTS, temperature=0) == pb.GenerateRequest(
        text="Hi", blend=blend, sampling=sampling
    )
    assert (await sent(asked, "Hi", request={"blend": PARTS})).blend == blend
    request = await sent(asked, [1, 2], adapter="a", request={"adapter": "b", "priority": 2}, stop={"max_tokens": 3})
    assert request == pb.GenerateRequest(
        token_ids={"ids": [1, 2]}, adapter="b", priority=2, stop={"max_tokens": 3}, sampling={}
    )


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"max_tokens": 5}, "generate() takes no 'max_tokens' as a keyword: give stop={'max_tokens': …}"),
        ({"priority": 5}, "generate() takes no 'priority' as a keyword: give request={'priority': …}"),
        ({"stop": {"seed": 5}}, "generate() takes no 'seed' in stop=: give seed=…"),
        ({"output": {"seeed": 5}}, "generate() takes no 'seeed' in output=: there are token_ids, "),
        ({"request": {"adaptor": "a"}}, "generate() takes no 'adaptor' in request=: there are request_id, adapter, "),
    ],
)
async def test_what_is_no_field_is_told_where_it_belongs(asked: Asked, named: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        await sent(asked, "Hi", **named)
    assert asked[1] == []

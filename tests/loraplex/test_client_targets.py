"""A client of several servers that have no name: calls go in turn to those that are SERVING."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from loraplex import Client, LoraplexError
from loraplex.client import INFERENCE_SERVICE
from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc
from shared.grpc_server import create_server

ASKED = inference_pb2.GetModelInfoRequest()


class Named(inference_pb2_grpc.InferenceServiceServicer):
    """Says its name."""

    def __init__(self, name):
        self.name = name

    async def GetModelInfo(self, request, context):  # noqa: N802
        return inference_pb2.GetModelInfoResponse(base_model=self.name)


@asynccontextmanager
async def replicas(*names):
    """One server of each name, none of them SERVING yet."""
    found = []
    for name in names:
        servicer = Named(name)

        def register(server, servicer=servicer):
            inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)

        found.append(await create_server("127.0.0.1:0", register, [INFERENCE_SERVICE]))
        await found[-1].server.start()
    yield found
    await asyncio.gather(*(each.server.stop(None) for each in found))


async def heard(client, until, seconds=30):
    """Asks until the last few answers, by name or error, are `until`."""
    last = []
    async with asyncio.timeout(seconds):
        while set(last) != until or len(last) < 8:
            try:
                answer = await client.call(client.inference.GetModelInfo(ASKED))
                last.append(answer.base_model)
            except LoraplexError as error:
                last.append(f"{error.reason}, retry after {error.retry_after}")
            last = last[-8:]
            await asyncio.sleep(0.01)


async def test_calls_go_in_turn_to_those_of_a_list_that_are_serving():
    async with replicas("a", "b") as (a, b):
        target = f"ipv4:127.0.0.1:{a.port},127.0.0.1:{b.port}"
        async with Client(target) as client:
            with pytest.raises(LoraplexError, match="unhealthy") as caught:
                await client.call(client.inference.GetModelInfo(ASKED))
            assert (caught.value.code, caught.value.retry_after) == ("UNAVAILABLE", 1.0)
            await a.readiness.set(serving=True)
            await heard(client, {"a"})
            await b.readiness.set(serving=True)
            await heard(client, {"a", "b"})
            await a.readiness.set(serving=False)
            await heard(client, {"b"})
            await b.server.stop(None)
            await heard(client, {"UNAVAILABLE, retry after 1.0"})


async def test_of_a_server_that_is_not_there_the_error_says_so_and_that_a_retry_helps():
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(LoraplexError, match="Connection refused") as caught:
            await client.call(client.inference.GetModelInfo(ASKED))
    assert caught.value.retry_after == 1.0

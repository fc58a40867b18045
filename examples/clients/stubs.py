"""A client of the generated stubs alone, as in any language: grpcio, protobuf, and what protoc made of `protos/`.

Usage: stubs.py [INFERENCE [REGISTRY]]
"""

import asyncio
import sys

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from loraplex.inference.v1 import inference_pb2, inference_pb2_grpc
from loraplex.registry.v1 import registry_pb2, registry_pb2_grpc

DEADLINE_SECONDS = 60.0


async def main(inference: str = "localhost:50052", registry: str = "localhost:50051") -> None:
    async with grpc.aio.insecure_channel(registry) as channel:
        adapters = registry_pb2_grpc.AdapterRegistryServiceStub(channel)
        page = await adapters.ListAdapters(registry_pb2.ListAdaptersRequest(), timeout=DEADLINE_SECONDS)
        for adapter in page.adapters:
            print(adapter.name)
    async with grpc.aio.insecure_channel(inference) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for name in ("pirate", "nobody"):
            try:
                await ask(stub, name)
            except grpc.aio.AioRpcError as error:
                print(f"{error.code().name}, {reason(error)}: {error.details()}")


async def ask(stub: inference_pb2_grpc.InferenceServiceStub, adapter: str) -> None:
    """Prints an answer as it comes."""
    question = inference_pb2.ChatMessage(role="user", content="What is the capital of France?")
    request = inference_pb2.GenerateRequest(
        adapter=adapter,
        chat=inference_pb2.Chat(messages=[question]),
        sampling=inference_pb2.Sampling(temperature=0),
        stop=inference_pb2.Stop(max_tokens=24),
    )
    async for event in stub.Generate(request, timeout=DEADLINE_SECONDS):
        match event.WhichOneof("event"):
            case "started":
                print(f"{event.started.adapter_version}: ", end="")
            case "delta":
                print(event.delta.text, end="", flush=True)
            case "finished":
                print(f" ({event.finished.usage.completion_tokens} tokens)")


def reason(error: grpc.aio.AioRpcError) -> str:
    """The reason in a status' ErrorInfo, which is what a program decides by; texts may change."""
    status, info = rpc_status.from_call(error), error_details_pb2.ErrorInfo()  # type: ignore[arg-type]
    return next((info.reason for detail in status.details if detail.Unpack(info)), "") if status else ""


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""A twenty-line inference service, both services on one thread, and a caller of the real command line."""

import asyncio
import contextlib
import io
import threading
from pathlib import Path
from typing import NamedTuple

from loraplex.cli.main import main
from loraplex.client import INFERENCE_SERVICE
from loraplex.inference.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from registry_service.config import RegistryConfig
from registry_service.server import start as start_registry
from shared.errors import InvalidArgument
from shared.grpc_server import create_server

NAMES = ["namespaces/default/adapters/mine/versions/1", "namespaces/team/adapters/mine/versions/12"]
LEVEL = control_pb2.LoadedAdapter.LEVEL_GPU


class FakeInference(inference_pb2_grpc.InferenceServiceServicer, control_pb2_grpc.AdapterControlServiceServicer):
    """Echoes prompts. `wrong` is refused, `slow` says one word and then nothing. It keeps its requests.

    `refusal`: what GetModelInfo and LoadAdapter are refused with.
    """

    def __init__(self):
        self.requests = []
        self.status = control_pb2.GetReplicaStatusResponse()
        self.pins = [[], []]  # of the two adapters
        self.refusal = None

    def _check(self):
        if self.refusal is not None:
            raise self.refusal

    async def GetModelInfo(self, request, context):  # noqa: N802
        self._check()
        fields = {"architecture": "LlamaForCausalLM", "device": "cpu", "dtype": "float32"}
        return inference_pb2.GetModelInfoResponse(base_model="baseModels/tiny", vocab_size=64, **fields)

    async def Generate(self, request, context):  # noqa: N802
        self.requests.append(request)
        if request.text == "wrong":
            raise InvalidArgument.of("text", "is wrong")
        yield inference_pb2.GenerateResponse(started={"request_id": "r"})
        for index in range(request.sampling.n or 1):
            text = f"{request.text or 'tokens'}, said {index}"
            yield inference_pb2.GenerateResponse(delta={"index": index, "text": text})
            if request.text == "slow":
                await asyncio.Event().wait()
            yield inference_pb2.GenerateResponse(finished={"index": index, "usage": {"completion_tokens": 3}})

    async def LoadAdapter(self, request, context):  # noqa: N802
        self._check()
        self.requests.append(request)
        adapter = {"adapter_version": NAMES[0], "size_bytes": 20_000, "pinned": request.pinned}
        return control_pb2.LoadAdapterResponse(adapter=adapter)

    async def UnloadAdapter(self, request, context):  # noqa: N802
        self.requests.append(request)
        others = NAMES if request.adapter.startswith("shared") else []
        if request.adapter.endswith("gone"):
            return control_pb2.UnloadAdapterResponse(shared_with=others)
        freed = {"freed_bytes": 50_000, "device_bytes": 30_000, "host_bytes": 20_000}
        comes_back = request.adapter == "wanted"
        return control_pb2.UnloadAdapterResponse(**freed, shared_with=others, comes_back=comes_back)

    async def GetReplicaStatus(self, request, context):  # noqa: N802
        return self.status

    async def ListLoadedAdapters(self, request, context):  # noqa: N802
        at = int(request.page_token or 0)  # pages of one
        found = {"adapter_version": NAMES[at], "digest": f"sha256:{at}", "level": LEVEL, "rank": 4, "size_bytes": 10}
        found |= {"pinned": bool(self.pins[at]), "pinned_by": self.pins[at]}
        token = str(at + 1) if at + 1 < len(NAMES) else ""
        return control_pb2.ListLoadedAdaptersResponse(adapters=[found], next_page_token=token)


class Servers(NamedTuple):
    """Where they listen, what the fake one heard, and the folder that the registry calls file://main."""

    registry: str
    inference: str
    unready: str
    fake: FakeInference
    root: Path


@contextlib.contextmanager
def serving(folder):
    """Both services, and an inference service that is not ready, on a thread of their own: commands run their own loop.

    Sources are file://main/… below `folder`/adapters.
    """
    started, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    servers = []

    async def serve():
        config = RegistryConfig(
            listen="127.0.0.1:0",
            database=f"sqlite:///{folder}/registry.db",
            file_roots={"main": str(folder / "adapters")},
        )
        registry, fake = await start_registry(config), FakeInference()
        ready, unready = await _inference(fake), await _inference(fake)
        await ready.readiness.set(serving=True)
        ports = (f"127.0.0.1:{port}" for port in (registry.port, ready.port, unready.port))
        servers.append(Servers(*ports, fake, folder / "adapters"))
        started.set()
        await stop.wait()
        await asyncio.gather(registry.stop(), ready.server.stop(None), unready.server.stop(None))

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(60)
        yield servers[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


async def _inference(fake):
    def register(server):
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
        control_pb2_grpc.add_AdapterControlServiceServicer_to_server(fake, server)

    bound = await create_server("127.0.0.1:0", register, [INFERENCE_SERVICE])
    await bound.server.start()
    return bound


class Ran(NamedTuple):
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str


def run_cli(*arguments) -> Ran:
    """Runs `loraplex` in this process. An exception that reaches the user as a traceback reaches the test."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as exit:
            status = exit.code or 0
    return Ran(status, out.buffer.getvalue().decode(), err.buffer.getvalue().decode())

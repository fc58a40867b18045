"""A real API process, with no engine yet: health, refusal, SIGTERM, the parent's death, and failures at start."""

import asyncio
import json
import signal
import socket
import sys
from pathlib import Path

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from examples.stack import free_address
from inference_service.config import ApiStart, InferenceConfig
from inference_service.launch import child_specs, find_base_model
from loraplex.inference.v1 import inference_pb2 as pb
from loraplex.inference.v1.inference_pb2_grpc import InferenceServiceStub
from shared.config import load
from shared.errors import EngineUnavailable
from shared.status import from_rpc_error
from tests.inference_service.serving_fakes import SERVICE, byte_tokenizer, raw_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(raw_config()))
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


async def launch(folder: Path, listen: str) -> asyncio.subprocess.Process:
    start = ApiStart(
        listen=listen, reuse_port=False, model_folder=str(folder), model_id="tiny",
        api_address=f"ipc://{folder}/e", adapter_address=f"ipc://{folder}/a", drain_grace=5.0,
    )  # fmt: skip
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "inference_service.server", stdin=pipe, stderr=pipe
    )
    process.stdin.write(msgspec.json.encode(start) + b"\n")
    return process


async def health(channel: grpc.aio.Channel, service: str) -> int:
    check = health_pb2_grpc.HealthStub(channel).Check
    return (await check(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True, timeout=30)).status


async def test_alive_but_not_ready_until_there_is_an_engine_and_sigterm_exits_0(folder: Path) -> None:
    process = await launch(folder, address := free_address())
    async with grpc.aio.insecure_channel(address) as channel:
        assert await health(channel, "") == health_pb2.HealthCheckResponse.SERVING
        assert await health(channel, SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="x")).read()
        assert isinstance(from_rpc_error(caught.value), EngineUnavailable)
        process.stdin.write(b'{"event": "engine_down"}\n{"event": "engine_up"}\n{"event": "adapters_down"}\n')
        process.send_signal(signal.SIGINT)  # is the supervisor's business
        assert await health(channel, "") == health_pb2.HealthCheckResponse.SERVING
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_ends_when_the_supervisor_is_gone(folder: Path) -> None:
    process = await launch(folder, address := free_address())
    async with grpc.aio.insecure_channel(address) as channel:
        await health(channel, "")
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_says_in_one_line_why_it_cannot_start(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = await launch(folder, address := f"127.0.0.1:{taken.getsockname()[1]}")
        _, stderr = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 2  # starting again cannot help
        assert f"error: INVALID_ARGUMENT: listen: cannot listen on {address}" in stderr.decode()
    (folder / "tokenizer.json").write_text("{}")
    process = await launch(folder, free_address())
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert stderr.decode().startswith("error: INVALID_ARGUMENT: tokenizer.json: is not a tokenizer")


async def test_limits_of_the_configuration_reach_the_process(folder: Path) -> None:
    """From flags and the TOML file, through the line that an API process is started with, to a refusal."""
    toml = folder / "serve.toml"
    toml.write_text("[namespaces.default]\nrequests_per_second = 0.001\n")
    given = {"model": str(folder), "device": "cpu", "load_format": "dummy", "listen": (address := free_address())}
    flags = {**given, "max_unread": "7", "tenant_burst_seconds": "1"}
    config = load(InferenceConfig, toml=toml, env={}, prefix="LORAPLEX_INFERENCE_", flags=flags)
    (spec,) = [s for s in child_specs(config, find_base_model(config), folder, 9) if s.role == "api"]
    assert msgspec.json.decode(spec.start, type=ApiStart).max_unread == 7
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*spec.argv, stdin=pipe, stdout=pipe, stderr=pipe)
    process.stdin.write(spec.start + b"\n")
    async with grpc.aio.insecure_channel(address) as channel:
        await health(channel, "")
        reasons = []
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await InferenceServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
            reasons.append(from_rpc_error(caught.value).reason)
        assert reasons == ["ENGINE_UNAVAILABLE", "RATE_LIMITED"]
    process.terminate()
    await asyncio.wait_for(process.communicate(), 60)

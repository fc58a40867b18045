"""Both services as child processes, for the demo, `make serve`, the benchmarks and the end-to-end tests."""

import asyncio
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex import Client
from loraplex.registry.v1 import registry_pb2, resources_pb2

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
ADAPTERS = ROOT / "examples" / "adapters"
BASE_MODEL = "smollm2-135m-instruct"
REGISTRY_SERVICE = "loraplex.registry.v1.AdapterRegistryService"
INFERENCE_SERVICE = "loraplex.inference.v1.InferenceService"
DRAIN_SECONDS = 20.0
STOP_SECONDS = DRAIN_SECONDS + 20.0
_PORTS = (10_000, 32_768)  # below Linux's ephemeral ports
_EAGER = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 200)]


def free_address() -> str:
    """An address of this machine that nothing listens on at this moment.

    Its port is one that the kernel never hands out by itself, so that no connection or port 0 of another process
    takes it before the service listens, or while it restarts.
    """
    while True:
        port = random.randrange(*_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return f"127.0.0.1:{port}"


class ServerProcess:
    """One service as a child process that logs to a file."""

    def __init__(self, module: str, flags: Sequence[str], address: str, service: str, log: Path) -> None:
        self.address = address
        self._command = [sys.executable, "-m", module, "--listen", address, *flags]
        self._service = service
        self._log = log
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts the process; `ready` waits for it."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as out:
            # A session of its own: Ctrl-C reaches only us, and we end the services in order.
            self.process = await asyncio.create_subprocess_exec(
                *self._command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True
            )

    async def ready(self, seconds: float) -> None:
        """Returns when health says SERVING.

        Raises:
            RuntimeError: the process ended, or `seconds` passed; with the end of its log.
        """
        assert self.process is not None
        deadline = time.monotonic() + seconds
        async with grpc.aio.insecure_channel(self.address, options=_EAGER) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not await self._is_serving(stub):
                if self.process.returncode is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{self._service} is not serving; the end of {self._log}:\n{self.log_tail()}")
                await asyncio.sleep(0.05)

    async def _is_serving(self, stub: health_pb2_grpc.HealthStub) -> bool:
        request = health_pb2.HealthCheckRequest(service=self._service)
        try:
            answer = await stub.Check(request, timeout=1, wait_for_ready=True)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of the log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    async def stop(self, seconds: float = STOP_SECONDS) -> int | None:
        """SIGTERM, then SIGKILL after `seconds`, which are more than the service drains. Returns the exit code."""
        process = self.process
        if process is None:
            return None
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), seconds)
            except TimeoutError:
                process.kill()
        return await process.wait()


class Stack:
    """A registry on SQLite and an inference service that serves the example base model.

    Args:
        folder: Where the database, the adapter cache and the logs go.
        registry, inference: Addresses; free ones by default.
        flags: More flags of the inference service.
        model: Folder of the base model.
        roots: Folders that adapters may come from, by name.
    """

    def __init__(
        self,
        folder: Path,
        *,
        registry: str | None = None,
        inference: str | None = None,
        flags: Sequence[str] = (),
        model: Path = MODEL,
        roots: Mapping[str, Path] | None = None,
    ) -> None:
        registry, inference = registry or free_address(), inference or free_address()
        root_flags = [f"--file-root={name}={path}" for name, path in (roots or {"examples": ADAPTERS}).items()]
        self.registry = ServerProcess(
            "registry_service",
            [f"--database=sqlite:///{folder}/registry.db", *root_flags],
            registry,
            REGISTRY_SERVICE,
            folder / "registry.log",
        )
        self.inference = ServerProcess(
            "inference_service",
            [
                f"--model={model}",
                f"--registry={registry}",
                f"--cache-dir={folder}/cache",
                "--metrics-listen=127.0.0.1:0",
                f"--drain-grace={DRAIN_SECONDS}",
                *root_flags,
                *flags,
            ],
            inference,
            INFERENCE_SERVICE,
            folder / "inference.log",
        )

    async def __aenter__(self) -> "Stack":
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def start(self) -> None:
        """Starts both and waits until they serve. Whatever happens, call `stop` after it."""
        await asyncio.gather(self.registry.start(), self.inference.start())
        await asyncio.gather(self.registry.ready(30), self.inference.ready(120))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> tuple[int | None, int | None]:
        """Stops both; returns the exit codes of the registry and the inference service."""
        inference = await self.inference.stop()
        return await self.registry.stop(), inference

    def client(self) -> Client:
        """A client of both services."""
        return Client(self.inference.address, self.registry.address)


async def wait_for_base_model(client: Client, name: str = BASE_MODEL, seconds: float = 30.0) -> None:
    """Returns when the replica has made its base model known to the registry."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            await client.call(client.registry.GetBaseModel(registry_pb2.GetBaseModelRequest(name=name)))
            return
        except Exception:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


async def register(
    client: Client, adapter: str, uri: str, base_model: str = BASE_MODEL, **fields: object
) -> registry_pb2.RegisterAdapterResponse:
    """Registers one adapter in the namespace `default`."""
    request = registry_pb2.RegisterAdapterRequest(
        adapter_id=adapter, base_model=base_model, source=resources_pb2.AdapterSource(uri=uri)
    )
    request.MergeFrom(registry_pb2.RegisterAdapterRequest(**fields))  # type: ignore[arg-type]
    return await client.call(client.registry.RegisterAdapter(request))

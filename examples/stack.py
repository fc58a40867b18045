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
from shared.listening import check_ports

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


def free_address(host: str = "127.0.0.1") -> str:
    """An address of this machine that nothing listens on at this moment.

    Its port is one that the kernel never hands out by itself, so that no connection or port 0 of another process
    takes it before the service listens, or while it restarts.
    """
    while True:
        port = random.randrange(*_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return f"{host}:{port}"


class NotServing(RuntimeError):
    """A service that was started is not there: what it said last."""


class ServerProcess:
    """One service as a child process that logs to a file.

    `health`: where Health is asked; by default at `address`, which must then be in the clear. `prefix`: words of the
    command before Python.
    """

    def __init__(
        self,
        module: str,
        flags: Sequence[str],
        address: str,
        service: str,
        log: Path,
        *,
        health: str = "",
        prefix: Sequence[str] = (),
    ) -> None:
        self.address = address
        self._command = [*prefix, sys.executable, "-m", module, "--listen", address, *flags]
        self._health = health or address
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
        """Returns when health says SERVING. Whoever had its port before would say so too: look first (`check_ports`).

        Raises:
            NotServing: the process ended, or `seconds` passed.
        """
        assert self.process is not None
        deadline = time.monotonic() + seconds
        async with grpc.aio.insecure_channel(self._health, options=_EAGER) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not await self._is_serving(stub):
                if self.process.returncode is not None or time.monotonic() > deadline:
                    raise NotServing(f"{self._service} is not serving: {self.last_words()}")
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

    def last_words(self) -> str:
        """Why it ended, if it has said so, and else the end of its log."""
        tail = self.log_tail()
        said = [line.removeprefix("error: ") for line in tail.splitlines() if line.startswith("error: ")]
        return said[-1] if said else f"the end of {self._log}:\n{tail}"

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
    """A registry and an inference service that serves the example base model.

    Args:
        folder: Where the database, the adapter cache and the logs go.
        registry, inference: Addresses; free ones by default.
        flags, registry_flags: More flags of the inference service and of the registry.
        model: Folder of the base model.
        roots: Folders that adapters may come from, by name.
        database: URL of the registry's database, which is migrated; SQLite in `folder` by default.
        registry_target: Where replicas find the registry, if not at its address alone.
    """

    def __init__(
        self,
        folder: Path,
        *,
        registry: str | None = None,
        inference: str | None = None,
        flags: Sequence[str] = (),
        registry_flags: Sequence[str] = (),
        model: Path = MODEL,
        roots: Mapping[str, Path] | None = None,
        database: str | None = None,
        registry_target: str | None = None,
    ) -> None:
        registry, inference = registry or free_address(), inference or free_address()
        roots = roots or {"examples": ADAPTERS}
        self._folder = folder
        self._flags, self._registry_flags = flags, registry_flags
        self._root_flags = [f"--file-root={name}={path}" for name, path in roots.items()]
        self._model = model
        self._database = database or f"sqlite:///{folder}/registry.db"
        self._registry_target = registry_target or registry
        self.registry = self.another_registry(registry, "registry")
        self.inference = self.another_replica(inference, "inference")

    def another_registry(self, address: str, name: str, *, prefix: Sequence[str] = ()) -> ServerProcess:
        """A registry with the same settings, not started; `name` is that of its log."""
        return ServerProcess(
            "registry_service",
            [f"--database={self._database}", *self._root_flags, *self._registry_flags],
            address,
            REGISTRY_SERVICE,
            self._folder / f"{name}.log",
            health=_value("--health-listen", self._registry_flags),
            prefix=prefix,
        )

    def another_replica(
        self, address: str, name: str, *, registry: str | None = None, prefix: Sequence[str] = ()
    ) -> ServerProcess:
        """An inference service with the same settings, not started; `name` is that of its log and of its cache.

        `registry`: where it finds the registry, if not where the others do.
        """
        cache = "cache" if name == "inference" else f"cache-{name}"
        return ServerProcess(
            "inference_service",
            [
                f"--model={self._model}",
                f"--registry={registry or self._registry_target}",
                f"--cache-dir={self._folder / cache}",
                "--metrics-listen=127.0.0.1:0",
                f"--drain-grace={DRAIN_SECONDS}",
                *self._root_flags,
                *self._flags,
            ],
            address,
            INFERENCE_SERVICE,
            self._folder / f"{name}.log",
            health=_value("--health-listen", self._flags),
            prefix=prefix,
        )

    async def __aenter__(self) -> "Stack":
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def start(self) -> None:
        """Starts both and waits until they serve. Whatever happens, call `stop` after it.

        Raises:
            InvalidArgument: somebody else listens on one of their ports; nothing is started, which could take that
                for the other service.
            NotServing: a service ended, or took too long.
        """
        check_ports({"registry": self.registry.address, "inference": self.inference.address})
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


def _value(flag: str, flags: Sequence[str]) -> str:
    """What `flags` say for a flag; empty without it."""
    return next((each.partition("=")[2] for each in flags if each.startswith(f"{flag}=")), "")


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

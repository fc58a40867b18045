"""A gRPC server with health, reflection, limits and an orderly end, the same for both services."""

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shared.auth.gate import AccessGate
from shared.call_limits import CallLimits
from shared.call_observers import CallObserver, ObservingInterceptor
from shared.errors import InvalidArgument
from shared.interceptors import ErrorInterceptor
from shared.limits import USUAL_LIMITS, LimitSettings
from shared.listening import check_listen

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 16 << 20
# Clients may ping idle connections. By default gRPC ends one after three pings less than five minutes apart.
_PINGS = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)
# Of the port that serves Health alone, which nobody authenticates at.
_PROBING = LimitSettings(
    max_calls=64, max_streams_per_connection=16, max_request_bytes=4096, connection_idle_seconds=60
)
_WATCH_FLUSH_SECONDS = 0.1  # Health.Watch streams hear NOT_SERVING before they end


class _Health(health.aio.HealthServicer):  # type: ignore[name-defined,misc]
    """The stock servicer, whose Watch streams end when the server stops instead of holding it."""

    def __init__(self) -> None:
        super().__init__()
        self.stopping = asyncio.Event()

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 - the RPC's name
        watch = asyncio.ensure_future(super().Watch(request, context))
        stopping = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait([watch, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            stopping.cancel()


class Readiness:
    """`grpc.health.v1` of one server: "" is liveness, each service name is readiness."""

    def __init__(self, service_names: Sequence[str]) -> None:
        self.servicer = _Health()
        self._service_names = tuple(service_names)

    async def set(self, *, serving: bool) -> None:
        """Says of every service whether it takes requests; Health.Watch streams hear it."""
        status = health_pb2.HealthCheckResponse
        for name in self._service_names:
            await self.servicer.set(name, status.SERVING if serving else status.NOT_SERVING)


@dataclass
class BoundServer:
    """A server that has its port but has not started. `health`: the one of Health alone, which has, if there is one."""

    server: grpc.aio.Server
    port: int
    readiness: Readiness
    health: grpc.aio.Server | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


async def create_server(
    listen: str,
    register: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
    *,
    reuse_port: bool = False,
    limits: LimitSettings = USUAL_LIMITS,
    gate: AccessGate | None = None,
    credentials: grpc.ServerCredentials | None = None,
    health_listen: str = "",
    observers: Sequence[CallObserver] = (),
) -> BoundServer:
    """Binds `listen` ("host:port", port 0 = any free one). Readiness starts as NOT_SERVING.

    `limits`: of connections and calls. `gate`: who may call what; None lets in everybody, to handlers that do not ask.
    `credentials`: of TLS. `health_listen`: where Health is served as well, by itself and in the clear; empty: nowhere.
    `observers`: hear of every call.

    Raises:
        InvalidArgument: the address is taken or not ours.
    """
    await asyncio.to_thread(check_listen, listen, reuse_port=reuse_port)
    if health_listen:
        await asyncio.to_thread(check_listen, health_listen, reuse_port=reuse_port, setting="health_listen")
    calls = CallLimits(limits.max_calls, limits.slow_client_seconds)
    server = grpc.aio.server(
        interceptors=[
            calls,
            *([ObservingInterceptor(observers)] if observers else []),
            ErrorInterceptor(calls.check),
            *([gate] if gate else []),
        ],
        options=[
            ("grpc.so_reuseport", int(reuse_port)),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            *limits.server_options(),
            *_PINGS,
        ],
    )
    readiness = Readiness(service_names)
    await readiness.set(serving=False)
    register(server)
    health_pb2_grpc.add_HealthServicer_to_server(readiness.servicer, server)
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
        health_server = await _serve_health(health_listen, readiness, reuse_port) if health_listen else None
    except RuntimeError as error:
        await server.stop(None)
        raise InvalidArgument.of("listen", f"cannot listen on {listen}: is the address in use?") from error
    except InvalidArgument:
        await server.stop(None)
        raise
    return BoundServer(server, port, readiness, health_server)


async def _serve_health(listen: str, readiness: Readiness, reuse_port: bool) -> grpc.aio.Server:
    """Starts a server of Health alone. Raises InvalidArgument (field `health_listen`): the address is taken."""
    server = grpc.aio.server(
        interceptors=[CallLimits(_PROBING.max_calls, _PROBING.slow_client_seconds)],
        options=[("grpc.so_reuseport", int(reuse_port)), *_PROBING.server_options(), *_PINGS],
    )
    health_pb2_grpc.add_HealthServicer_to_server(readiness.servicer, server)
    try:
        server.add_insecure_port(listen)
    except RuntimeError as error:
        await server.stop(None)
        raise InvalidArgument.of("health_listen", f"cannot listen on {listen}: is the address in use?") from error
    await server.start()
    return server


def stop_on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set `stop`."""
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)


async def drain(bound: BoundServer, grace: float) -> None:
    """Ends a server in order: readiness off, no new calls, running calls have `grace` seconds, then they are cut."""
    bound.stopping.set()
    await bound.readiness.set(serving=False)
    await asyncio.sleep(_WATCH_FLUSH_SECONDS)
    bound.readiness.servicer.stopping.set()
    await bound.server.stop(grace)
    if bound.health is not None:
        await bound.health.stop(None)

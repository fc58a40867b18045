"""How a command calls a service, and what it says when no service of ours answered."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex.cli.identity import identity
from loraplex.cli.options import DEFAULT_REGISTRY, DEFAULT_SERVER
from loraplex.client import INFERENCE_SERVICE, REGISTRY_SERVICE, Client
from shared.channel import open_channel
from shared.errors import BY_REASON, LoraplexError

Result = TypeVar("Result")

_HEALTH_SECONDS = 5.0


def run(
    work: Callable[[Client], Awaitable[Result]],
    *,
    registry: str | None = None,
    server: str | None = None,
    timeout: float | None = None,
) -> Result:
    """Opens a client, does `work` with it, closes it.

    Args:
        registry: Address, if `work` calls the registry.
        server: Address, if `work` calls the inference service.
        timeout: What the user gave as --timeout, in seconds.

    Raises:
        LoraplexError: a call failed. If the answer came from no service of ours, it says what to look at.
    """

    async def session() -> Result:
        async with Client(server or DEFAULT_SERVER, registry or DEFAULT_REGISTRY, identity()) as client:
            try:
                return await work(client)
            except LoraplexError as error:
                if is_foreign(error):
                    error.message = await _explanation(error, registry, server, timeout)
                    error.retry_after = None  # the explanation says what to do
                raise

    return asyncio.run(session())


def is_foreign(error: LoraplexError) -> bool:
    """Whether gRPC or another program failed the call, not a service of ours."""
    return type(error) not in BY_REASON.values()


async def health(address: str, service: str) -> str:
    """`SERVING`, `NOT_SERVING`, `OTHER_SERVICE` if something else listens there, or the name of a gRPC code."""
    async with open_channel(address, identity()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_HEALTH_SECONDS)
        except grpc.aio.AioRpcError as error:
            is_other = error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)
            return "OTHER_SERVICE" if is_other else str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def _explanation(error: LoraplexError, registry: str | None, server: str | None, seconds: float | None) -> str:
    kind, address, service = (
        ("registry", registry, REGISTRY_SERVICE) if registry else ("inference", server, INFERENCE_SERVICE)
    )
    if error.code == "DEADLINE_EXCEEDED" and seconds is not None:
        return f"no complete answer within {seconds:g} s (--timeout)"
    if error.code not in ("UNAVAILABLE", "UNIMPLEMENTED") or address is None:
        return error.message
    state = "OTHER_SERVICE" if error.code == "UNIMPLEMENTED" else await health(address, service)
    match state:
        case "OTHER_SERVICE":
            return f"{address} speaks another service, not the {kind} service"
        case "NOT_SERVING":
            return f"the {kind} service at {address} is not ready: NOT_SERVING (try: loraplex status)"
        case "SERVING":
            return f"the connection to the {kind} service at {address} broke: {error.message}"
    if error.code == "UNAVAILABLE" and error.retry_after is None:
        return f"no TLS with the {kind} service at {address}: {error.message}"
    who = identity()
    tls = " or it speaks TLS: --ca;"
    if who.is_secure:
        tls = "" if who.cert else " or it wants a certificate: --cert and --key;"
    cause = error.message.rpartition("last error: ")[2]  # of gRPC: why the last of all addresses failed
    return f"no {kind} service answers at {address} (is it running and SERVING?{tls} try: loraplex status): {cause}"

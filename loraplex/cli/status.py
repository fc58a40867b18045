"""`loraplex status`: what both services say of themselves."""

import asyncio
from typing import Any

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex.cli.options import (
    DEFAULT_REGISTRY,
    DEFAULT_SERVER,
    Json,
    RegistryAddress,
    ServerAddress,
    as_dict,
    megabytes,
    print_json,
    print_table,
    run,
)
from loraplex.client import Client
from loraplex.inference.v1 import control_pb2, inference_pb2

_TIMEOUT = 5.0


def status(
    json: Json = False, registry: RegistryAddress = DEFAULT_REGISTRY, server: ServerAddress = DEFAULT_SERVER
) -> None:
    """Health of both services, the base model, and the adapters on the replica."""
    services = {
        "registry": (registry, "loraplex.registry.v1.AdapterRegistryService"),
        "inference": (server, "loraplex.inference.v1.InferenceService"),
    }
    health = asyncio.run(_healths(services))
    info: dict[str, Any] = {}
    loaded: list[control_pb2.LoadedAdapter] = []
    if health["inference"] == "SERVING":
        info, loaded = run(_replica, registry=registry, server=server)
    if json:
        print_json({"health": health, "model": info, "adapters": [as_dict(a) for a in loaded]})
    else:
        _print(services, health, info, loaded)
    if set(health.values()) != {"SERVING"}:
        raise typer.Exit(1)


def _print(
    services: dict[str, tuple[str, str]],
    health: dict[str, str],
    info: dict[str, Any],
    loaded: list[control_pb2.LoadedAdapter],
) -> None:
    print_table(("SERVICE", "ADDRESS", "HEALTH"), ((n, services[n][0], health[n]) for n in services))
    if info:
        typer.echo(f"\n{info['base_model']} ({info['architecture']}) on {info['device']}, {info['dtype']}\n")
        print_table(
            ("ADAPTER VERSION", "LEVEL", "RANK", "SIZE", "PINNED", "ACTIVE"),
            (
                (
                    a.adapter_version,
                    control_pb2.LoadedAdapter.Level.Name(a.level).removeprefix("LEVEL_"),
                    a.rank,
                    megabytes(a.size_bytes),
                    "yes" if a.pinned else "no",
                    a.active_requests,
                )
                for a in loaded
            ),
        )


async def _healths(services: dict[str, tuple[str, str]]) -> dict[str, str]:
    states = await asyncio.gather(*(_health(address, name) for address, name in services.values()))
    return dict(zip(services, states, strict=True))


async def _health(address: str, service: str) -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def _replica(client: Client) -> tuple[dict[str, Any], list[control_pb2.LoadedAdapter]]:
    info = await client.call(client.inference.GetModelInfo(inference_pb2.GetModelInfoRequest()))
    loaded: list[control_pb2.LoadedAdapter] = []
    token = ""
    while True:
        request = control_pb2.ListLoadedAdaptersRequest(page_size=200, page_token=token)
        page = await client.call(client.control.ListLoadedAdapters(request))
        loaded += page.adapters
        token = page.next_page_token
        if not token:
            return as_dict(info), loaded

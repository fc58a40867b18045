"""`loraplex status`: what both services say of themselves."""

import asyncio
from typing import Any

import typer

from loraplex.cli.calls import health, run
from loraplex.cli.options import DEFAULT_REGISTRY, DEFAULT_SERVER, Json, RegistryAddress, ServerAddress
from loraplex.cli.output import as_dict, megabytes, print_json, print_table, short_digest, short_version
from loraplex.client import INFERENCE_SERVICE, REGISTRY_SERVICE, Client
from loraplex.inference.v1 import control_pb2, inference_pb2


def status(
    json: Json = False, registry: RegistryAddress = DEFAULT_REGISTRY, server: ServerAddress = DEFAULT_SERVER
) -> None:
    """Health of both services, the base model, and the adapters on the replica. Exit status 1 unless both serve."""
    addresses = {"registry": registry, "inference": server}
    states = asyncio.run(_health(registry, server))
    info: dict[str, Any] = {}
    loaded: list[control_pb2.LoadedAdapter] = []
    if states["inference"] == "SERVING":
        info, loaded = run(_replica, server=server)
    if json:
        print_json({"health": states, "model": info, "adapters": [as_dict(a) for a in loaded]})
    else:
        print_table(("SERVICE", "ADDRESS", "HEALTH"), ((name, addresses[name], states[name]) for name in states))
        if info:
            _print_replica(info, loaded)
    if set(states.values()) != {"SERVING"}:
        raise typer.Exit(1)


def _print_replica(info: dict[str, Any], loaded: list[control_pb2.LoadedAdapter]) -> None:
    model = info["base_model"].removeprefix("baseModels/")
    typer.echo(f"\n{model} ({info['architecture']}) on {info['device']}, {info['dtype']}\n")
    print_table(
        ("ADAPTER", "LEVEL", "RANK", "SIZE", "PINNED", "ACTIVE"),
        (
            (
                short_version(a.adapter_version) or short_digest(a.digest),
                control_pb2.LoadedAdapter.Level.Name(a.level).removeprefix("LEVEL_"),
                a.rank,
                megabytes(a.size_bytes),
                "yes" if a.pinned else "no",
                a.active_requests,
            )
            for a in loaded
        ),
    )


async def _health(registry: str, server: str) -> dict[str, str]:
    states = await asyncio.gather(health(registry, REGISTRY_SERVICE), health(server, INFERENCE_SERVICE))
    return dict(zip(("registry", "inference"), states, strict=True))


async def _replica(client: Client) -> tuple[dict[str, Any], list[control_pb2.LoadedAdapter]]:
    info = await client.call(client.inference.GetModelInfo(inference_pb2.GetModelInfoRequest()))
    pages = client.pages(client.control.ListLoadedAdapters, control_pb2.ListLoadedAdaptersRequest())
    return as_dict(info), [adapter async for page in pages for adapter in page.adapters]

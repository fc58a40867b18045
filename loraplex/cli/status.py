"""`loraplex status`: what the registry and the replicas say of themselves, once or again every second."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from loraplex.cli.calls import health
from loraplex.cli.identity import advice, identity
from loraplex.cli.options import DEFAULT_REGISTRY, DEFAULT_SERVER, Json, RegistryAddress, ServerAddresses
from loraplex.cli.output import as_dict, print_json, print_table
from loraplex.cli.status_screen import on_screen
from loraplex.cli.status_view import Replica, Section, Snapshot, sections
from loraplex.client import INFERENCE_SERVICE, REGISTRY_SERVICE, Client
from loraplex.inference.v1 import control_pb2, inference_pb2
from shared.errors import LoraplexError

REFRESH_SECONDS = 1.0
CALL_SECONDS = 5.0  # after which a replica that does not answer is shown without figures


def status(
    once: Annotated[bool, typer.Option("--once", help="Print it once, as where there is no terminal.")] = False,
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
    server: ServerAddresses = [DEFAULT_SERVER],  # noqa: B006
) -> None:
    """Show what the registry and the replicas are doing. Again every second until Ctrl-C.

    Printed once, the exit status is 1 unless all of them serve.
    """
    if not (once or json) and sys.stdout.isatty():
        with contextlib.suppress(KeyboardInterrupt):  # the way to end it
            asyncio.run(_show_live(registry, server))
        return
    snapshot = asyncio.run(_once(registry, server))
    if json:
        print_json(_as_json(snapshot))
    else:
        _print(sections(snapshot))
    if set(snapshot.healths) != {"SERVING"}:
        raise typer.Exit(1)


def _print(parts: Sequence[Section]) -> None:
    for index, part in enumerate(parts):
        if index:
            typer.echo()
        if part.title:
            typer.echo(part.title)
        if part.rows:
            print_table(part.columns, part.rows)


async def _show_live(registry: str, servers: Sequence[str]) -> None:
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        async with _clients(servers) as clients:
            while True:
                snapshot = await _look(registry, clients)
                live.update(on_screen(sections(snapshot), console.width, console.height), refresh=True)
                await asyncio.sleep(REFRESH_SECONDS)


async def _once(registry: str, servers: Sequence[str]) -> Snapshot:
    async with _clients(servers) as clients:
        return await _look(registry, clients)


@contextlib.asynccontextmanager
async def _clients(servers: Sequence[str]) -> AsyncIterator[dict[str, Client]]:
    """A client for each replica, by address."""
    async with contextlib.AsyncExitStack() as stack:
        yield {server: await stack.enter_async_context(Client(server, identity=identity())) for server in servers}


async def _look(registry: str, clients: dict[str, Client]) -> Snapshot:
    registry_health, replicas = await asyncio.gather(
        health(registry, REGISTRY_SERVICE),
        asyncio.gather(*(_replica(address, client) for address, client in clients.items())),
    )
    return Snapshot(registry, registry_health, tuple(replicas))


async def _replica(address: str, client: Client) -> Replica:
    """Its health and, if it serves, all the rest."""
    state = await health(address, INFERENCE_SERVICE)
    if state != "SERVING":
        return Replica(address, state)
    try:
        async with asyncio.timeout(CALL_SECONDS):
            info = await client.call(client.inference.GetModelInfo(inference_pb2.GetModelInfoRequest()))
            pages = client.pages(client.control.ListLoadedAdapters, control_pb2.ListLoadedAdaptersRequest())
            adapters = [adapter async for page in pages for adapter in page.adapters]
            figures = await client.call(client.control.GetReplicaStatus(control_pb2.GetReplicaStatusRequest()))
            return Replica(address, state, info, figures, tuple(adapters))
    except TimeoutError:
        return Replica(address, "DEADLINE_EXCEEDED")
    except LoraplexError as error:
        told = advice(error)
        return Replica(address, error.code, problem=f"{error.summary}{told and f'; {told}'}")


def _as_json(snapshot: Snapshot) -> dict[str, object]:
    return {
        "registry": {"address": snapshot.registry, "health": snapshot.registry_health},
        "replicas": [
            {
                "address": replica.address,
                "health": replica.health,
                "problem": replica.problem,
                "model": as_dict(replica.model) if replica.model else None,
                "status": as_dict(replica.status) if replica.status else None,
                "adapters": [as_dict(adapter) for adapter in replica.adapters],
            }
            for replica in snapshot.replicas
        ],
    }

"""`loraplex adapter load` and `unload`: what one replica holds in memory."""

from typing import Annotated

import typer
from rich.console import Console

from loraplex.cli.calls import run
from loraplex.cli.names import qualified
from loraplex.cli.options import DEFAULT_SERVER, Json, LoadedArgument, ReferenceArgument, ServerAddress
from loraplex.cli.output import megabytes, print_json, short_version
from loraplex.inference.v1 import control_pb2

console = Console(stderr=True)


def add_commands(app: typer.Typer) -> None:
    """Adds the two commands to `app`."""
    app.command()(load)
    app.command()(unload)


def load(
    reference: ReferenceArgument,
    pin: Annotated[
        bool,
        typer.Option(
            "--pin", help="Never evict it until it is unloaded or the engine restarts. Without it, a pin it has stays."
        ),
    ] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return before it is ready.")] = False,
    json: Json = False,
    server: ServerAddress = DEFAULT_SERVER,
) -> None:
    """Load an adapter on one replica, ahead of its requests."""
    request = control_pb2.LoadAdapterRequest(reference=qualified(reference), pinned=pin, wait=not no_wait)
    with console.status("loading"):
        response = run(lambda c: c.call(c.control.LoadAdapter(request)), server=server)
    if json:
        return print_json(response.adapter)
    loaded = response.adapter
    verb = "loading" if no_wait else "loaded"
    pinned = ", pinned" if loaded.pinned else ""
    return typer.echo(f"{verb}: {short_version(loaded.adapter_version)} {megabytes(loaded.size_bytes)}{pinned}")


def unload(
    reference: LoadedArgument,
    force: Annotated[bool, typer.Option("--force", help="End its requests instead of waiting for them.")] = False,
    json: Json = False,
    server: ServerAddress = DEFAULT_SERVER,
) -> None:
    """Unload an adapter from one replica. Returns when its memory is free.

    Adapters with the same content share it, so it is taken from all of them.
    """
    request = control_pb2.UnloadAdapterRequest(adapter=qualified(reference), force=force)
    with console.status("draining"):
        response = run(lambda c: c.call(c.control.UnloadAdapter(request)), server=server)
    if json:
        return print_json(response)
    freed = [(response.device_bytes, "device"), (response.host_bytes, "host memory")]
    where = [f"{megabytes(size)} of {place}" for size, place in freed if size]
    typer.echo(f"unloaded: {reference}, freed: {', '.join(where) or 'nothing'}")
    if where and response.shared_with:
        others = ", ".join(map(short_version, response.shared_with))
        typer.echo(f"also unloaded, for it is the same content: {others}")
    if response.comes_back:
        typer.echo("it comes back, for its residency is pinned: loraplex adapter update NAME --residency on-demand")
    return None

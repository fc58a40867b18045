"""`loraplex`: run the services, manage adapters, generate."""

import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from shared.grpc_environment import grpc_environment

os.environ.update(grpc_environment())  # read when gRPC is imported; `registry` serves in this process

from loraplex.cli import (
    adapter,
    adapter_aliases,
    adapter_convert,
    adapter_import,
    adapter_memory,
    adapter_update,
    adapter_watch,
    apply,
    base_model,
    bench,
    generate,
    replicas,
    servers,
    status,
)
from loraplex.cli.identity import Ca, Cert, Key, OwnNamespace, Token, TokenFile, advice, set_identity
from shared.channel import ClientIdentity
from shared.errors import LoraplexError

_SERVED = "served_"  # what a replica has of its own, in the metadata of an error

app = typer.Typer(
    name="loraplex",
    help="Serve many LoRA adapters over one base model.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
adapter_update.add_commands(adapter.app)
adapter_aliases.add_commands(adapter.app)
adapter_import.add_commands(adapter.app)
adapter_memory.add_commands(adapter.app)
adapter_watch.add_commands(adapter.app)
adapter_convert.add_commands(adapter.app)
app.add_typer(adapter.app, name="adapter")
app.add_typer(base_model.app, name="base-model")
servers.add_commands(app)
app.command("apply")(apply.apply)
app.command("generate")(generate.generate)
app.command("replicas")(replicas.replicas)
app.command("status")(status.status)
app.command("bench")(bench.bench)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"loraplex {version('loraplex')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    is_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    token: Token = "",
    token_file: TokenFile = "",
    ca: Ca = "",
    cert: Cert = "",
    key: Key = "",
    namespace: OwnNamespace = "",
) -> None:
    set_identity(ClientIdentity(token, token_file, ca, cert, key), namespace)
    _print_help_if_alone(context)


@adapter.app.callback(invoke_without_command=True)
@base_model.app.callback(invoke_without_command=True)
def _print_help_if_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits.

    The status is 0, 1 for a failed call (one line says why, further ones give facts that it does not), 2 for wrong
    usage, 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a narrow locale is no reason to lose an answer
    if (wrong := _not_text(arguments)) is not None:
        print(f"Error: {wrong} is not UTF-8 text", file=sys.stderr)
        sys.exit(2)
    try:
        app(args=arguments, prog_name="loraplex")
    except LoraplexError as error:
        print(_explain(error), file=sys.stderr)
        sys.exit(1)


def _not_text(arguments: Sequence[str]) -> str | None:
    """The first argument that has bytes which are no UTF-8, after the option before it if there is one."""
    for before, argument in zip(("", *arguments), arguments, strict=False):
        if any("\ud800" <= character <= "\udfff" for character in argument):
            return f"{before} {argument!r}" if before.startswith("-") else repr(argument)
    return None


def _explain(error: LoraplexError) -> str:
    lines = [error.summary]
    lines += [f"  {key}: {error.metadata[key]}" for key in sorted(error.metadata) if _is_worth_telling(key, error)]
    if told := advice(error):
        lines.append(f"  {told}")
    if error.retry_after is not None:
        lines.append(f"  retry after {error.retry_after:g} s")
    return "\n".join(lines)


def _is_worth_telling(key: str, error: LoraplexError) -> bool:
    """Whether a fact says more than the message. Of what a replica has otherwise than the registry, both are told, and
    nothing of what it has alike."""
    metadata, registered = error.metadata, key.removeprefix(_SERVED)
    if key != registered or f"{_SERVED}{key}" in metadata:
        return registered in metadata
    return metadata[key] not in error.message


if __name__ == "__main__":
    main()

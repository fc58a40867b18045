"""`loraplex adapter convert`: repair an adapter that was trained against a modified base model."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from loraplex.cli.adapter import register
from loraplex.cli.options import DEFAULT_REGISTRY, RegistryAddress, parsed_adapter
from shared.base_model import default_id
from shared.errors import FailedPrecondition, InvalidArgument, LoraplexError, SourceNotFound

console = Console(stderr=True)


def add_commands(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("convert")(convert)


def convert(
    folder: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder of the adapter, as PEFT saved it.")],
    base: Annotated[str, typer.Option(help="Folder of the base model that it was trained on, on this machine.")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    register_as: Annotated[
        str, typer.Option("--register", metavar="ADAPTER", help="Register the result as a version of this adapter.")
    ] = "",
    source: Annotated[str, typer.Option(help="What --register calls OUT: file://ROOT/path.")] = "",
    base_model: Annotated[str, typer.Option(help="Base model id for --register; the name of BASE by default.")] = "",
    alias: Annotated[list[str], typer.Option(help="Point this alias at the version; repeatable.")] = [],  # noqa: B006
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Make a plain LoRA of a PiSSA, OLoRA or KaSA adapter. It has twice the rank and the same results.

    These count from base weights out of which something was taken before training, and are refused as they are.
    """
    # Imported here because numpy takes a tenth of a second that no other command needs.
    from loraplex.convert.conversion import convert as convert_folder

    if register_as:
        parsed_adapter(register_as)
    if bool(register_as) != bool(source):
        raise typer.BadParameter("--register and --source need each other", param_hint="--register")
    _check_base(base)
    base_id = base_model or default_id(os.path.realpath(base))
    command = _register_command(register_as, base_id, source, alias, registry) if register_as else ""
    _check_out(out, command)
    _check_source(folder)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("linears", total=None)
        try:
            found = convert_folder(
                Path(folder), Path(base), out, lambda done, of: progress.update(task, completed=done, total=of)
            )
        except OSError as error:
            raise FailedPrecondition(f"{error.filename or folder}: {error.strerror or error}") from error
    typer.echo(f"converted: {out} {found.method}, {found.num_modules} linears, rank {found.rank}")
    for warning in found.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if register_as:
        try:
            register(register_as, base_id, source, alias, [], registry=registry)
        except LoraplexError:
            typer.echo(f"{out} is converted and not registered; for that alone: {command}", err=True)
            raise


def _register_command(adapter: str, base_id: str, source: str, aliases: list[str], registry: str) -> str:
    """What registers OUT, for the shell."""
    words = ["loraplex", "adapter", "register", adapter, "--base-model", base_id, "--source", source]
    words += [word for alias in aliases for word in ("--alias", alias)]
    return shlex.join([*words, *(("--registry", registry) if registry != DEFAULT_REGISTRY else ())])


def _check_out(out: Path, command: str) -> None:
    """Raises InvalidArgument if it is there, as after a run that could not register it. `command` would."""
    if os.path.exists(out):  # noqa: PTH110  # Path.exists raises for a name that is too long
        done = command or "use it as it is"
        raise InvalidArgument.of("out", f"{out} exists already; choose another --out, or if it is converted: {done}")


def _check_source(folder: str) -> None:
    """Raises SourceNotFound for what is no folder here, in the words of who named it."""
    if not os.path.isdir(folder):  # noqa: PTH112  # Path.is_dir raises for a name that is too long
        problem = f"{folder} is not a folder on this machine; download the adapter first"
        raise SourceNotFound(problem, metadata={"source": folder})


def _check_base(base: str) -> None:
    """Raises typer.BadParameter unless a base model may lie there."""
    if os.path.isfile(os.path.join(base, "config.json")):  # noqa: PTH113, PTH118  # as above
        return
    problem = "holds no config.json" if os.path.isdir(base) else "is not a folder on this machine"  # noqa: PTH112
    message = f"{base} {problem}; give the local folder of the base model, a Hub id is not downloaded"
    raise typer.BadParameter(message, param_hint="--base")

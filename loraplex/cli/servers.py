"""`loraplex registry` and `loraplex serve`: the servers themselves, with their own flags."""

import sys
from typing import Annotated

import typer

from shared.errors import FailedPrecondition

_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_commands(app: typer.Typer) -> None:
    """Adds the two server commands to `app`."""
    app.command("registry", context_settings=_PASS_THROUGH, add_help_option=False)(registry)
    app.command("serve", context_settings=_PASS_THROUGH, add_help_option=False)(serve)


def registry(
    context: typer.Context, arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None
) -> None:
    """Run the registry, or migrate, export or restore its database. `--help` lists its flags and commands."""
    from registry_service.__main__ import main

    sys.exit(main([*(arguments or []), *context.args]))


def serve(context: typer.Context, arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
    """Run the inference service. `--help` lists its flags."""
    try:
        from inference_service.__main__ import main
    except ImportError as error:
        raise FailedPrecondition(f"{error.name} is missing: pip install 'loraplex[inference]'") from error
    sys.exit(main([*(arguments or []), *context.args]))

"""`loraplex`: run the services, manage adapters, generate."""

import sys

import typer

from loraplex.cli import adapter, apply, base_model, bench, generate, servers, status
from shared.errors import LoraplexError

app = typer.Typer(
    name="loraplex",
    help="Serve many LoRA adapters over one base model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(adapter.app, name="adapter")
app.add_typer(base_model.app, name="base-model")
servers.add_commands(app)
app.command("apply")(apply.apply)
app.command("generate")(generate.generate)
app.command("status")(status.status)
app.command("bench")(bench.bench)


def main() -> None:
    """Runs the command line. A failed call prints one line, its reason and facts, and exits with 1."""
    try:
        app()
    except LoraplexError as error:
        print(_explain(error), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _explain(error: LoraplexError) -> str:
    lines = [error.summary]
    lines += [f"  {key}: {value}" for key, value in sorted(error.metadata.items())]
    if error.retry_after is not None:
        lines.append(f"  retry after {error.retry_after:g} s")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""`python -m registry_service [serve | migrate | export | restore | new-epoch] [--config FILE] [flags]`.

The flags are fields of `RegistryConfig`.
"""

import argparse
import asyncio
import gc
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from shared.grpc_environment import grpc_environment

if __name__ == "__main__":
    os.environ.update(grpc_environment())  # read when gRPC is imported

import uvloop

from registry_service import archive, migrations
from registry_service.config import ENV_PREFIX, RegistryConfig
from registry_service.migrations.revisions import SchemaOutdated
from registry_service.server import start
from shared import log as json_log
from shared.config import ConfigError, load
from shared.errors import InvalidArgument, LoraplexError, one_line
from shared.flags import flag_parser, startup_error
from shared.grpc_server import stop_on_signals
from shared.line_writer import LineWriter
from shared.process_end import end_process
from shared.standard_streams import fill_standard_streams

log = logging.getLogger(__name__)

FULL_COLLECTIONS_SELDOM = 1_000  # one for so many middle ones; Python's own is 10
EXIT_CONFIG = 2  # starting again cannot help
PROG = "loraplex registry"
SERVE = f"Run the registry of LoRA adapters (`{PROG}` and `{PROG} serve` are the same)."
ON_DATABASE = {
    "migrate": "Bring the database to the schema of this version. `serve` does it for SQLite, and never for Postgres.",
    "export": "Write everything that was registered to standard output, as JSON lines.",
    "restore": "Fill an empty database with an export on standard input. Watches of the exported one begin anew.",
    "new-epoch": "Make watches begin anew. Run it on a database restored from a backup, before registries start.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the registry until SIGTERM or SIGINT, or migrates its database; the exit status.

    What prevents a start is one line on standard error; the status is then 2 if the settings are wrong and else 1.
    """
    fill_standard_streams()
    command, flags = _parse(list(sys.argv[1:] if arguments is None else arguments))
    toml = flags.pop("config")
    with json_log.open_lines("registry", 2) as errors:
        status, failure = _run(command, toml, flags, errors)
        if failure:
            errors.write(f"{failure}\n")
    return status


def _run(command: str, toml: Path | None, flags: dict[str, Any], errors: LineWriter) -> tuple[int, str]:
    """The exit status, and the line that says why if it is a failure."""
    json_log.setup("registry", lines=errors)
    try:
        config = load(RegistryConfig, toml=toml, env=os.environ, prefix=ENV_PREFIX, flags=flags)
        json_log.setup("registry", config.log_level, errors)
        if command == "migrate":
            migrations.upgrade(config.database)
            log.info("the database is migrated")
        elif command == "export":
            log.info("exported", extra={"rows": archive.export(config.database, _open(sys.stdout, "output"))})
        elif command == "restore":
            log.info("restored", extra={"rows": archive.restore(config.database, _open(sys.stdin, "input"))})
        elif command == "new-epoch":
            log.info("the database has a new epoch", extra={"epoch": migrations.new_epoch(config.database)})
        else:
            uvloop.run(serve(config))
    except (ConfigError, InvalidArgument) as error:
        return EXIT_CONFIG, startup_error(error, RegistryConfig)
    except LoraplexError as error:
        return 1, startup_error(error, RegistryConfig)
    except (SchemaOutdated, OSError) as error:
        return 1, f"error: {one_line(str(error))}"
    return 0, ""


def _open(stream: TextIO | None, name: str) -> TextIO:
    """A standard stream that the command works on. Raises OSError if the process was started without it."""
    if stream is None:
        raise OSError(f"standard {name} is closed")
    return stream


async def serve(config: RegistryConfig) -> None:
    """Serves until a signal, then drains."""
    stop = asyncio.Event()
    stop_on_signals(stop)
    running = await start(config)
    _collect_garbage_seldom()
    await stop.wait()
    log.info("the registry drains")
    await running.stop(config.drain_grace)
    log.info("the registry has stopped")


def _collect_garbage_seldom() -> None:
    """Full collections look at every cached adapter, 0.1 s for 4,000 of them, which answers would wait for.

    What dies young is collected as ever; adapters that leave the cache are in no cycle and need no collection.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTIONS_SELDOM)


def _parse(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The command, which comes first or not at all, and its flags."""
    command = arguments[0] if arguments and arguments[0] in ("serve", *ON_DATABASE) else ""
    return command or "serve", vars(_parser(command).parse_args(arguments[bool(command) :]))


def _parser(command: str) -> argparse.ArgumentParser:
    if command in ON_DATABASE:
        return flag_parser(RegistryConfig, f"{PROG} {command}", ON_DATABASE[command], names=("database", "log_level"))
    also = "" if command else f" Commands for its database: {', '.join(f'{PROG} {each}' for each in ON_DATABASE)}."
    return flag_parser(RegistryConfig, f"{PROG} {command}".rstrip(), SERVE + also)


if __name__ == "__main__":
    end_process(main())

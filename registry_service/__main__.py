"""`python -m registry_service [migrate] [--config FILE] [flags]`; the flags are the fields of `RegistryConfig`."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence

import uvloop

from registry_service import migrations
from registry_service.config import ENV_PREFIX, RegistryConfig
from registry_service.server import start
from shared import log as json_log
from shared.config import ConfigError, load
from shared.errors import LoraplexError
from shared.flags import flag_parser
from shared.grpc_server import stop_on_signals

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the registry until SIGTERM or SIGINT, or migrates its database. The exit status."""
    flags = vars(_parser().parse_args(arguments))
    command, toml = flags.pop("command"), flags.pop("config")
    json_log.setup("registry")
    try:
        config = load(RegistryConfig, toml=toml, env=os.environ, prefix=ENV_PREFIX, flags=flags)
        json_log.setup("registry", config.log_level)
        if command == "migrate":
            migrations.upgrade(config.database)
            log.info("the database is migrated")
        else:
            uvloop.run(serve(config))
    except (ConfigError, migrations.SchemaOutdated, LoraplexError) as error:
        log.error("the registry cannot start: %s", error)
        return 1
    return 0


async def serve(config: RegistryConfig) -> None:
    """Serves until a signal, then drains."""
    stop = asyncio.Event()
    stop_on_signals(stop)
    running = await start(config)
    await stop.wait()
    log.info("the registry drains")
    await running.stop(config.drain_grace)
    log.info("the registry has stopped")


def _parser() -> argparse.ArgumentParser:
    parser = flag_parser(RegistryConfig, "loraplex registry", "The registry of LoRA adapters.")
    parser.add_argument("command", nargs="?", choices=["serve", "migrate"], default="serve")
    return parser


if __name__ == "__main__":
    sys.exit(main())

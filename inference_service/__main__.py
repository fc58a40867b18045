"""`python -m inference_service`: one replica. Its flags are the fields of `InferenceConfig`."""

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference_service.adapters.host_arena import create_host_arena
from inference_service.config import ENV_PREFIX, EXIT_CONFIG, InferenceConfig, parse_size
from inference_service.launch import child_specs, find_base_model, make_run_folder
from inference_service.supervisor import Supervisor
from shared import log
from shared.config import ConfigError, Option, load, options
from shared.errors import InvalidArgument, LoraplexError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a replica until SIGTERM or SIGINT; the exit code. What prevents a start is one line on standard error."""
    toml, flags = parse_arguments(argv)
    try:
        config = load(InferenceConfig, toml=toml, env=os.environ, prefix=ENV_PREFIX, flags=flags)
        log.setup("inference-supervisor", config.log_level)
        check_ports(config)
        return run(config)
    except ConfigError as error:
        return _report(str(error), EXIT_CONFIG)
    except LoraplexError as error:
        return _report(f"{error.reason}: {error.message}", EXIT_CONFIG if isinstance(error, InvalidArgument) else 1)


def run(config: InferenceConfig) -> int:
    """Start the processes and keep them running. Raises LoraplexError if the model cannot be served."""
    base = find_base_model(config)
    run_folder = make_run_folder()
    try:
        specs = child_specs(config, base, run_folder, create_host_arena(parse_size(config.host_memory)))
        supervisor = Supervisor(specs)
        code = asyncio.run(supervisor.run())
    finally:
        shutil.rmtree(run_folder, ignore_errors=True)
    return code if supervisor.failure is None else _report(supervisor.failure, code)


def check_ports(config: InferenceConfig) -> None:
    """Several processes can share a port only if it is known. Raises InvalidArgument."""
    if config.api_processes > 1 and config.listen.endswith(":0"):
        raise InvalidArgument.of("listen", "port 0 needs api_processes = 1: each process would get another port")


def parse_arguments(argv: Sequence[str] | None) -> tuple[Path | None, dict[str, Any]]:
    """The TOML file, and the flags that were given."""
    parser = argparse.ArgumentParser(prog="loraplex serve", description="Serve one base model and its adapters.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the same settings")
    for option in options(InferenceConfig):
        _add(parser, option)
    flags = vars(parser.parse_args(argv))
    return flags.pop("config"), flags


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    """One flag. Values stay text: `load` reads them, so that all wrong ones are reported together."""
    default = "" if option.default in (None, {}) or option.repeated else f" [{option.default}]"
    settings: dict[str, Any] = {"dest": option.name, "default": None, "help": option.help}
    if option.kind is bool:
        parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, **settings)
        return
    settings["metavar"] = "|".join(option.choices) or ("NAME=VALUE" if option.mapping else option.kind.__name__.upper())
    settings["action"] = "append" if option.repeated else "store"
    is_required = not isinstance(option.default, str | int | float | Path | dict | tuple | None)
    settings["help"] += " (required)" if is_required else default.replace("%", "%%")
    parser.add_argument(option.flag, **settings)


def _report(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

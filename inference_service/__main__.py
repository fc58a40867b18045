"""`python -m inference_service`: one replica. Its flags are the fields of `InferenceConfig`."""

import asyncio
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from inference_service.adapters.host_arena import create_host_arena
from inference_service.child import Outlets
from inference_service.config import ENV_PREFIX, InferenceConfig, parse_size
from inference_service.launch import addresses, child_specs, engine_config, find_base_model
from inference_service.machine_checks import check_machine
from inference_service.metrics import ReplicaCollector
from inference_service.metrics_feed import ReplicaFeed
from inference_service.run_folder import run_folder
from inference_service.setting_checks import check_settings
from inference_service.supervisor import HangPolicy, Supervisor
from inference_service.types import EXIT_CONFIG
from shared import log
from shared.adapter_format.texts import TOKENIZER
from shared.auth.open_access import warn_of_open_access
from shared.config import ConfigError, load
from shared.errors import InvalidArgument, LoraplexError
from shared.flags import flag_parser, startup_error
from shared.listening import check_ports
from shared.metrics import MetricsServer
from shared.standard_streams import fill_standard_streams

logger = logging.getLogger(__name__)

_SERVICE = "inference-supervisor"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a replica until SIGTERM or SIGINT; the exit code. What prevents a start is one line on standard error."""
    fill_standard_streams()
    flags = vars(
        flag_parser(InferenceConfig, "loraplex serve", "Serve one base model and its adapters.").parse_args(argv)
    )
    toml = flags.pop("config")
    with log.open_lines(_SERVICE, 1) as output, log.open_lines(_SERVICE, 2) as errors:
        try:
            config = load(InferenceConfig, toml=toml, env=os.environ, prefix=ENV_PREFIX, flags=flags)
            log.setup(_SERVICE, config.log_level, errors)
            _check_ports(config)
            warn_of_open_access(config, config.listen)
            code, failure = run(config, Outlets(output, errors))
        except (ConfigError, InvalidArgument) as error:
            code, failure = EXIT_CONFIG, startup_error(error, InferenceConfig)
        except LoraplexError as error:
            code, failure = 1, startup_error(error, InferenceConfig)
        if failure:
            errors.write(f"{failure}\n")
    return code


def run(config: InferenceConfig, outlets: Outlets) -> tuple[int, str]:
    """Start the processes and keep them running; the exit code, and the line that says why if it is a failure.

    Raises:
        LoraplexError: the model cannot be served.
    """
    base = find_base_model(config)
    check_machine(config, base.device)
    check_settings(config, base, engine_config(config, base))
    if not (base.folder / TOKENIZER).is_file():
        logger.warning("the model has no %s: texts and chats are refused, requests must send token_ids", TOKENIZER)
    host_arena = _host_arena(config)
    with run_folder() as folder, _feed(config, base.model_id, folder) as feed:
        asks = {"engine": feed.ask_engine, "adapters": feed.ask_adapters}
        hangs = HangPolicy(_hang_timeout(config, base.device), asks)
        supervisor = Supervisor(child_specs(config, base, folder, host_arena), outlets, observer=feed, hangs=hangs)
        feed.ask_api = partial(supervisor.answers, "api")
        code = asyncio.run(supervisor.run())
    return code, "" if supervisor.failure is None else f"error: {supervisor.failure}"


def _hang_timeout(config: InferenceConfig, device: str) -> float:
    """Seconds; far above the longest step."""
    if config.hang_timeout is not None:
        return config.hang_timeout
    return 60.0 if device == "cuda" else 300.0


@contextmanager
def _feed(config: InferenceConfig, model_id: str, folder: Path) -> Iterator[ReplicaFeed]:
    """What asks the processes how they are, and the server that shows it as metrics, if these are wanted."""
    feed = ReplicaFeed(model_id, config.max_adapters, *addresses(folder))
    if not config.metrics_listen:
        yield feed
        return
    server = MetricsServer(config.metrics_listen, ReplicaCollector(lambda: feed.snapshot))
    logger.info("metrics", extra={"port": server.port})
    try:
        yield feed
    finally:
        server.close()


def _host_arena(config: InferenceConfig) -> int:
    try:
        return create_host_arena(parse_size(config.host_memory))
    except (OSError, OverflowError) as error:
        raise InvalidArgument.of("host_memory", f"{config.host_memory} cannot be had: {error}") from error


def _check_ports(config: InferenceConfig) -> None:
    """Several processes can share a port only if it is known, and nobody else may have it. Raises InvalidArgument."""
    of_processes = {"listen": config.listen, "health_listen": config.health_listen}
    are_several = config.api_processes > 1
    for setting, address in of_processes.items():
        if are_several and address.endswith(":0"):
            raise InvalidArgument.of(setting, "port 0 needs --api-processes 1: each process would get another port")
    sharing = of_processes.keys() if are_several else ()
    check_ports({**of_processes, "metrics_listen": config.metrics_listen}, sharing)


if __name__ == "__main__":
    sys.exit(main())

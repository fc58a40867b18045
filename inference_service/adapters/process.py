"""The adapter process: what it consists of, its start and its end.

Started as `python -m inference_service.adapters.process` with one line of JSON (`AdapterProcessStart`) on standard
input; the end of standard input means that the parent died. SIGTERM ends it cleanly, SIGINT is the parent's business.
"""

import asyncio
import hashlib
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import uvloop
import zmq
import zmq.asyncio

from inference_service.adapters.base_tensors import BaseTensors
from inference_service.adapters.config import AdapterProcessConfig, AdapterProcessStart
from inference_service.adapters.disk_cache import DiskCache
from inference_service.adapters.dora import GainCache
from inference_service.adapters.engine_port import EnginePort
from inference_service.adapters.fetcher import Fetcher
from inference_service.adapters.host_arena import map_host_arena
from inference_service.adapters.loader import AdapterLoader
from inference_service.adapters.registration import BaseModelFacts
from inference_service.adapters.registry_client import RegistryClient
from inference_service.adapters.replica_report import ReplicaReporter
from inference_service.adapters.residency import Residency
from inference_service.adapters.resolution import BaseModelIdentity
from inference_service.adapters.saved_answers import SavedAnswers
from inference_service.adapters.server import AdapterServer
from inference_service.adapters.staging import PER_TENANT, Packing, Tiers, Workers
from inference_service.adapters.store import HostStore
from inference_service.types import EXIT_CONFIG, READY_LINE
from shared import log as logs
from shared.base_model import ModelConfig, fingerprint, parse_config
from shared.errors import InvalidArgument, LoraplexError
from shared.model_folder import read_json_object
from shared.sources.policy import SourcePolicy
from shared.tracing import start_tracing

log = logging.getLogger(__name__)

NUM_FETCHERS = 3 * PER_TENANT  # most wait for their sources
MAX_PACKERS = 4  # threads that read and hash; as many more lay out
_MAX_QUEUED = 100_000


async def serve(start: AdapterProcessStart, stop: asyncio.Event) -> None:
    """Run the adapter process until `stop` is set.

    Raises:
        InvalidArgument: the model's config.json cannot be used.
        OSError, zmq.ZMQError: the cache folder, the arena or the address cannot be used.
    """
    folder = Path(start.config.model_folder)
    raw_config = read_json_object(folder / "config.json")
    base_model = BaseModelIdentity(start.config.base_model, fingerprint(raw_config))
    tracing = start_tracing(start.config.otlp_endpoint, "loraplex-inference", "adapters")
    registry = RegistryClient(
        start.config.registry,
        base_model,
        identity=start.config.registry_identity,
        max_stale=start.config.max_stale,
        interceptors=tracing.client_interceptors() if tracing else (),
        saved=_saved_answers(start.config, base_model),
    )
    loop = asyncio.get_running_loop()
    async with _loader(start, registry) as loader, _router(start.address) as socket:
        engine = EnginePort(start.engine_address) if start.engine_address else None
        residency = Residency(loader, engine) if engine else None
        tasks = [
            loop.create_task(AdapterServer(socket, loader, residency, tracing).run()),
            loop.create_task(registry.keep_registered(_facts(start.config, base_model))),
            loop.create_task(registry.keep_watching(residency)),
        ]
        if residency is not None:
            tasks.append(loop.create_task(residency.run()))
        if residency is not None and start.config.replica:
            reporter = ReplicaReporter(start.config.replica, base_model.id, residency, registry.report)
            tasks.append(loop.create_task(reporter.run()))
        print(READY_LINE, flush=True)
        stopping = loop.create_task(stop.wait())
        done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in (*tasks, stopping):
            task.cancel()
        await asyncio.gather(*tasks, stopping, return_exceptions=True)
        if engine is not None:
            await engine.close()
        await registry.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
        for task in done:
            task.result()


def _saved_answers(config: AdapterProcessConfig, base_model: BaseModelIdentity) -> SavedAnswers:
    """Those of this registry for this base model with these weights. Raises OSError if they have no place."""
    folder = Path(config.cache_dir) / "answers"
    folder.mkdir(parents=True, exist_ok=True)
    whose = hashlib.sha256("\n".join((config.registry, *base_model, config.weights_fingerprint)).encode()).hexdigest()
    return SavedAnswers(folder / f"{whose[:32]}.sqlite")


@asynccontextmanager
async def _loader(start: AdapterProcessStart, registry: RegistryClient) -> AsyncIterator[AdapterLoader]:
    config = start.config
    model = parse_config(read_json_object(Path(config.model_folder) / "config.json"))
    cache = DiskCache(Path(config.cache_dir), config.disk_bytes)
    roots = {name: Path(folder) for name, folder in config.file_roots.items()}
    policy = SourcePolicy(roots, config.credentials, config.allowed_sources, config.allowed_endpoints)
    fetcher = Fetcher(cache, policy)
    arena = map_host_arena(start.host_arena_fd)
    num_packers = min(MAX_PACKERS, os.cpu_count() or 1)
    workers = Workers(
        ThreadPoolExecutor(NUM_FETCHERS, "fetch"),
        ThreadPoolExecutor(num_packers, "pack"),
        ThreadPoolExecutor(num_packers, "layout"),
    )
    try:
        yield AdapterLoader(
            registry,
            fetcher,
            Tiers(cache, HostStore(len(arena)), arena, config.device_bytes),
            Packing(model, config.dtype, _base_tensors(config, model), GainCache(Path(config.cache_dir) / "gains")),
            workers,
            is_arena_free=not start.wait_for_engine,
        )
    finally:
        fetcher.close()
        for pool in workers:
            pool.shutdown(wait=True, cancel_futures=True)
        cache.close()


def _base_tensors(config: AdapterProcessConfig, model: ModelConfig) -> BaseTensors | None:
    if not config.has_weights:
        return None
    return BaseTensors(Path(config.model_folder), model, config.dtype, config.weights_fingerprint)


@asynccontextmanager
async def _router(address: str) -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted peer takes over its identity
    socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
    socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
    try:
        socket.bind(address)
        yield socket
    finally:
        socket.close()
        context.term()


def _facts(config: AdapterProcessConfig, base_model: BaseModelIdentity) -> BaseModelFacts:
    text = Path(config.model_folder, "config.json").read_text()
    return BaseModelFacts(base_model.id, text, base_model.fingerprint, config.weights_fingerprint)


async def _run(start: AdapterProcessStart) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def watch_parent() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=watch_parent, daemon=True).start()
    await serve(start, stop)


def main() -> int:
    """Entry point; the exit status is 0 after SIGTERM or the parent's end, 2 if a new start cannot help, else 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=AdapterProcessStart)
    logs.setup("adapters", start.config.log_level)
    try:
        uvloop.run(_run(start))
    except (LoraplexError, OSError, zmq.ZMQError) as error:
        log.error("the adapter process ends: %s", error)
        return EXIT_CONFIG if isinstance(error, InvalidArgument) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""An API process: gRPC in front of one engine and one adapter process. Composition root and entry point.

Its first line of standard input is an `ApiStart`; further lines are events of the supervisor, which closes the pipe
only by dying. SIGTERM drains.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import uvloop

from inference_service import control_servicer, servicer
from inference_service.adapters.client import AdapterClient
from inference_service.availability import Availability
from inference_service.child import failure_line
from inference_service.config import ApiStart
from inference_service.control_servicer import ControlServicer
from inference_service.engine.client import EngineClient
from inference_service.request_log import write_line
from inference_service.request_measures import RequestMeasures
from inference_service.request_record import Reader, RequestJournal
from inference_service.request_spans import add_spans
from inference_service.request_stats import RequestMeter, keep_reporting
from inference_service.served_model import ServedModel, load_served_model
from inference_service.servicer import InferenceServicer
from inference_service.texts import AdapterTexts
from inference_service.token_rates import TokenRates
from inference_service.types import ALIVE_LINE, EXIT_CONFIG, READY_LINE, EngineReady
from loraplex.inference.v1.control_pb2_grpc import add_AdapterControlServiceServicer_to_server
from loraplex.inference.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from shared import log as log_setup
from shared.auth.gate import AccessGate
from shared.auth.settings import AccessSettings
from shared.auth.tenant_calls import TenantCalls
from shared.call_observers import CallObserver
from shared.errors import EngineUnavailable, InvalidArgument, LoraplexError
from shared.grpc_server import BoundServer, create_server, drain
from shared.limits import USUAL_LIMITS, LimitSettings
from shared.rates import TenantBuckets
from shared.tracing import start_metrics, start_tracing

log = logging.getLogger(__name__)

SERVICE_NAMES = ("loraplex.inference.v1.InferenceService", "loraplex.inference.v1.AdapterControlService")
_RETRY_HELLO_SECONDS = 0.05
_LAST_WORDS_SECONDS = 1.0
_NOTICE_SECONDS = 0.2  # in which clients that check health hear NOT_SERVING and send no more


class Event(msgspec.Struct, frozen=True):
    """What an API process is told later."""

    event: str


class Engine(servicer.Engine, control_servicer.Engine, Protocol):
    """`engine.client.EngineClient`, as far as an API process uses it."""

    async def hello(self) -> EngineReady: ...
    async def wait_down(self) -> None: ...
    def engine_down(self) -> None: ...


class Adapters(servicer.Adapters, control_servicer.Adapters, Protocol):
    """`adapters.client.AdapterClient`, as far as an API process uses it."""


@dataclass
class ApiServer:
    """A started API server. `port` is the one it listens on."""

    bound: BoundServer
    availability: Availability
    engine: Engine
    texts: AdapterTexts
    following: asyncio.Task[None]

    @property
    def port(self) -> int:
        return self.bound.port

    async def stop(self, grace: float) -> None:
        """Drain: refuse new requests with DRAINING, give running ones `grace` seconds in all, then cut what is left.

        For a moment after NOT_SERVING was told, requests are still taken: their clients have not heard of it yet.
        """
        until = time.monotonic() + grace
        self.following.cancel()
        await self.bound.readiness.set(serving=False)
        await asyncio.sleep(min(_NOTICE_SECONDS, grace / 2))
        self.availability.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self.availability.idle.wait()
        if not self.availability.idle.is_set():
            self.engine.engine_down()  # so that streams end with a reason, which gRPC does not give to what it cuts
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_SECONDS):
                    await self.availability.idle.wait()
        await drain(self.bound, max(0.0, until - time.monotonic()))
        await self.texts.close()


async def start(
    listen: str,
    model: ServedModel,
    engine: Engine,
    adapters: Adapters,
    *,
    reuse_port: bool = False,
    journal: RequestJournal | None = None,
    observers: Sequence[CallObserver] = (),
    access: AccessSettings | None = None,
    limits: LimitSettings = USUAL_LIMITS,
    requests: TenantBuckets | None = None,
    tokens: TenantBuckets | None = None,
    residency_wait: float = 0.0,
) -> ApiServer:
    """Start serving at `listen`; ready as soon as the engine is. `requests` and `tokens`: what tenants may a second.

    Raises:
        InvalidArgument: the address is taken, or `access` cannot be had.
    """
    access = access or AccessSettings()
    availability, texts = Availability(), AdapterTexts(model, adapters.read_texts)
    journal = journal or RequestJournal(model.model_id, RequestMeter())

    def register(server: Any) -> None:
        inference = InferenceServicer(model, engine, adapters, texts, availability, journal, TokenRates(tokens))
        add_InferenceServiceServicer_to_server(inference, server)
        add_AdapterControlServiceServicer_to_server(ControlServicer(engine, adapters), server)

    bound = await create_server(
        listen,
        register,
        SERVICE_NAMES,
        reuse_port=reuse_port,
        limits=limits,
        gate=AccessGate(
            access.authenticator(), TenantCalls(limits.max_calls_per_tenant, requests), refusals=journal.refused
        ),
        credentials=access.tls_credentials(),
        health_listen=access.health_listen,
        observers=observers,
    )
    await bound.server.start()
    following = asyncio.create_task(_follow_engine(engine, adapters, availability, bound, residency_wait))
    return ApiServer(bound, availability, engine, texts, following)


async def _follow_engine(
    engine: Engine,
    adapters: control_servicer.Adapters,
    availability: Availability,
    bound: BoundServer,
    residency_wait: float,
) -> None:
    """SERVING while there is a warm engine that holds what it shall, NOT_SERVING while there is none.

    Adapters that the registry wants here are waited for up to `residency_wait` seconds.
    """
    while True:
        try:
            availability.engine = await engine.hello()
        except EngineUnavailable:
            await asyncio.sleep(_RETRY_HELLO_SECONDS)
            continue
        if residency_wait > 0:
            with contextlib.suppress(LoraplexError, TimeoutError):
                async with asyncio.timeout(residency_wait + _LAST_WORDS_SECONDS):
                    await adapters.await_residency(residency_wait)
        await bound.readiness.set(serving=True)
        log.info("serving", extra={"port": bound.port})
        await engine.wait_down()
        availability.engine = None
        await bound.readiness.set(serving=False)
        log.warning("the engine is gone")


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _follow_events(reader: asyncio.StreamReader, engine: EngineClient, adapters: AdapterClient) -> None:
    """Pass on what the supervisor says, and answer what it asks; returns when it is gone."""
    while line := await reader.readline():
        match msgspec.json.decode(line, type=Event).event:
            case "engine_down":
                engine.engine_down()
            case "adapters_down":
                adapters.adapters_down()
            case "answer":
                print(ALIVE_LINE, flush=True)


async def run() -> None:
    """Serve until SIGTERM or until the supervisor is gone."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    reader = await _standard_input()
    settings = msgspec.json.decode(await reader.readline(), type=ApiStart)
    log_setup.setup("inference-api", settings.log_level)
    model = load_served_model(Path(settings.model_folder), settings.model_id)
    identity = f"api-{os.getpid()}"
    engine = EngineClient(settings.api_address, identity, settings.max_unread)
    adapters = AdapterClient.start(settings.adapter_address, identity)
    tracing = start_tracing(settings.otlp_endpoint, "loraplex-inference", "api")
    readers: list[Reader] = []
    if tracing is not None:
        adapters.traceparent = tracing.traceparent
        readers.append(add_spans)
    if (sent := start_metrics(settings.otlp_endpoint, "loraplex-inference", "api")) is not None:
        readers.append(RequestMeasures(sent))
    if settings.log_requests:
        readers.append(write_line)
    meter = RequestMeter()
    server = await start(
        settings.listen,
        model,
        engine,
        adapters,
        reuse_port=settings.reuse_port,
        journal=RequestJournal(
            settings.model_id,
            meter,
            readers,
            keeps_text=settings.log_prompts,
            span=tracing.current if tracing else lambda: None,
        ),
        observers=[meter, tracing] if tracing else [meter],
        access=settings.access,
        limits=settings.limits,
        requests=_requests(settings),
        tokens=_tokens(settings),
        residency_wait=settings.residency_wait,
    )
    print(READY_LINE, flush=True)
    log.info("listening", extra={"port": server.port})
    parent = asyncio.create_task(_follow_events(reader, engine, adapters))
    stopping = asyncio.create_task(stop.wait())
    reporting = asyncio.create_task(keep_reporting(meter))
    await asyncio.wait([parent, stopping], return_when=asyncio.FIRST_COMPLETED)
    await server.stop(settings.drain_grace if stop.is_set() else 0.0)
    for task in (parent, stopping, reporting):
        task.cancel()
    await engine.close()
    await adapters.close()
    await asyncio.gather(*(asyncio.to_thread(each.close) for each in (tracing, sent) if each is not None))


def _requests(settings: ApiStart) -> TenantBuckets:
    own = {name: rates.requests_per_second for name, rates in settings.namespaces.items()}
    return settings.limits.buckets(settings.limits.tenant_requests_per_second, own)


def _tokens(settings: ApiStart) -> TenantBuckets:
    own = {name: rates.tokens_per_second for name, rates in settings.namespaces.items()}
    return settings.limits.buckets(settings.tenant_tokens_per_second, own)


def main() -> int:
    """Entry point; the exit code. What prevents a start is one line on standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    try:
        uvloop.run(run())
    except LoraplexError as error:
        print(failure_line(error), file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, InvalidArgument) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

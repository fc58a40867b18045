"""Asks the registry what references mean, remembers the answers, and makes the base model known to it."""

import asyncio
import json
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from inference_service.adapters.flights import Flights
from inference_service.adapters.resolution import BaseModelIdentity, Resolution, ResolvedVersion, read_resolution
from loraplex.registry.v1 import registry_pb2
from loraplex.registry.v1.registry_pb2_grpc import AdapterRegistryServiceStub
from shared.errors import (
    AdapterDeleted,
    BaseModelConflict,
    FailedPrecondition,
    InvalidArgument,
    LoraplexError,
    NotFound,
    PermissionDenied,
    RegistryUnavailable,
    Unauthenticated,
)
from shared.status import from_rpc_error

log = logging.getLogger(__name__)

CALL_TIMEOUT = 3.0
FAILURE_MEMORY = 1.0
PATIENCE = 0.25  # seconds that a caller with an expired answer waits for a new one
MAX_ANSWERS = 50_000
_FIRST_DELAY, _LONGEST_DELAY, _SETTLED_DELAY = 0.2, 5.0, 60.0
# What the registry says about the reference itself. Any other failure is the registry's, and says nothing about it.
_VERDICTS = (InvalidArgument, NotFound, FailedPrecondition, AdapterDeleted, PermissionDenied, Unauthenticated)
_SERVICE_CONFIG = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
_KEEPALIVE_SECONDS = 30.0  # more than the 5 s between pings that `shared.grpc_server` asks for
_CHANNEL_OPTIONS = (
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.service_config", _SERVICE_CONFIG),
)

RegistrationState = Literal["pending", "registered", "conflict", "refused", "unreachable"]


class _Answer(NamedTuple):
    resolution: Resolution
    asked_at: float


class BaseModelFacts(NamedTuple):
    """What RegisterBaseModel is told: the id, the text of config.json, and the two fingerprints."""

    id: str
    config_json: str
    fingerprint: str
    weights_fingerprint: str


class RegistryClient:
    """One channel to the registry. Create it inside a running event loop.

    Args:
        address: host:port, or a gRPC target URI.
        base_model: What adapters must be for.
        max_stale: Seconds since it was given for which an answer serves while the registry is unreachable.
        keepalive: Seconds between pings of an idle connection, which tell that the registry's machine is gone.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        address: str,
        base_model: BaseModelIdentity,
        *,
        max_stale: float = 3600.0,
        keepalive: float = _KEEPALIVE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registration: RegistrationState = "pending"
        self._base_model = base_model
        self._max_stale = max_stale
        self._clock = clock
        target = address if "://" in address or address.startswith("unix:") else f"dns:///{address}"
        options = (("grpc.keepalive_time_ms", int(1e3 * keepalive)), *_CHANNEL_OPTIONS)
        self._channel = grpc.aio.insecure_channel(target, options=options)
        self._stub = AdapterRegistryServiceStub(self._channel)
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._flights: Flights[Resolution] = Flights(lambda _: FAILURE_MEMORY, clock)
        self._refreshes: set[asyncio.Task[None]] = set()
        self._is_down = False
        self._came_back = asyncio.Event()

    async def resolve(self, reference: str, choice_key: str = "") -> ResolvedVersion:
        """The version that the canonical `reference` means now, chosen by `choice_key` where there are several.

        Whoever finds an answer expired waits a moment for a new one and then takes the old one, if it is young enough;
        while the registry is unreachable, it is taken at once. The new one arrives in the background.

        Raises:
            RegistryUnavailable: no answer, and none remembered that is young enough.
            LoraplexError: what the registry says of the reference (AdapterNotFound, BaseModelMismatch …).
        """
        answer, now = self._answers.get(reference), self._clock()
        if answer is not None and now < answer.asked_at + answer.resolution.ttl:
            self._answers.move_to_end(reference)
            return answer.resolution.choose(choice_key)
        stale = answer if answer is not None and now <= answer.asked_at + self._max_stale else None
        if stale is not None and self._is_down:
            self._refresh_soon(reference)
            return stale.resolution.choose(choice_key)
        try:
            async with asyncio.timeout(None if stale is None else PATIENCE):
                resolution = await self._flights.run(reference, lambda: self._ask(reference))
        except (RegistryUnavailable, TimeoutError):
            if stale is None:
                raise
            resolution = stale.resolution
        return resolution.choose(choice_key)

    def _refresh_soon(self, reference: str) -> None:
        async def refresh() -> None:
            try:
                await self._flights.run(reference, lambda: self._ask(reference))
            except LoraplexError as error:
                log.debug("refreshing %s: %s", reference, error)

        task = asyncio.get_running_loop().create_task(refresh())
        self._refreshes.add(task)
        task.add_done_callback(self._refreshes.discard)

    async def _ask(self, reference: str) -> Resolution:
        asked_at = self._clock()
        try:
            response = await self._call(reference)
            resolution = read_resolution(response, reference, self._base_model)
        except RegistryUnavailable:
            raise
        except LoraplexError:
            self._answers.pop(reference, None)
            raise
        self._answers[reference] = _Answer(resolution, asked_at)
        self._answers.move_to_end(reference)
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
        return resolution

    async def _call(self, reference: str) -> registry_pb2.ResolveAdapterResponse:
        request = registry_pb2.ResolveAdapterRequest(reference=reference, base_model=self._base_model.id)
        try:
            response = await self._stub.ResolveAdapter(request, timeout=CALL_TIMEOUT)
        except grpc.aio.AioRpcError as rpc_error:
            error = _error_of(rpc_error)
            if isinstance(error, _VERDICTS):
                self._came_up()
                raise error from None
            self._went_down(error)
            raise RegistryUnavailable(_unreachable(error), retry_after=FAILURE_MEMORY) from None
        self._came_up()
        return response

    def _went_down(self, error: LoraplexError) -> None:
        if not self._is_down:
            log.warning("%s; answers up to %g s old go on serving", _unreachable(error), self._max_stale)
        self._is_down = True

    def _came_up(self) -> None:
        if self._is_down:
            log.info("the registry answers again")
            self._came_back.set()
        self._is_down = False

    async def keep_registered(self, facts: BaseModelFacts) -> None:
        """Registers the base model until cancelled: again each minute, and whenever the registry was away.

        A registry may have lost its database, and an operator may end a conflict. `registration` says how it stands.
        """
        request = registry_pb2.RegisterBaseModelRequest(
            id=facts.id,
            config_json=facts.config_json,
            fingerprint=facts.fingerprint,
            weights_fingerprint=facts.weights_fingerprint,
        )
        delay = _FIRST_DELAY
        while True:
            self._came_back.clear()
            before, self.registration = self.registration, await self._register(request)
            if self.registration == "unreachable":
                await self._sleep(delay * random.uniform(0.7, 1.3))
                delay = min(delay * 2, _LONGEST_DELAY)
                continue
            delay = _FIRST_DELAY
            if before != "registered" and self.registration == "registered":
                log.info("base model %s is registered", facts.id)
            await self._sleep(_SETTLED_DELAY)

    async def _register(self, request: registry_pb2.RegisterBaseModelRequest) -> RegistrationState:
        try:
            await self._stub.RegisterBaseModel(request, timeout=CALL_TIMEOUT)
        except grpc.aio.AioRpcError as rpc_error:
            error = _error_of(rpc_error)
            if isinstance(error, BaseModelConflict):
                log.error("base model %s: the registry has another one of this name: %s", request.id, error)
                return "conflict"
            if isinstance(error, _VERDICTS):
                log.error("base model %s: the registry refuses it: %s", request.id, error)
                return "refused"
            log.debug("registering base model %s: %s", request.id, _unreachable(error))
            return "unreachable"
        return "registered"

    async def _sleep(self, seconds: float) -> None:
        """Until the registry comes back, at most `seconds`."""
        try:
            await asyncio.wait_for(self._came_back.wait(), seconds)
        except TimeoutError:
            return

    async def close(self) -> None:
        """Ends what runs in the background, then the channel."""
        for task in self._refreshes:
            task.cancel()
        await self._channel.close(grace=None)


def _error_of(rpc_error: grpc.aio.AioRpcError) -> LoraplexError:
    try:
        return from_rpc_error(rpc_error)
    except (ValueError, DecodeError) as malformed:  # details that are no status, or another one than the call's
        return RegistryUnavailable(f"malformed error details: {malformed!s:.100}")


def _unreachable(error: LoraplexError) -> str:
    return f"the registry is unreachable ({error.code}: {error.message:.200})"

"""Asks the registry what references mean, remembers the answers, and makes the base model known to it."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from inference_service.adapters.answers import Answer, Answers
from inference_service.adapters.confirming import keep_confirming
from inference_service.adapters.flights import Flights
from inference_service.adapters.registration import BaseModelFacts, BaseModelRegistration, RegistrationState
from inference_service.adapters.registry_errors import CALL_TIMEOUT, NOT_YET, VERDICTS, error_of, unreachable
from inference_service.adapters.resolution import BaseModelIdentity, Resolution, ResolvedVersion, read_resolution
from inference_service.adapters.saved_answers import SavedAnswers
from inference_service.adapters.watch import AdapterWatch, Listener
from loraplex.registry.v1 import registry_pb2
from loraplex.registry.v1.registry_pb2_grpc import AdapterRegistryServiceStub
from shared.channel import NOBODY, ClientIdentity, open_channel
from shared.errors import BaseModelConflict, BaseModelUnknown, LoraplexError, RegistryUnavailable

log = logging.getLogger(__name__)

FAILURE_MEMORY = 1.0
PATIENCE = 0.25  # seconds that a caller with an expired answer waits for a new one
_SERVICE_CONFIG = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
_KEEPALIVE_SECONDS = 30.0  # more than the 5 s between pings that `shared.grpc_server` asks for
_CHANNEL_OPTIONS = (
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # a proxy may acknowledge for who is gone
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.service_config", _SERVICE_CONFIG),
)


class RegistryClient:
    """One channel to the registry. Create it inside a running event loop.

    Args:
        address: host:port, or another of gRPC's targets (`shared.targets`).
        base_model: What adapters must be for.
        identity: How this replica shows the registry who it is.
        max_stale: Seconds since it was given for which an answer serves while the registry is unreachable.
        keepalive: Seconds between pings of an idle connection, which tell that the registry's machine is gone.
        clock: Seconds, monotonic.
        interceptors: Of its calls, for traces.
        saved: Keeps answers for a process after this one, and has those of the one before. Closed with the client.
    """

    def __init__(
        self,
        address: str,
        base_model: BaseModelIdentity,
        *,
        identity: ClientIdentity = NOBODY,
        max_stale: float = 3600.0,
        keepalive: float = _KEEPALIVE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        interceptors: Sequence[Any] = (),
        saved: SavedAnswers | None = None,
    ) -> None:
        self._base_model = base_model
        self._max_stale = max_stale
        self._clock = clock
        options = (("grpc.keepalive_time_ms", int(1e3 * keepalive)), *_CHANNEL_OPTIONS)
        self._channel = open_channel(address, identity, options, interceptors)
        self._stub = AdapterRegistryServiceStub(self._channel)
        self._saved = saved
        self._answers = Answers(max_stale, clock, saved)
        self._flights: Flights[Resolution] = Flights(lambda _: FAILURE_MEMORY, clock)
        self._refreshes: set[asyncio.Task[None]] = set()
        self._is_down = False
        self._base_model_registration = BaseModelRegistration(self._stub)

    @property
    def registration(self) -> RegistrationState:
        """How the last attempt ended to make the base model known."""
        return self._base_model_registration.state

    @property
    def base_model_conflict(self) -> BaseModelConflict | None:
        """Why adapters are not for this replica's base model: the registry has another one of its id."""
        return self._base_model_registration.conflict

    @property
    def revision(self) -> int:
        """The highest that the registry has told."""
        return self._answers.revision

    @property
    def lag(self) -> int:
        """Changes that the registry is known to have and that have not been heard of."""
        return self._answers.lag

    @property
    def heard_at(self) -> float | None:
        """When the registry's watch was last up to date; None if it never was."""
        return self._answers.heard_at

    async def keep_watching(self, listener: Listener | None = None) -> None:
        """Hears of changes until cancelled, so that answers are right without being asked for again."""
        watch = AdapterWatch(self._stub, self._base_model.id, self._answers, listener)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch.run())
            tasks.create_task(keep_confirming(self._answers, self._flight, watch.has_caught_up))

    async def report(self, request: registry_pb2.ReportReplicaStateRequest) -> registry_pb2.ReportReplicaStateResponse:
        """Tells what this replica holds. Raises what the registry says, or RegistryUnavailable."""
        try:
            response = await self._stub.ReportReplicaState(request, timeout=CALL_TIMEOUT)
        except grpc.aio.AioRpcError as rpc_error:
            error = error_of(rpc_error)
            if isinstance(error, BaseModelUnknown) and self.registration != "refused":
                self._base_model_registration.try_soon()  # the registry has lost its database, or is another one
            raise error from None
        if self.registration == "unreachable" or response.needs_full:
            self._base_model_registration.try_soon()
        return response

    async def resolve(self, reference: str, choice_key: str = "", *, registered_only: bool = False) -> ResolvedVersion:
        """The version that the canonical `reference` means now, chosen by `choice_key` where there are several.

        With `registered_only` the registry does not look for an unknown adapter where its namespace's settings say.
        Whoever finds an answer expired or changed waits a moment for a new one and then takes the old one, if it is
        young enough; while the registry is unreachable, it is taken at once. The new one arrives in the background.
        Where this process has never had an answer, that of a process before it counts, as an old one. An answer comes
        no sooner than it is known, of a registry that can be asked, whether there is a `base_model_conflict`.

        Raises:
            RegistryUnavailable: no answer, and none remembered that is young enough.
            LoraplexError: what the registry says of the reference (AdapterNotFound, BaseModelMismatch …).
        """
        await self._base_model_registration.first_attempt()
        answer = self._answers.find(reference)
        if answer is not None and self._answers.is_believed(reference, answer):
            return answer.resolution.choose(choice_key)
        stale = answer if answer is not None and self._answers.may_serve(answer) else None
        if stale is not None and self._is_down:
            self._refresh_soon(reference, registered_only)
            return stale.resolution.choose(choice_key)
        try:
            async with asyncio.timeout(None if stale is None else PATIENCE):
                resolution = await self._flight(reference, registered_only=registered_only)
        except (RegistryUnavailable, *NOT_YET, TimeoutError) as error:
            if stale is None and isinstance(error, RegistryUnavailable):
                stale = await self._earlier(reference)
            if stale is None:
                raise
            resolution = stale.resolution
        return resolution.choose(choice_key)

    async def _earlier(self, reference: str) -> Answer | None:
        """What a process before this one was told, if that is young enough."""
        era = self._answers.era
        found = None if self._saved is None else await self._saved.find(reference)
        if found is None or era != self._answers.era:
            return None
        try:
            response = registry_pb2.ResolveAdapterResponse.FromString(found.response)
            resolution = read_resolution(response, reference, self._base_model)
        except (LoraplexError, DecodeError) as error:
            log.warning("what was kept of %s cannot be used: %s", reference, error)
            return None
        self._answers.put_earlier(reference, resolution, found.age)
        answer = self._answers.find(reference)
        return answer if answer is not None and self._answers.may_serve(answer) else None

    def _refresh_soon(self, reference: str, registered_only: bool) -> None:
        async def refresh() -> None:
            try:
                await self._flight(reference, registered_only=registered_only)
            except LoraplexError as error:
                log.debug("refreshing %s: %s", reference, error)

        task = asyncio.get_running_loop().create_task(refresh())
        self._refreshes.add(task)
        task.add_done_callback(self._refreshes.discard)

    async def _flight(self, reference: str, *, registered_only: bool = False) -> Resolution:
        """A new answer; neither one that was asked for before the last change nor a failure of then."""
        revision = self._answers.required_revision(reference)
        key = f"{reference} {revision} {self._answers.era} {registered_only}"
        return await self._flights.run(key, lambda: self._ask(reference, revision, registered_only))

    async def _ask(self, reference: str, min_revision: int, registered_only: bool) -> Resolution:
        asked_at = self._clock()
        try:
            response = await self._call(reference, min_revision, registered_only)
            await self._base_model_registration.verdict()
            resolution = read_resolution(response, reference, self._base_model)
        except (RegistryUnavailable, *NOT_YET):
            raise
        except LoraplexError:
            self._answers.drop(reference)
            raise
        answer = Answer(resolution, asked_at, response.registry_revision)
        self._answers.put(reference, answer, response.SerializeToString())
        return resolution

    async def _call(
        self, reference: str, min_revision: int, registered_only: bool
    ) -> registry_pb2.ResolveAdapterResponse:
        request = registry_pb2.ResolveAdapterRequest(
            reference=reference,
            base_model=self._base_model.id,
            min_revision=min_revision,
            registered_only=registered_only,
        )
        try:
            response = await self._stub.ResolveAdapter(request, timeout=CALL_TIMEOUT)
        except grpc.aio.AioRpcError as rpc_error:
            error = error_of(rpc_error)
            if isinstance(error, (*VERDICTS, *NOT_YET)):
                self._came_up()
                raise error from None
            self._went_down(error)
            raise RegistryUnavailable(unreachable(error), retry_after=FAILURE_MEMORY) from None
        self._came_up()
        return response

    def _went_down(self, error: LoraplexError) -> None:
        if not self._is_down:
            log.warning("%s; answers up to %g s old go on serving", unreachable(error), self._max_stale)
        self._is_down = True

    def _came_up(self) -> None:
        if self._is_down:
            log.info("the registry answers again")
            self._base_model_registration.try_soon()
        self._is_down = False

    async def keep_registered(self, facts: BaseModelFacts) -> None:
        """Registers the base model until cancelled. `registration` says how it stands."""
        await self._base_model_registration.keep(facts)

    async def close(self) -> None:
        """Ends what runs in the background, then the channel."""
        for task in self._refreshes:
            task.cancel()
        await self._channel.close(grace=None)
        if self._saved is not None:
            await asyncio.to_thread(self._saved.close)

"""Makes the base model known to the registry, and learns whether the registry's of this id is another one."""

import asyncio
import logging
import random
from contextlib import suppress
from typing import Literal, NamedTuple

import grpc

from inference_service.adapters.registry_errors import CALL_TIMEOUT, NOT_KNOWN, VERDICTS, error_of, unreachable
from loraplex.registry.v1 import registry_pb2
from loraplex.registry.v1.registry_pb2_grpc import AdapterRegistryServiceStub
from shared.errors import BaseModelConflict

log = logging.getLogger(__name__)

_FIRST_DELAY, _LONGEST_DELAY, _SETTLED_DELAY = 0.2, 30.0, 60.0
_UNTROUBLED = 5.0  # seconds at most between attempts that even a registry that comes and goes does not shorten
_UNTOLD_UNTROUBLED = 1.0  # the same while requests wait to hear whose adapters these are

SERVED_FINGERPRINT = "served_fingerprint"  # in the metadata of a conflict: of this replica's config

RegistrationState = Literal["pending", "registered", "conflict", "refused", "unreachable"]


class BaseModelFacts(NamedTuple):
    """What RegisterBaseModel is told: the id, the text of config.json, and the two fingerprints."""

    id: str
    config_json: str
    fingerprint: str
    weights_fingerprint: str


class BaseModelRegistration:
    """How it stands with the base model of this replica in the registry. Create it inside a running event loop.

    `state`: what came of the last attempt. `conflict`: the registry has another base model of this id, so its adapters
    are not for what is served here; stays while the registry is away, until it takes this one.
    """

    def __init__(self, stub: AdapterRegistryServiceStub) -> None:
        self.state: RegistrationState = "pending"
        self.conflict: BaseModelConflict | None = None
        self._stub = stub
        self._is_kept = False
        self._was_told = False  # the registry has said yes or no
        self._woken = asyncio.Event()
        self._attempted = asyncio.Event()  # replaced whenever it is set

    def try_soon(self) -> None:
        """The registry is there again, or another one is."""
        self._woken.set()

    async def first_attempt(self) -> None:
        """Returns once the registry was asked, or found to be away."""
        if self._is_kept and self.state == "pending":
            await self._next_attempt()

    async def verdict(self) -> None:
        """The registry answers: if it never said yes or no, returns when it was asked once more."""
        if self._is_kept and not self._was_told:
            self.try_soon()
            await self._next_attempt()

    async def _next_attempt(self) -> None:
        attempted = self._attempted
        with suppress(TimeoutError):
            async with asyncio.timeout(CALL_TIMEOUT + _UNTOLD_UNTROUBLED):
                await attempted.wait()

    async def keep(self, facts: BaseModelFacts) -> None:
        """Registers the base model until cancelled: again each minute, and whenever the registry was away.

        A registry may have lost its database, and an operator may end a conflict.
        """
        request = registry_pb2.RegisterBaseModelRequest(
            id=facts.id,
            config_json=facts.config_json,
            fingerprint=facts.fingerprint,
            weights_fingerprint=facts.weights_fingerprint,
        )
        self._is_kept = True
        delay = _FIRST_DELAY
        while True:
            self._woken.clear()
            before, self.state = self.state, await self._register(request)
            self._was_told = self._was_told or self.state != "unreachable"
            self._attempted.set()
            self._attempted = asyncio.Event()
            if self.state == "unreachable":
                seconds = delay * random.uniform(0.7, 1.3)
                untroubled = min(seconds, _UNTROUBLED if self._was_told else _UNTOLD_UNTROUBLED)
                await asyncio.sleep(untroubled)
                await self._sleep(seconds - untroubled)
                delay = min(delay * 2, _LONGEST_DELAY)
                continue
            delay = _FIRST_DELAY
            self._woken.clear()  # by those who wanted this answer
            if before != "registered" and self.state == "registered":
                log.info("base model %s is registered", facts.id)
            await self._sleep(_SETTLED_DELAY)

    async def _register(self, request: registry_pb2.RegisterBaseModelRequest) -> RegistrationState:
        try:
            await self._stub.RegisterBaseModel(request, timeout=CALL_TIMEOUT)
        except grpc.aio.AioRpcError as rpc_error:
            error = error_of(rpc_error)
            if isinstance(error, BaseModelConflict):
                self.conflict = _explained(error, request)
                log.error("%s: %s", self.conflict.reason, self.conflict.message)
                return "conflict"
            if isinstance(error, (*VERDICTS, *NOT_KNOWN)):
                log.error("base model %s: the registry refuses it: %s", request.id, error)
                return "refused"
            log.debug("registering base model %s: %s", request.id, unreachable(error))
            return "unreachable"
        self.conflict = None
        return "registered"

    async def _sleep(self, seconds: float) -> None:
        """Until there is something new, at most `seconds`."""
        if seconds <= 0:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()


def _explained(error: BaseModelConflict, request: registry_pb2.RegisterBaseModelRequest) -> BaseModelConflict:
    """The registry's verdict as it is told to whoever asks this replica for an adapter."""
    message = (
        f"this replica's base model is not the {request.id} that adapters are registered for, so it serves none of "
        f"them ({error.message}); start it with the registered weights, or with --model-name ANOTHER_ID and register "
        "adapters for that id"
    )
    own = {SERVED_FINGERPRINT: request.fingerprint, "served_weights_fingerprint": request.weights_fingerprint}
    return BaseModelConflict(message, metadata={**error.metadata, **own})

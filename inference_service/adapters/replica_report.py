"""Tells the registry what this replica holds: on change, and often enough to keep its lease.

What is told is what changed since the last report that was acknowledged. After one that was not, or where the registry
does not know what came before, it is all told again.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping

from inference_service.adapters.residency import HeldState, Residency
from loraplex.registry.v1 import registry_pb2
from shared.errors import EngineUnavailable, LoraplexError

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
FIRST_LEASE = 10.0
MAX_RESIDENTS = 20_000  # as the registry takes
RETRY_SECONDS = 2.0

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LEVELS = registry_pb2.ResidentState.Level

Send = Callable[[registry_pb2.ReportReplicaStateRequest], Awaitable[registry_pb2.ReportReplicaStateResponse]]


class ReplicaReporter:
    """Reports as `replica` until cancelled. `send` is `RegistryClient.report`."""

    def __init__(self, replica: str, base_model: str, residency: Residency, send: Send) -> None:
        self._replica = replica
        self._base_model = base_model
        self._residency = residency
        self._send = send
        self._told: dict[str, HeldState] | None = None  # what the registry has acknowledged
        self._told_revision = 0
        self._told_at = 0.0
        self._lease = FIRST_LEASE

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.report()
                delay = LOOK_SECONDS
            except LoraplexError as error:
                log.debug("not reported: %s", error.summary)
                delay = RETRY_SECONDS
            except Exception:
                log.exception("what is held here cannot be reported")
                delay = RETRY_SECONDS
            await asyncio.sleep(delay)

    async def report(self) -> None:
        """Looks, and tells what there is to tell.

        Raises:
            LoraplexError: the registry did not take it.
        """
        now = asyncio.get_running_loop().time()
        is_due = self._told is None or now >= self._told_at + self._lease / 3
        held = await self._held()
        revision = self._residency.observed_revision
        if not is_due and held == self._told and revision == self._told_revision:
            return
        before, self._told = self._told, None  # unless it is acknowledged
        response = await self._send(self._request(held, before, revision))
        if response.needs_full:
            response = await self._send(self._request(held, None, revision))
        self._told, self._told_revision, self._told_at = held, revision, now
        self._lease = max(1.0, response.lease.seconds + response.lease.nanos / 1e9)

    async def _held(self) -> dict[str, HeldState]:
        try:
            states = await self._residency.states()
        except EngineUnavailable:
            states = {}  # whoever cannot serve an adapter does not hold it
        valid = {digest: state for digest, state in states.items() if _DIGEST.fullmatch(digest)}
        return dict(sorted(valid.items())[:MAX_RESIDENTS])

    def _request(
        self, held: Mapping[str, HeldState], before: Mapping[str, HeldState] | None, revision: int
    ) -> registry_pb2.ReportReplicaStateRequest:
        known = before or {}
        return registry_pb2.ReportReplicaStateRequest(
            replica=self._replica,
            base_model=self._base_model,
            observed_revision=revision,
            full=before is None,
            resident=[
                registry_pb2.ResidentState(
                    digest=digest,
                    level=_LEVELS.Value(f"LEVEL_{state.level}"),
                    pinned=state.pinned,
                    reason=state.reason,
                )
                for digest, state in held.items()
                if known.get(digest) != state
            ],
            removed=sorted(known.keys() - held.keys()),
        )

"""Residency as desired state: adapters that the registry wants PRELOADed or PINNED are brought here, and kept.

The watch tells what is wanted, now and whenever it changes; `run` makes it so. A preloaded adapter is brought to host
memory and, where there is room, to the device, once; it may be evicted. A pinned one is brought back whenever it is
gone. Of an adapter, the versions are wanted that its name without a number can mean: those of its default alias and of
every other alias. While the registry has another base model of this one's id, nothing is wanted: it is not for this.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from inference_service.adapters.registration import SERVED_FINGERPRINT
from inference_service.adapters.wanted import Wanted, wanted_by_digest, wanted_versions
from inference_service.types import PreparedAdapter, ResidentAdapter
from loraplex.registry.v1 import registry_pb2
from shared.errors import AdapterMemory, BaseModelConflict, EngineUnavailable, Internal, LoraplexError, Unavailable

log = logging.getLogger(__name__)

CHECK_SECONDS = 2.0
MAX_AT_ONCE = 4  # loads; what users wait for shares the downloads and threads
FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0  # seconds; doubled from one to the other
UNKNOWN_SECONDS = 3.0  # that readiness waits to hear what is wanted


class HeldState(NamedTuple):
    """What there is of one content, for the registry. `level`: DISK, HOST, GPU, or FAILED for `reason`."""

    level: str
    pinned: bool = False
    reason: str = ""


class Loader(Protocol):
    """What is needed of `loader.AdapterLoader`."""

    @property
    def base_model_conflict(self) -> BaseModelConflict | None: ...

    async def prepare(self, reference: str, choice_key: str = "") -> PreparedAdapter: ...
    def in_host(self) -> set[str]: ...
    def keep_on_disk(self, digests: Set[str]) -> None: ...


class Engine(Protocol):
    """What is needed of `engine_port.EnginePort`."""

    async def load(self, digest: str, *, pinned: bool, prepare_seconds: float) -> None: ...
    async def keep_pins(self, digests: Set[str]) -> None: ...
    async def residents(self) -> list[ResidentAdapter]: ...
    async def free_bytes(self) -> int: ...


@dataclass
class _Load:
    """How far one wanted content is. `reason`: why it is not here; the phase, as long as nothing has failed."""

    wanted: Wanted
    is_done: bool = False
    reason: str = "PENDING"
    is_settled: bool = False  # done, or failed in a way that waiting does not mend
    failures: int = 0
    retry_at: float = 0.0
    task: asyncio.Task[None] | None = None

    def begin_anew(self) -> None:
        """Whatever came of it so far counts no more."""
        self.is_done = self.is_settled = False
        self.reason, self.failures, self.retry_at = "PENDING", 0, 0.0


class Residency:
    """What is wanted here, and how far it is. Runs on one event loop."""

    def __init__(self, loader: Loader, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.observed_revision = 0  # every change up to this one has been heard
        self._loader = loader
        self._engine = engine
        self._clock = clock
        self._wanted: dict[str, tuple[Wanted, ...]] = {}  # by adapter
        self._incoming: dict[str, tuple[Wanted, ...]] | None = {}  # of a snapshot that has not ended
        self._was_told = False  # some snapshot has ended
        self._is_told = asyncio.Event()  # it is known what is wanted, or that nobody says
        self._loads: dict[str, _Load] = {}  # by digest
        self._kept: frozenset[str] | None = None  # pins that the engine was told to keep; None: it must be told anew
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
        self._woken = asyncio.Event()
        self._progressed = asyncio.Event()  # replaced whenever it is set

    # ---- what the watch tells

    def start_over(self) -> None:
        """A snapshot begins. What was wanted before stays wanted until it ends."""
        self._incoming = {}

    def changed(self, change: registry_pb2.AdapterChange) -> None:
        """An adapter is like this now."""
        wanted = () if change.type == registry_pb2.AdapterChange.TYPE_DELETE else wanted_versions(change)
        for adapters in (self._wanted, self._incoming):
            if adapters is not None:
                adapters.pop(change.adapter.name, None)
                if wanted:
                    adapters[change.adapter.name] = wanted
        self._woken.set()

    def complete(self, revision: int) -> None:
        """Everything up to `revision` is told."""
        if self._incoming is not None:
            self._wanted, self._incoming, self._was_told = self._incoming, None, True
            self._woken.set()
        self.observed_revision = revision
        self._is_told.set()

    def failed(self) -> None:
        """The registry cannot be heard: what it wants is not waited for."""
        self._is_told.set()

    # ---- what the engine tells

    def engine_started(self) -> None:
        """The device is empty. What was under way begins again: nobody can say which engine it has reached."""
        self._kept = None
        for load in self._loads.values():
            _cancel(load)
            load.begin_anew()
        self._woken.set()

    # ---- making it so

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._woken.clear()
                try:
                    await self._reconcile()
                except Exception:
                    log.exception("what is wanted cannot be looked after")
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_SECONDS):
                        await self._woken.wait()
        finally:
            for load in self._loads.values():
                _cancel(load)

    async def settle(self, seconds: float) -> bool:
        """Returns when all that is wanted is here, or can be no sooner; at the latest after some seconds.

        Whether it came about. A registry that is away is not waited for.
        """
        deadline = self._clock() + seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, UNKNOWN_SECONDS)):
                await self._is_told.wait()
        while not self._is_settled() and (left := deadline - self._clock()) > 0:
            progressed = self._progressed
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, CHECK_SECONDS)):
                    await progressed.wait()
        return self._is_settled()

    async def states(self) -> dict[str, HeldState]:
        """What host memory and the device hold, and what is wanted and not there, by digest.

        A preloaded adapter is there in host memory, a pinned one only on the device. What cannot be served because of
        the base model is not there, wherever it is; then the base model itself is said to have failed, too.

        Raises:
            EngineUnavailable: the engine does not say.
        """
        found = {digest: HeldState("HOST") for digest in self._loader.in_host()}
        found.update({r.digest: HeldState("GPU", pinned=r.pinned) for r in await self._engine.residents()})
        if (conflict := self._loader.base_model_conflict) is not None:
            missing = [*found, *self._loads, conflict.metadata[SERVED_FINGERPRINT]]
            return dict.fromkeys(missing, HeldState("FAILED", reason=conflict.reason))
        for digest, load in self._loads.items():
            is_pinned, level = load.wanted.is_pinned, found[digest].level if digest in found else ""
            if level != "GPU" if is_pinned else not (level or load.is_done):
                found[digest] = HeldState("FAILED", reason=load.reason)
        return found

    def _is_settled(self) -> bool:
        by_digest = wanted_by_digest(self._wanted)
        return all(digest in self._loads and self._loads[digest].is_settled for digest in by_digest)

    async def _reconcile(self) -> None:
        wanted = wanted_by_digest(self._wanted)
        for digest in self._loads.keys() - wanted.keys():
            _cancel(self._loads.pop(digest))
        for digest, version in wanted.items():
            load = self._loads.setdefault(digest, _Load(version))
            if load.wanted.is_pinned != version.is_pinned:
                load.begin_anew()
            load.wanted = version
        if self._loader.base_model_conflict is not None:
            await self._want_nothing()
            return
        for load in self._loads.values():
            is_running = load.task is not None and not load.task.done()
            if not load.is_done and not is_running and self._clock() >= load.retry_at:
                load.task = asyncio.get_running_loop().create_task(self._bring(load))
        pinned = frozenset(digest for digest, version in wanted.items() if version.is_pinned)
        await self._end_other_pins(pinned)
        await self._look_at_pins(pinned)

    async def _want_nothing(self) -> None:
        """As long as the base model is another one. What was brought here before is used by nobody, and is evicted."""
        for load in self._loads.values():
            _cancel(load)
            load.begin_anew()
            load.is_settled = True
        self._progress()
        await self._end_other_pins(frozenset())
        await self._look_at_pins(frozenset())

    async def _end_other_pins(self, pinned: frozenset[str]) -> None:
        """End the pins of what is not wanted any more, also those that a process before this one has set.

        What is wanted must have been told once: until then nothing says that they are not. They may be used as before,
        and are evicted when others need the room.
        """
        if not self._was_told:
            return
        if pinned == self._kept:
            return
        try:
            await self._engine.keep_pins(pinned)
        except LoraplexError as error:
            log.debug("pins are as they were: %s", error.summary)
            return
        self._kept = pinned

    async def _look_at_pins(self, wanted: frozenset[str]) -> None:
        """Keep the files of what is pinned, by operators too: a new engine gets it whether or not its source is there.
        And what is wanted may have been unloaded by hand: it is brought again.
        """
        done = [load for load in self._loads.values() if load.is_done and load.wanted.is_pinned]
        try:
            held = {resident.digest for resident in await self._engine.residents() if resident.pinned}
        except EngineUnavailable:
            return
        self._loader.keep_on_disk(wanted | held)
        for load in done:
            load.is_done = load.wanted.digest in held

    async def _bring(self, load: _Load) -> None:
        try:
            async with self._at_once:
                await self._bring_to_device(load)
        except LoraplexError as error:
            self._note_failure(load, error)
        except Exception:
            log.exception("%s cannot be brought here", load.wanted.reference)
            self._note_failure(load, Internal("internal error"))
        else:
            load.is_done = load.is_settled = True
            load.failures, load.reason = 0, "EVICTED"  # what it is if it is looked for later and not there
        self._progress()

    def _progress(self) -> None:
        self._progressed.set()
        self._progressed = asyncio.Event()

    async def _bring_to_device(self, load: _Load) -> None:
        digest, reference, is_pinned = load.wanted
        load.reason = load.reason if load.failures else "FETCHING"
        began = self._clock()
        prepared = await self._loader.prepare(reference)
        seconds = self._clock() - began
        load.reason = load.reason if load.failures else "LOADING"
        if is_pinned or await self._engine.free_bytes() >= prepared.size_bytes:
            await self._engine.load(digest, pinned=is_pinned, prepare_seconds=seconds)
        log.info("%s is here", reference, extra={"digest": digest, "pinned": is_pinned})

    def _note_failure(self, load: _Load, error: LoraplexError) -> None:
        if load.reason != error.reason:
            log.warning("%s is wanted here: %s", load.wanted.reference, error.summary)
        load.reason = error.reason
        load.failures += 1
        load.retry_at = self._clock() + _retry_seconds(error, load.failures)
        load.is_settled = not isinstance(error, Unavailable | AdapterMemory) or load.failures > 3


def _retry_seconds(error: LoraplexError, failures: int) -> float:
    """Until the next attempt after so many. Room here may come at any moment, and to look for it asks no source."""
    longest = LONGEST_RETRY
    if isinstance(error, AdapterMemory) and error.retry_after is not None:
        longest = max(error.retry_after, FIRST_RETRY)
    return min(FIRST_RETRY * 2.0 ** min(failures - 1, 10), longest)


def _cancel(load: _Load) -> None:
    if load.task is not None:
        load.task.cancel()
        load.task = None

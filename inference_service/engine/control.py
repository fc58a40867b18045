"""LoadAdapter, UnloadAdapter, KeepPins and ListResident, answered when what they ask for has come true."""

from collections.abc import Callable, Set
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from inference_service.engine.engine import Engine
from inference_service.engine.scheduler import Adapters
from inference_service.lora.adapter import AdapterState
from inference_service.types import KeepPins, ListResident, LoadAdapter, PinOwner, Reply, ResidentAdapter, UnloadAdapter
from shared.errors import AdapterUnloaded

AdapterCall = LoadAdapter | UnloadAdapter | KeepPins | ListResident


class ManagedAdapters(Adapters, Protocol):
    """What operators ask of the slot pool, beside what the scheduler does."""

    def load(
        self, digest: str, pinned: bool, owner: PinOwner = "operator", prepare_seconds: float = 0.0
    ) -> AdapterState: ...

    def keep_pins(self, owner: PinOwner, digests: Set[str]) -> None: ...

    def begin_unload(self, digest: str) -> AdapterState | None: ...

    def cancel_unload(self, digest: str) -> None: ...

    def residents(self) -> list[ResidentAdapter]: ...


class Answer(NamedTuple):
    client: bytes
    reply: Reply


class AdapterControl:
    """Calls of API processes that wait for an adapter's load or unload."""

    def __init__(self, engine: Engine, adapters: ManagedAdapters) -> None:
        self._engine = engine
        self._adapters = adapters
        self._held = engine.scheduler.held_adapters
        self._loads: list[tuple[bytes, LoadAdapter]] = []
        self._unloads: list[tuple[bytes, UnloadAdapter]] = []
        self._answers: list[Answer] = []

    def receive(self, client: bytes, call: AdapterCall) -> None:
        """Begin what is asked; the answer comes from `poll`."""
        if isinstance(call, ListResident):
            self._answers.append(Answer(client, Reply(call.call_id, resident=self._adapters.residents())))
        elif isinstance(call, LoadAdapter):
            self._load(call)
            self._loads.append((client, call))
        elif isinstance(call, KeepPins):
            self._keep_pins(client, call)
        else:
            self._unload(client, call)

    def poll(self) -> list[Answer]:
        """Answers that have become true. Call it every step, after the pool's own `poll`."""
        if self._loads:
            self._loads = [pending for pending in self._loads if not self._answer_load(*pending)]
        if self._unloads:
            self._unloads = [pending for pending in self._unloads if not self._answer_unload(*pending)]
            self._held.intersection_update(call.digest for _, call in self._unloads)
        answers, self._answers = self._answers, []
        return answers

    def cancel(self, client: bytes, call_id: int) -> None:
        """Nobody waits for this answer any more. A load goes on; an adapter that still drains can be used again."""
        self._forget(lambda its_client, call: (its_client, call.call_id) == (client, call_id))

    def drop_client(self, client: bytes) -> None:
        """As `cancel`, of all its calls."""
        self._forget(lambda its_client, _: its_client == client)

    def _forget(self, is_given_up: Callable[[bytes, AdapterCall], bool]) -> None:
        self._loads = [pending for pending in self._loads if not is_given_up(*pending)]
        self._unloads = [pending for pending in self._unloads if not is_given_up(*pending)]
        for digest in self._held - {call.digest for _, call in self._unloads}:
            self._held.discard(digest)
            self._adapters.cancel_unload(digest)
            for _, call in self._loads:
                if call.digest == digest:  # the unload took its pin away
                    self._load(call)

    def _load(self, call: LoadAdapter) -> AdapterState:
        return self._adapters.load(call.digest, call.pinned, call.owner, call.prepare_seconds)

    def _keep_pins(self, client: bytes, call: KeepPins) -> None:
        digests = frozenset(call.digests)
        self._adapters.keep_pins("registry", digests)
        self._loads = [
            (its_client, replace(load, pinned=load.pinned and (load.owner != "registry" or load.digest in digests)))
            for its_client, load in self._loads
        ]
        self._answers.append(Answer(client, Reply(call.call_id)))

    def _unload(self, client: bytes, call: UnloadAdapter) -> None:
        if call.force:
            self._engine.fail_adapter(call.digest, AdapterUnloaded("the adapter was unloaded by force"))
        self._held.add(call.digest)
        self._adapters.begin_unload(call.digest)
        self._unloads.append((client, call))

    def _answer_load(self, client: bytes, call: LoadAdapter) -> bool:
        state = self._adapters.state(call.digest)
        if state is None and call.digest not in self._held:  # gone again while it was loading
            state = self._load(call)
        if call.wait and state not in (AdapterState.READY, AdapterState.FAILED):
            return False
        error = self._adapters.error(call.digest) if state is AdapterState.FAILED else None
        self._answers.append(Answer(client, Reply(call.call_id, error=error.record() if error else None)))
        return True

    def _answer_unload(self, client: bytes, call: UnloadAdapter) -> bool:
        if self._adapters.begin_unload(call.digest) is not None:  # again, in case a load asked for it meanwhile
            return False
        self._answers.append(Answer(client, Reply(call.call_id)))
        return True

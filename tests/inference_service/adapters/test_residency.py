"""What is wanted is brought here and kept: policy on a fake loader and engine."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Set

import pytest

from inference_service.adapters import residency as residency_module
from inference_service.adapters.registration import SERVED_FINGERPRINT
from inference_service.adapters.residency import LONGEST_RETRY, HeldState, Residency
from inference_service.adapters.wanted import Wanted, wanted_versions
from inference_service.types import PinOwner, PreparedAdapter, ResidentAdapter
from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.errors import (
    AdapterInvalid,
    AdapterMemory,
    BaseModelConflict,
    EngineUnavailable,
    LoraplexError,
    SourceUnavailable,
)

ON_DEMAND, PRELOAD, PINNED = 1, 2, 3
SIZE = 100


def digest_of(adapter: str, number: int) -> str:
    return "sha256:" + f"{adapter}{number}".encode().hex().ljust(64, "0")


def change(
    name: str,
    residency: int,
    latest: int = 1,
    aliases: dict[str, list[int]] | None = None,
    default_alias: str = "latest",
    is_deleted: bool = False,
) -> registry_pb2.AdapterChange:
    resource = f"namespaces/default/adapters/{name}"
    numbers = sorted({latest, *(number for targets in (aliases or {}).values() for number in targets)})
    return registry_pb2.AdapterChange(
        type=registry_pb2.AdapterChange.TYPE_DELETE if is_deleted else registry_pb2.AdapterChange.TYPE_UPSERT,
        adapter=resources_pb2.Adapter(
            name=resource,
            default_alias=default_alias,
            residency=residency,  # type: ignore[arg-type]
            latest_version=latest,
            aliases=[
                resources_pb2.AdapterAlias(
                    name=f"{resource}/aliases/{alias}",
                    targets=[resources_pb2.AliasTarget(version=number) for number in targets],
                )
                for alias, targets in (aliases or {}).items()
            ],
        ),
        versions=[
            resources_pb2.AdapterVersion(name=f"{resource}/versions/{number}", digest=digest_of(name, number))
            for number in numbers
        ],
    )


class _Replica:
    """A loader and an engine: what was brought where, and what fails."""

    def __init__(self) -> None:
        self.host: set[str] = set()
        self.gpu: dict[str, bool] = {}  # digest: whether it is pinned
        self.kept: list[Set[str]] = []  # of each call
        self.on_disk: set[str] = set()
        self.by_hand: set[str] = set()  # pinned by operators
        self.room = 10 * SIZE
        self.errors: dict[str, LoraplexError] = {}
        self.calls: Counter[str] = Counter()
        self.base_model_conflict: BaseModelConflict | None = None
        self.is_up = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.load_gate = asyncio.Event()
        self.load_gate.set()

    async def prepare(self, reference: str, choice_key: str = "") -> PreparedAdapter:
        self.calls[f"prepare {reference}"] += 1
        await self.gate.wait()
        if error := self.errors.get(reference):
            raise error
        adapter, _, number = reference.removeprefix("default/").partition("@")
        digest = digest_of(adapter, int(number))
        self.host.add(digest)
        return PreparedAdapter(reference, digest, 4, SIZE)

    def in_host(self) -> set[str]:
        return set(self.host)

    def keep_on_disk(self, digests: Set[str]) -> None:
        self.on_disk = set(digests)

    async def load(self, digest: str, *, pinned: bool, prepare_seconds: float) -> None:
        self._check()
        assert prepare_seconds >= 0
        self.calls[f"load {digest}"] += 1
        await self.load_gate.wait()
        if pinned and (error := self.errors.get("pin")):
            raise error
        self.gpu[digest] = pinned

    async def keep_pins(self, digests: Set[str]) -> None:
        self._check()
        self.kept.append(digests)
        self.gpu = {d: pinned and (d in digests or d in self.by_hand) for d, pinned in self.gpu.items()}

    async def residents(self) -> list[ResidentAdapter]:
        self._check()
        pins: dict[bool, tuple[PinOwner, ...]] = {True: ("registry",), False: ()}
        return [ResidentAdapter(digest, SIZE, 4, pins[pinned], 0) for digest, pinned in self.gpu.items()]

    async def free_bytes(self) -> int:
        self._check()
        return self.room - SIZE * len(self.gpu)

    def _check(self) -> None:
        if not self.is_up:
            raise EngineUnavailable("down")


@pytest.fixture
def replica() -> _Replica:
    return _Replica()


@pytest.fixture
async def residency(replica: _Replica, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Residency]:
    monkeypatch.setattr(residency_module, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(residency_module, "FIRST_RETRY", 0.02)
    residency = Residency(replica, replica)
    running = asyncio.create_task(residency.run())
    yield residency
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def _until(condition: "object") -> None:
    async with asyncio.timeout(60):
        while not condition():  # type: ignore[operator]  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0.01)


def test_which_versions_are_wanted() -> None:
    def wanted(*arguments: object, **fields: object) -> list[str]:
        found = wanted_versions(change("a", *arguments, **fields))  # type: ignore[arg-type]
        return [version.reference for version in found]

    assert wanted(ON_DEMAND) == []
    assert wanted(0) == []
    assert wanted(PRELOAD) == ["default/a@1"]
    assert wanted(PINNED, latest=3, aliases={"prod": [1, 2]}) == ["default/a@1", "default/a@2", "default/a@3"]
    assert wanted(PINNED, latest=3, aliases={"prod": [1]}, default_alias="prod") == ["default/a@1"]
    assert wanted_versions(change("a", PINNED)) == (Wanted(digest_of("a", 1), "default/a@1", True),)


async def test_what_is_wanted_comes(residency: Residency, replica: _Replica) -> None:
    residency.changed(change("pre", PRELOAD))
    residency.changed(change("pin", PINNED))
    residency.changed(change("other", ON_DEMAND))
    residency.complete(7)
    assert await residency.settle(60)
    assert replica.gpu == {digest_of("pre", 1): False, digest_of("pin", 1): True}
    assert residency.observed_revision == 7
    assert await residency.states() == {
        digest_of("pre", 1): HeldState("GPU"),
        digest_of("pin", 1): HeldState("GPU", pinned=True),
    }


async def test_preloading_takes_only_what_room_there_is(residency: Residency, replica: _Replica) -> None:
    replica.room = 0
    residency.changed(change("pre", PRELOAD))
    residency.changed(change("pin", PINNED))
    residency.complete(1)
    assert await residency.settle(60)
    assert replica.gpu == {digest_of("pin", 1): True}
    assert (await residency.states())[digest_of("pre", 1)] == HeldState("HOST")


async def test_a_new_version_takes_the_place_of_the_old(residency: Residency, replica: _Replica) -> None:
    residency.changed(change("a", PINNED))
    residency.complete(1)
    await residency.settle(60)
    residency.changed(change("a", PINNED, latest=2))
    await _until(lambda: replica.gpu == {digest_of("a", 1): False, digest_of("a", 2): True})


@pytest.mark.parametrize("ending", [change("a", ON_DEMAND), change("a", PINNED, is_deleted=True)])
async def test_what_is_wanted_no_more_is_no_longer_pinned(
    residency: Residency, replica: _Replica, ending: registry_pb2.AdapterChange
) -> None:
    residency.changed(change("a", PINNED))
    residency.complete(1)
    await residency.settle(60)
    residency.changed(ending)
    await _until(lambda: replica.gpu == {digest_of("a", 1): False})


async def test_a_new_process_ends_pins_that_are_wanted_no_more_once_it_is_told_what_is(
    residency: Residency, replica: _Replica
) -> None:
    """What the process before it has pinned is on the device; the registry may be away for long."""
    stale, wanted = digest_of("stale", 1), digest_of("pin", 1)
    replica.gpu = {stale: True, wanted: True}
    residency.failed()
    assert await residency.settle(60)
    await asyncio.sleep(0.1)
    assert (replica.gpu, replica.kept) == ({stale: True, wanted: True}, [])
    residency.changed(change("pin", PINNED))
    await asyncio.sleep(0.1)
    assert replica.kept == [], "the snapshot has not ended"
    residency.complete(1)
    await _until(lambda: replica.gpu == {stale: False, wanted: True})
    await asyncio.sleep(0.1)
    assert replica.kept == [{wanted}], "told once"


async def test_the_files_of_what_is_pinned_are_kept(residency: Residency, replica: _Replica) -> None:
    by_hand = digest_of("by-hand", 1)
    replica.gpu, replica.by_hand = {by_hand: True, digest_of("other", 1): False}, {by_hand}
    residency.changed(change("pin", PINNED))
    residency.changed(change("pre", PRELOAD))
    residency.complete(1)
    await _until(lambda: replica.on_disk == {by_hand, digest_of("pin", 1)})
    residency.changed(change("pin", ON_DEMAND))
    await _until(lambda: digest_of("pin", 1) not in replica.on_disk)


async def test_pins_are_told_again_to_an_engine_that_did_not_hear(residency: Residency, replica: _Replica) -> None:
    residency.changed(change("pin", PINNED))
    residency.complete(1)
    await residency.settle(60)
    replica.is_up = False
    residency.changed(change("pin", ON_DEMAND))
    await asyncio.sleep(0.1)
    replica.is_up = True
    await _until(lambda: replica.gpu == {digest_of("pin", 1): False})


async def test_a_pinned_one_that_is_lost_comes_back_a_preloaded_one_does_not(
    residency: Residency, replica: _Replica
) -> None:
    residency.changed(change("pre", PRELOAD))
    residency.changed(change("pin", PINNED))
    residency.complete(1)
    await residency.settle(60)
    replica.gpu.clear()
    await _until(lambda: replica.gpu == {digest_of("pin", 1): True})
    await asyncio.sleep(0.1)
    assert replica.gpu == {digest_of("pin", 1): True}


async def test_a_new_engine_gets_everything_again(residency: Residency, replica: _Replica) -> None:
    residency.changed(change("pre", PRELOAD))
    residency.changed(change("pin", PINNED))
    residency.complete(1)
    await residency.settle(60)
    replica.is_up = False
    replica.gpu.clear()
    await asyncio.sleep(0.05)
    replica.is_up = True
    residency.engine_started()
    assert await residency.settle(60)
    assert replica.gpu == {digest_of("pre", 1): False, digest_of("pin", 1): True}


async def test_an_engine_that_starts_while_a_load_is_under_way(residency: Residency, replica: _Replica) -> None:
    """The pin is known all the same, and can be ended."""
    replica.load_gate.clear()
    residency.changed(change("pin", PINNED))
    residency.complete(1)
    await _until(lambda: replica.calls[f"load {digest_of('pin', 1)}"] == 1)
    residency.engine_started()
    replica.load_gate.set()
    assert await residency.settle(60)
    assert replica.gpu == {digest_of("pin", 1): True}
    residency.changed(change("pin", ON_DEMAND))
    await _until(lambda: replica.gpu == {digest_of("pin", 1): False})


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("where", "error", "pause"),
    [
        ("pin", AdapterMemory("pinned adapters leave no room", retry_after=5.0), 5.0),
        ("default/a@1", AdapterMemory("files of pinned adapters fill the disk", retry_after=5.0), 5.0),
        ("default/a@1", AdapterMemory("blobs in use fill the host arena", retry_after=0.5), 1.0),
        ("pin", AdapterMemory("larger than the arena"), 60.0),
        ("default/a@1", SourceUnavailable("down", retry_after=5.0), 60.0),
    ],
)
async def test_room_is_looked_for_as_often_as_it_may_come_and_sources_ever_more_seldom(
    replica: _Replica, monkeypatch: pytest.MonkeyPatch, where: str, error: LoraplexError, pause: float
) -> None:
    monkeypatch.setattr(residency_module, "CHECK_SECONDS", 0.01)
    clock = _Clock()
    residency = Residency(replica, replica, clock)
    running = asyncio.create_task(residency.run())
    replica.errors[where] = error
    residency.changed(change("a", PINNED))
    residency.complete(1)
    tries = "prepare default/a@1"
    for number in range(1, 10):
        await _until(lambda number=number: replica.calls[tries] == number)
        await asyncio.sleep(0.02)  # until the failure is noted
        clock.now += LONGEST_RETRY
    await _until(lambda: replica.calls[tries] == 10)
    await asyncio.sleep(0.05)
    clock.now += pause - 0.1
    await asyncio.sleep(0.05)
    assert replica.calls[tries] == 10, "too soon"
    replica.errors.clear()
    clock.now += 0.2
    await _until(lambda: replica.gpu == {digest_of("a", 1): True})
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_failures_are_told_and_tried_again(residency: Residency, replica: _Replica) -> None:
    replica.errors["default/a@1"] = SourceUnavailable("down")
    residency.changed(change("a", PINNED))
    residency.complete(1)
    await _until(lambda: replica.calls["prepare default/a@1"] >= 3)
    assert (await residency.states())[digest_of("a", 1)] == HeldState("FAILED", reason="SOURCE_UNAVAILABLE")
    replica.errors.clear()
    await _until(lambda: replica.gpu == {digest_of("a", 1): True})


@pytest.mark.parametrize("error", [AdapterInvalid("broken"), AdapterMemory("full")])
async def test_readiness_does_not_wait_for_what_cannot_come(
    residency: Residency, replica: _Replica, error: LoraplexError
) -> None:
    replica.errors["default/a@1"] = error
    residency.changed(change("a", PINNED))
    residency.changed(change("b", PINNED))
    residency.complete(1)
    assert await residency.settle(60)
    assert replica.gpu == {digest_of("b", 1): True}
    assert (await residency.states())[digest_of("a", 1)].reason == error.reason


async def test_readiness_waits_up_to_a_limit(residency: Residency, replica: _Replica) -> None:
    replica.gate.clear()
    residency.changed(change("a", PINNED))
    residency.complete(1)
    assert not await residency.settle(0.2)
    assert (await residency.states())[digest_of("a", 1)].reason == "FETCHING"
    replica.gate.set()
    assert await residency.settle(60)


async def test_readiness_does_not_wait_for_a_registry_that_is_away(residency: Residency) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    waiting = asyncio.create_task(residency.settle(60))
    residency.failed()
    assert await waiting
    assert loop.time() - began < 1


async def test_a_new_snapshot_replaces_what_was_wanted_when_it_is_complete(
    residency: Residency, replica: _Replica
) -> None:
    residency.changed(change("old", PINNED))
    residency.changed(change("both", PINNED))
    residency.complete(1)
    await residency.settle(60)
    residency.start_over()
    residency.changed(change("both", PINNED))
    residency.changed(change("new", PINNED))
    await _until(lambda: len(replica.gpu) == 3)
    residency.complete(2)
    pinned = {digest_of("old", 1): False, digest_of("both", 1): True, digest_of("new", 1): True}
    await _until(lambda: replica.gpu == pinned)


async def test_adapters_of_one_content(residency: Residency, replica: _Replica) -> None:
    """It is pinned as long as one of them is."""
    second = change("b", PRELOAD)
    second.versions[0].digest = digest_of("a", 1)
    residency.changed(change("a", PINNED))
    residency.changed(second)
    residency.complete(1)
    await residency.settle(60)
    assert replica.gpu == {digest_of("a", 1): True}
    residency.changed(change("a", ON_DEMAND))
    await _until(lambda: replica.gpu.get(digest_of("a", 1)) is not True)


async def test_a_pinned_one_is_not_there_until_it_is_on_the_device(residency: Residency, replica: _Replica) -> None:
    """In host memory is enough for a preloaded one only. What failed is told as long as it fails, not its retries."""
    replica.errors["pin"] = AdapterMemory("pinned adapters fill the arena")
    replica.room = 0
    pinned, preloaded = digest_of("pin", 1), digest_of("pre", 1)
    residency.changed(change("pin", PINNED))
    residency.changed(change("pre", PRELOAD))
    residency.complete(1)
    assert await residency.settle(60)
    assert replica.host == {pinned, preloaded}
    replica.load_gate.clear()  # in the midst of a retry
    for _ in range(2):
        tried = replica.calls[f"load {pinned}"]
        states = {pinned: HeldState("FAILED", reason="ADAPTER_MEMORY"), preloaded: HeldState("HOST")}
        assert await residency.states() == states
        await _until(lambda tried=tried: replica.calls[f"load {pinned}"] > tried)
        replica.load_gate.set()
    replica.errors.clear()
    await _until(lambda: replica.gpu == {pinned: True})
    assert await residency.states() == {pinned: HeldState("GPU", pinned=True), preloaded: HeldState("HOST")}


async def test_a_preloaded_one_that_is_pinned_later_is_not_there_on_the_host(
    residency: Residency, replica: _Replica
) -> None:
    replica.room = 0
    residency.changed(change("a", PRELOAD))
    residency.complete(1)
    assert await residency.settle(60)
    replica.gate.clear()
    residency.changed(change("a", PINNED))
    await _until(lambda: replica.calls["prepare default/a@1"] == 2)
    assert await residency.states() == {digest_of("a", 1): HeldState("FAILED", reason="FETCHING")}


async def test_nothing_is_wanted_of_a_registry_with_another_base_model(residency: Residency, replica: _Replica) -> None:
    pinned, preloaded = digest_of("pin", 1), digest_of("pre", 1)
    residency.changed(change("pin", PINNED))
    residency.changed(change("pre", PRELOAD))
    residency.complete(1)
    assert await residency.settle(60)
    replica.base_model_conflict = BaseModelConflict("another tiny", metadata={SERVED_FINGERPRINT: "sha256:own"})
    await _until(lambda: not any(replica.gpu.values()))
    replica.gpu.clear()
    calls = replica.calls.copy()
    residency.changed(change("new", PINNED))
    await _until(lambda: replica.on_disk == set())
    failed = HeldState("FAILED", reason="BASE_MODEL_CONFLICT")
    expected = dict.fromkeys([pinned, preloaded, digest_of("new", 1), "sha256:own"], failed)
    await asyncio.sleep(0.1)
    assert await residency.states() == expected
    assert await residency.settle(60), "readiness does not wait for what does not come"
    assert replica.calls == calls
    replica.base_model_conflict = None
    await _until(lambda: replica.gpu == {pinned: True, digest_of("new", 1): True, preloaded: False})

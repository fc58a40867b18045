"""The host tier against a plain model, and its limits."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_service.adapters.store import HostStore
from inference_service.types import BlobLayout
from shared.errors import AdapterMemory

UNIT = 256


def _layout(units: int) -> BlobLayout:
    return BlobLayout(nbytes=units * UNIT - 16, rank=1, dtype="float32", chunks=())


def _filled(store: HostStore, digest: str, units: int) -> int:
    offset = store.reserve(digest, _layout(units))
    store.commit(digest)
    return offset


def test_the_least_recently_used_goes_first() -> None:
    store = HostStore(4 * UNIT)
    for digest in "abcd":
        _filled(store, digest, 1)
    assert store.find("a") is not None
    _filled(store, "e", 2)
    assert {digest for digest, _ in store.entries()} == {"a", "d", "e"}
    store.check_integrity()


def test_of_equal_blobs_the_least_recently_used_goes_wherever_it_lies() -> None:
    store = HostStore(4 * UNIT)
    for digest in "abcd":
        _filled(store, digest, 1)
    for digest in "bda":
        store.find(digest)
    for digest in "efg":
        _filled(store, digest, 1)
    assert [digest for digest, _ in store.entries()] == ["a", "e", "f", "g"]
    assert store.num_evicted == 3


def test_a_large_blob_costs_old_neighbours_and_spares_recent_ones() -> None:
    """c and e are the oldest, but no neighbours of each other: b goes with c, and not all up to it."""
    store = HostStore(6 * UNIT)
    for digest in "abcdef":
        _filled(store, digest, 1)
    for digest in "abdf":
        store.find(digest)
    assert [digest for digest, _ in store.entries()] == ["c", "e", "a", "b", "d", "f"]
    _filled(store, "g", 2)
    assert [digest for digest, _ in store.entries()] == ["e", "a", "d", "f", "g"]
    store.check_integrity()


def test_an_adapter_larger_than_the_arena_is_refused_and_names_the_flag() -> None:
    store = HostStore(4 * UNIT)
    _filled(store, "a", 2)
    with pytest.raises(AdapterMemory, match="--host-memory") as caught:
        store.reserve("b", _layout(5))
    assert caught.value.retry_after is None
    assert store.find("a") is not None


def test_what_is_in_use_stays_and_nothing_is_evicted_in_vain() -> None:
    store = HostStore(4 * UNIT)
    for digest in "abcd":
        _filled(store, digest, 1)
    assert store.acquire("b") is not None
    with pytest.raises(AdapterMemory) as caught:
        store.reserve("e", _layout(3))
    assert caught.value.retry_after
    assert len(list(store.entries())) == 4
    assert store.release("b")
    assert not store.release("b")
    _filled(store, "e", 3)
    store.check_integrity()


def test_a_dropped_blob_goes_with_its_last_reference() -> None:
    store = HostStore(2 * UNIT)
    _filled(store, "a", 2)
    store.acquire("a")
    store.drop("a")
    assert store.drop("unknown") == 0
    with pytest.raises(AdapterMemory):
        store.reserve("b", _layout(2))
    store.release("a")
    assert store.find("a") is None
    _filled(store, "b", 2)
    store.acquire("b")
    store.release_all()
    store.drop("b")
    assert list(store.entries()) == []
    store.check_integrity()


class HostStoreMachine(RuleBasedStateMachine):
    """Whatever is asked, blobs never overlap, and what is referenced or being filled stays where it is."""

    digests = st.sampled_from([f"d{i}" for i in range(8)])

    def __init__(self) -> None:
        super().__init__()
        self.store = HostStore(16 * UNIT + 100)
        self.fixed: dict[str, int] = {}  # offset of what must not move
        self.filling: set[str] = set()
        self.references: dict[str, int] = {}

    @rule(digest=digests, units=st.integers(1, 18))
    def reserve(self, digest: str, units: int) -> None:
        if digest in self.filling or self.store.find(digest) is not None:
            return
        if units > 16:
            with pytest.raises(AdapterMemory, match="all there is"):
                self.store.reserve(digest, _layout(units))
            return
        try:
            self.fixed[digest] = self.store.reserve(digest, _layout(units))
        except AdapterMemory:
            return
        self.filling.add(digest)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), succeeds=st.booleans())
    def finish(self, data: st.DataObject, succeeds: bool) -> None:
        digest = data.draw(st.sampled_from(sorted(self.filling)))
        self.filling.discard(digest)
        del self.fixed[digest]
        (self.store.commit if succeeds else self.store.abort)(digest)

    @rule(digest=digests)
    def acquire(self, digest: str) -> None:
        blob = self.store.acquire(digest)
        if digest in self.references:
            assert blob is not None
        if blob is not None:
            assert self.fixed.setdefault(digest, blob.offset) == blob.offset
            self.references[digest] = self.references.get(digest, 0) + 1

    @rule(digest=digests)
    def release(self, digest: str) -> None:
        assert self.store.release(digest) == (digest in self.references)
        if digest in self.references:
            self.references[digest] -= 1
            if not self.references[digest]:
                del self.references[digest], self.fixed[digest]

    @rule()
    def release_all(self) -> None:
        self.store.release_all()
        for digest in self.references:
            del self.fixed[digest]
        self.references = {}

    @rule(digest=digests)
    def drop(self, digest: str) -> None:
        self.store.drop(digest)

    @invariant()
    def is_whole(self) -> None:
        self.store.check_integrity()


HostStoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHostStore = HostStoreMachine.TestCase

"""Downloads from stores over sockets: in parts, resumed, bounded, verified, and given up without a trace."""

import hashlib
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.adapters import download
from inference_service.adapters.disk_cache import DiskCache
from inference_service.adapters.download import parts_of
from inference_service.adapters.fetcher import Fetched, Fetcher
from inference_service.adapters.resolution import ResolvedVersion
from shared.digest import FileEntry, manifest_digest
from shared.errors import (
    AdapterMemory,
    CredentialNotAllowed,
    DigestMismatch,
    Draining,
    LoraplexError,
    SourceForbidden,
    SourceNotFound,
    SourceUnavailable,
)
from shared.sources.policy import SourcePolicy
from shared.sources.resolver import PinnedSource, Source
from tests.shared.sources.fault_proxy import Fault
from tests.shared.sources.stores import HubStore, Store

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PART_BYTES = 4 << 20  # a quarter of the service's: servers written in Python send them
BYTES = hashlib.shake_128(b"weights").digest(PART_BYTES + 12_345)
FILES = {CONFIG: b"{}", WEIGHTS: BYTES}
MANIFEST = tuple(FileEntry(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in FILES.items())


@pytest.fixture(scope="module", autouse=True)
def _small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "PART_BYTES", PART_BYTES)
        yield


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[DiskCache]:
    cache = DiskCache(tmp_path / "cache", 64 << 20)
    yield cache
    cache.close()


def pinned(store: Store, name: str = "a") -> PinnedSource:
    """What the registry pins after it has read everything."""
    source = store.open(store.pinned(store.put(name, FILES)))
    for file in (CONFIG, WEIGHTS):
        source.open(file).close()
    return source.pin()


def version(*sources: PinnedSource, namespace: str = "default") -> ResolvedVersion:
    name = f"namespaces/{namespace}/adapters/a/versions/1"
    return ResolvedVersion(name, 1, "uid", manifest_digest(MANIFEST), MANIFEST, sources, rank=4)


def fetcher_of(store: Store, cache: DiskCache) -> Fetcher:
    def opening(source: PinnedSource, namespace: str, policy: SourcePolicy, stopping: threading.Event) -> Source:
        return store.open(source, namespace, policy, stopping)

    return Fetcher(cache, store.policy, opening)


def sent(store: Store) -> int:
    """Bytes that were sent, once the sending has ended."""
    proxies = [store.proxy, getattr(store, "store", store.proxy)]
    until = time.monotonic() + 60
    while not all(proxy.is_idle for proxy in proxies):
        assert time.monotonic() < until
        time.sleep(0.005)
    return store.sent()


def nothing_is_left(cache: DiskCache) -> bool:
    (work,) = (cache.root / "work").iterdir()
    return not list(work.iterdir()) and not list((cache.root / "sha256").iterdir())


def is_what_was_registered(fetched: Fetched) -> bool:
    return {path.name: path.read_bytes() for path in fetched.folder.iterdir()} == FILES


@given(st.lists(st.integers(0, 5 * PART_BYTES), max_size=5))
def test_parts_cover_every_byte_once_in_order(sizes: list[int]) -> None:
    files = [FileEntry(f"f{index}", size, "") for index, size in enumerate(sizes)]
    parts = parts_of(files)
    for file in files:
        mine = [part for part in parts if part.file == file]
        assert [part.start for part in mine] == [0, *(part.end for part in mine)][: len(mine)]
        assert sum(part.end - part.start for part in mine) == file.size
        assert all(0 < part.end - part.start <= PART_BYTES for part in mine)


def test_files_come_in_parts_several_at_once(store: Store, cache: DiskCache) -> None:
    source = pinned(store)
    assert is_what_was_registered(fetcher_of(store, cache).fetch(version(source)))
    proxy = getattr(store, "store", None) or store.proxy
    ranges = {seen.headers["range"] for seen in proxy.seen if "range" in seen.headers}
    assert {f"bytes={start}-{end - 1}" for _, start, end in parts_of([MANIFEST[1]])} <= ranges


@pytest.mark.parametrize("ending", ["reset", "close"])
def test_interrupted_parts_are_resumed(store: Store, cache: DiskCache, ending: str) -> None:
    source = pinned(store)
    before = sent(store)
    store.fault(Fault(times=5, after=700_000, ending=ending))
    assert is_what_was_registered(fetcher_of(store, cache).fetch(version(source)))
    if ending == "close":  # a reset loses what the client has not read yet
        assert sent(store) - before < 1.1 * len(BYTES)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault(flip=True), DigestMismatch),
        (Fault(status=403), SourceForbidden),
        (Fault(status=404), SourceNotFound),
        (Fault(status=500), SourceUnavailable),
        (Fault(after=0), SourceUnavailable),
        (Fault(rate=3_000), SourceUnavailable),
    ],
    ids=["corrupt", "403", "404", "500", "reset", "slow"],
)
def test_a_source_that_goes_wrong(store: Store, cache: DiskCache, fault: Fault, expected: type[LoraplexError]) -> None:
    source = pinned(store)
    store.fault(fault)
    with pytest.raises(LoraplexError) as caught:
        fetcher_of(store, cache).fetch(version(source))
    assert type(caught.value) is expected
    assert caught.value.metadata["uri"] == source.uri
    assert nothing_is_left(cache)
    assert cache.entries() == []


def test_a_source_that_is_down(store: Store, cache: DiskCache) -> None:
    source = pinned(store)
    store.close()
    with pytest.raises(SourceUnavailable) as caught:
        fetcher_of(store, cache).fetch(version(source))
    assert caught.value.retry_after
    assert nothing_is_left(cache)


@pytest.mark.parametrize("content", [BYTES[:-1], BYTES + b"x", BYTES[::-1], b""])
def test_content_replaced_after_registration(store: Store, cache: DiskCache, content: bytes) -> None:
    source = pinned(store)
    if isinstance(store, HubStore):
        store.replace_in_place("a", {**FILES, WEIGHTS: content})
    else:
        store.put("a", {WEIGHTS: content})
    with pytest.raises(DigestMismatch) as caught:
        fetcher_of(store, cache).fetch(version(source))
    assert caught.value.metadata["file"] == WEIGHTS
    assert nothing_is_left(cache)


def test_content_that_vanished(store: Store, cache: DiskCache) -> None:
    source = pinned(store)
    store.remove("a")
    with pytest.raises(SourceNotFound):
        fetcher_of(store, cache).fetch(version(source))
    assert nothing_is_left(cache)


def test_no_byte_is_asked_for_that_the_disk_cannot_hold(store: Store, cache: DiskCache) -> None:
    source = pinned(store)
    before = sent(store)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(AdapterMemory, match="--cache-dir"):
            fetcher_of(store, cache).fetch(version(source))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    small = DiskCache(cache.root / "small", 1_000_000)
    with pytest.raises(AdapterMemory, match="--disk-bytes"):
        fetcher_of(store, small).fetch(version(source))
    small.close()
    assert sent(store) == before


def test_stopping_does_not_wait_for_a_source_that_hangs(store: Store, cache: DiskCache) -> None:
    source = pinned(store)
    store.policy = SourcePolicy({}, store.policy.credentials, patience=store.policy.patience._replace(read=60.0))
    store.fault(Fault(after=1000, ending="stall"))
    fetcher = fetcher_of(store, cache)
    threading.Timer(0.3, fetcher.close).start()
    started = time.monotonic()
    with pytest.raises(Draining):
        fetcher.fetch(version(source))
    assert time.monotonic() - started < 60, "as long as a read waits"
    assert nothing_is_left(cache)


def test_the_next_source_has_what_the_first_has_not(hub: Any, s3: Any, cache: DiskCache) -> None:
    first, second = pinned(hub), pinned(s3)._replace(credential_ref="s3")
    credentials = {**hub.policy.credentials, "s3": s3.policy.credentials["test"]}
    policy = SourcePolicy({}, credentials, patience=hub.policy.patience)
    hub.fault(Fault(flip=True))
    assert is_what_was_registered(Fetcher(cache, policy).fetch(version(first, second)))


def test_a_replica_checks_credentials_and_namespaces_itself(store: Store, cache: DiskCache) -> None:
    source = pinned(store)
    theirs = store.policy.credentials["test"]
    narrow = type(theirs)(
        theirs.scheme, theirs.secret, ("team",), theirs.prefixes, theirs.endpoint, theirs.region, theirs.key_id
    )
    store.policy = SourcePolicy({}, {"test": narrow}, patience=store.policy.patience)
    fetcher, before = fetcher_of(store, cache), sent(store)
    with pytest.raises(CredentialNotAllowed):
        fetcher.fetch(version(source, namespace="other"))
    with pytest.raises(CredentialNotAllowed):
        fetcher.fetch(version(source._replace(credential_ref="nosuch"), namespace="team"))
    assert sent(store) == before
    assert is_what_was_registered(fetcher.fetch(version(source, namespace="team")))


def test_slow_sources_take_nothing_from_a_fast_one(hub: Any, s3: Any, cache: DiskCache) -> None:
    slow, fast = pinned(hub), pinned(s3)
    hub.policy = SourcePolicy({}, hub.policy.credentials, patience=hub.policy.patience._replace(least_rate=1.0))
    hub.fault(Fault(rate=20_000))
    slow_caches = [DiskCache(cache.root / f"slow{index}", 64 << 20) for index in range(8)]
    slow_fetchers = [fetcher_of(hub, each) for each in slow_caches]
    with ThreadPoolExecutor(9) as pool:
        waiting = [pool.submit(each.fetch, version(slow)) for each in slow_fetchers]
        time.sleep(0.2)
        assert is_what_was_registered(pool.submit(fetcher_of(s3, cache).fetch, version(fast)).result(60))
        assert not any(each.done() for each in waiting)
        for each in slow_fetchers:
            each.close()
        assert all(isinstance(each.exception(), Draining) for each in waiting)
    for each in slow_caches:
        each.close()


def test_a_plugins_mistake_is_not_taken_for_the_sources(hub: Any, cache: DiskCache) -> None:
    class Broken:
        def open_range(self, name: str, start: int, end: int) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        download.download(Broken(), MANIFEST, cache.root / "work", "x://", threading.Event())  # type: ignore[arg-type]


def test_a_plugin_that_never_ends_a_read_is_given_up(tmp_path: Path) -> None:
    gate = threading.Event()

    class Endless:
        def open_range(self, name: str, start: int, end: int) -> Any:
            gate.wait(30)

    try:
        with pytest.raises(SourceUnavailable, match="sent nothing") as caught:
            download.download(Endless(), MANIFEST, tmp_path, "x://", threading.Event(), stall_seconds=0.2)  # type: ignore[arg-type]
        assert caught.value.retry_after
    finally:
        gate.set()

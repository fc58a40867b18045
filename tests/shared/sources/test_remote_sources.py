"""What holds for the Hub, S3 and plugins alike: pins, ranges, and every way in which a source goes wrong."""

import dataclasses
import threading
import time

import pytest

from shared.errors import (
    CredentialNotAllowed,
    DigestMismatch,
    Draining,
    LoraplexError,
    SourceForbidden,
    SourceNotFound,
    SourceUnavailable,
)
from shared.sources.policy import SourcePolicy
from shared.sources.remote import HEAD_BYTES
from shared.sources.resolver import RangedSource, Source
from tests.shared.sources.fault_proxy import Fault
from tests.shared.sources.stores import IMPATIENT, HubStore, S3Store, Store, WebStore

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BYTES = bytes(range(256)) * 2048  # 512 KiB
FILES = {CONFIG: b"{}", WEIGHTS: BYTES}


def whole(source: Source, name: str = WEIGHTS) -> bytes:
    with source.open(name) as file:
        return b"".join(iter(lambda: file.read(100_000), b""))


def part(source: Source, start: int, end: int) -> bytes:
    assert isinstance(source, RangedSource)
    with source.open_range(WEIGHTS, start, end) as file:
        assert file.size == len(BYTES)
        return b"".join(iter(lambda: file.read(100_000), b""))


def test_a_folder_is_listed_read_and_pinned(store: Store) -> None:
    uri = store.put("a", FILES)
    source = store.open(store.pinned(uri))
    assert source.list() == [CONFIG, WEIGHTS]
    assert whole(source, CONFIG) == b"{}"
    assert whole(source) == BYTES
    pinned = source.pin()
    assert pinned.credential_ref == "test"
    assert pinned.revision or [item.path for item in pinned.objects] == [CONFIG, WEIGHTS]
    again = store.open(pinned)
    assert whole(again) == BYTES
    assert again.pin() == pinned
    for start, end in [(0, 1), (5, 70_000), (len(BYTES) - 1, len(BYTES)), (0, len(BYTES))]:
        assert part(again, start, end) == BYTES[start:end]


def test_a_file_that_is_refused_for_its_head_is_not_downloaded(store: Store) -> None:
    source = store.open(store.pinned(store.put("a", FILES)))
    with source.open(WEIGHTS) as file:
        assert file.size == len(BYTES)
        assert file.read(1000) == BYTES[:1000]
    assert store.sent() <= HEAD_BYTES


@pytest.mark.parametrize("ending", ["reset", "close"])
def test_an_interrupted_body_goes_on_where_it_stopped(store: Store, ending: str) -> None:
    source = store.open(store.pinned(store.put("a", FILES)))
    store.fault(Fault(WEIGHTS if not isinstance(store, HubStore) else "", 4, after=100_000, ending=ending))
    assert part(source, 0, len(BYTES)) == BYTES
    assert store.sent() < 1.3 * len(BYTES)


def test_a_server_without_ranges(store: Store) -> None:
    source = store.open(store.pinned(store.put("a", FILES)))
    store.fault(Fault(ranges=False))
    assert part(source, 100_000, 300_000) == BYTES[100_000:300_000]
    store.fault(Fault(times=1, after=200_000))
    assert whole(source) == BYTES


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (403, SourceForbidden),
        (404, SourceNotFound),
        (429, SourceUnavailable),
        (500, SourceUnavailable),
        (503, SourceUnavailable),
    ],
)
def test_a_server_that_refuses(store: Store, status: int, expected: type[LoraplexError]) -> None:
    uri = store.put("a", FILES)
    source = store.open(store.pinned(uri))
    store.fault(Fault(status=status))
    with pytest.raises(expected) as caught:
        source.open(WEIGHTS)
    assert type(caught.value) is expected
    assert caught.value.metadata == {"uri": uri, "file": WEIGHTS}
    assert WEIGHTS in caught.value.message or "repository" in caught.value.message
    assert bool(caught.value.retry_after) == (expected is SourceUnavailable)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_refuses_for_a_moment(store: Store, status: int) -> None:
    source = store.open(store.pinned(store.put("a", FILES)))
    store.fault(Fault(times=2, status=status))
    assert whole(source) == BYTES


def test_a_server_that_asks_for_long_patience(store: Store) -> None:
    source = store.open(store.pinned(store.put("a", FILES)))
    store.fault(Fault(status=429, headers=(("Retry-After", "77"),)))
    started = time.monotonic()
    with pytest.raises(SourceUnavailable) as caught:
        source.open(WEIGHTS)
    assert caught.value.retry_after == 77
    assert time.monotonic() - started < 77


def test_a_server_that_is_down(store: Store) -> None:
    source = store.open(store.pinned(store.put("a", FILES)))
    store.close()
    with pytest.raises(SourceUnavailable) as caught:
        source.open(WEIGHTS)
    assert caught.value.retry_after
    assert "127.0.0.1" not in caught.value.message or caught.value.metadata["uri"] in caught.value.message


def test_a_body_that_stalls_is_asked_for_again(store: Store) -> None:
    source = store.open(store.pinned(store.put("a", FILES)))
    store.fault(Fault(times=1, after=100_000, ending="stall"))
    assert part(source, 0, len(BYTES)) == BYTES


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_source_that_is_slower_than_anybody_waits_for(store: Store, has_ranges: bool) -> None:
    slow = dataclasses.replace(store.policy, patience=IMPATIENT._replace(pace=0.2, stall=0.0))
    source = store.open(store.pinned(store.put("a", FILES)), policy=slow)
    store.fault(Fault(rate=20, ranges=has_ranges))  # single bytes, so that no read waits in vain
    with pytest.raises(SourceUnavailable, match="too slow") as caught:
        part(source, 100_000, len(BYTES))
    assert caught.value.retry_after
    assert caught.value.metadata["file"] == WEIGHTS


def left_behind() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "source"]


def test_an_answer_that_never_quite_begins(store: Store) -> None:
    uri = store.put("a", FILES)
    impatient = dataclasses.replace(store.policy, patience=IMPATIENT._replace(answer=0.3, stall=0.0))
    source = store.open(store.pinned(uri))
    assert CONFIG in source.list()
    store.proxy.faults.append(Fault(dripping=True))
    asked = [lambda: store.open(source.pin(), policy=impatient).open(WEIGHTS)]
    if not isinstance(store, WebStore):
        asked.append(lambda: store.open(store.pinned(uri), policy=impatient).list())
    for ask in asked:
        with pytest.raises(SourceUnavailable, match=r"too slow|not reachable") as caught:
            ask()
        assert caught.value.retry_after
        assert caught.value.metadata["uri"].rstrip("/") == uri.rstrip("/")
    store.close()
    for thread in left_behind():
        thread.join(30)  # none outlives its connection
    assert not left_behind()


def test_nobody_waits_any_more(store: Store) -> None:
    stopping = threading.Event()
    source = store.open(store.pinned(store.put("a", FILES)), stopping=stopping)
    with source.open(WEIGHTS) as file:
        assert file.read(10)
        stopping.set()
        with pytest.raises(Draining):
            file.read(10)


def test_content_replaced_after_pinning(store: Store) -> None:
    uri = store.put("a", FILES)
    source = store.open(store.pinned(uri))
    assert whole(source) == BYTES
    pinned = source.pin()
    time.sleep(0.01)
    store.put("a", {**FILES, WEIGHTS: BYTES[::-1]})
    if isinstance(store, HubStore):
        assert whole(store.open(pinned)) == BYTES  # the commit is still there
    else:
        with pytest.raises(DigestMismatch) as caught:
            whole(store.open(pinned))
        assert caught.value.metadata == {"uri": pinned.uri, "file": WEIGHTS}


def test_content_replaced_while_it_is_read(store: Store) -> None:
    source = store.open(store.pinned(store.put("a", FILES)))
    with source.open(WEIGHTS) as file:
        assert file.read(1000)
        time.sleep(0.01)
        changed = {**FILES, WEIGHTS: BYTES[::-1]}
        if isinstance(store, HubStore):
            store.replace_in_place("a", changed)
        else:
            store.put("a", changed)
        with pytest.raises((DigestMismatch, SourceUnavailable)):
            list(iter(lambda: file.read(100_000), b""))


def test_a_folder_that_vanished(store: Store) -> None:
    uri = store.put("a", FILES)
    source = store.open(store.pinned(uri))
    assert whole(source) == BYTES
    store.remove("a")
    with pytest.raises(SourceNotFound):
        whole(store.open(source.pin()))
    with pytest.raises(SourceNotFound):
        whole(store.open(store.pinned(uri)))


def test_an_empty_file(store: Store) -> None:
    uri = store.put("a", {**FILES, WEIGHTS: b""})
    with store.open(store.pinned(uri)).open(WEIGHTS) as file:
        assert file.size == 0
        assert file.read(10) == b""


def test_only_who_may_uses_a_credential(store: Store) -> None:
    uri = store.put("a", FILES)
    theirs = store.policy.credentials["test"]
    narrow = type(theirs)(
        theirs.scheme, theirs.secret, ("team",), (uri.rstrip("/"),), theirs.endpoint, theirs.region, theirs.key_id
    )
    policy = SourcePolicy({}, {"test": narrow}, patience=store.policy.patience)
    assert whole(store.open(store.pinned(uri), "team", policy)) == BYTES
    for source, namespace in [
        (store.pinned(uri), "other"),
        (store.pinned(uri.rstrip("/") + "b"), "team"),
        (store.pinned(uri.rstrip("/") + "/../b"), "team"),
        (store.pinned(uri.rstrip("/") + "/%2e%2e/b"), "team"),
        (store.pinned(uri)._replace(credential_ref="nosuch"), "team"),
    ]:
        with pytest.raises(CredentialNotAllowed) as caught:
            store.open(source, namespace, policy)
        assert caught.value.metadata["credential_ref"] == source.credential_ref
    messages = set()
    for name in ("test", "nosuch"):
        with pytest.raises(CredentialNotAllowed) as caught:
            store.open(store.pinned(uri)._replace(credential_ref=name), "other", policy)
        messages.add(caught.value.message.replace(name, "NAME"))
    assert len(messages) == 1  # nobody learns which names exist


def test_pins_of_a_bucket_with_versions(s3_url: str) -> None:
    store = S3Store(s3_url, has_versions=True)
    try:
        source = store.open(store.pinned(store.put("a", FILES)))
        assert whole(source) == BYTES
        pinned = source.pin()
        assert all(item.version_id and item.etag for item in pinned.objects)
        store.put("a", {**FILES, WEIGHTS: b"new"})
        store.client.delete_object(Bucket=store.bucket, Key=f"adapters/a/{WEIGHTS}")
        assert whole(store.open(pinned)) == BYTES
        (weights,) = (item for item in pinned.objects if item.path == WEIGHTS)
        version = {"VersionId": weights.version_id}
        store.client.delete_object(Bucket=store.bucket, Key=f"adapters/a/{WEIGHTS}", **version)
        with pytest.raises(SourceNotFound):
            whole(store.open(pinned))
    finally:
        store.close()

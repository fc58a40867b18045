"""Downloads from real folders: what is not exactly what was registered never gets into the cache."""

import errno
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_service.adapters.disk_cache import DiskCache
from inference_service.adapters.fetcher import CacheUnavailable, Fetcher
from inference_service.adapters.resolution import of_another_process
from shared.adapter_format.files import WEIGHTS
from shared.errors import (
    AdapterMemory,
    DigestMismatch,
    Draining,
    LoraplexError,
    SourceForbidden,
    SourceNotFound,
    SourceUnavailable,
)
from shared.sources.policy import SourcePolicy
from shared.sources.resolver import PinnedSource, Source, open_source
from tests.inference_service.adapters.small_adapters import flip_a_bit, manifest, version_of, write_adapter


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[DiskCache]:
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    yield cache
    cache.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "root" / "a")
    return tmp_path / "root"


def _fetcher(cache: DiskCache, root: Path, opened: list[str] | None = None) -> Fetcher:
    def opening(pinned: PinnedSource, namespace: str, policy: SourcePolicy, stopping: threading.Event) -> Source:
        if opened is not None:
            opened.append(pinned.uri)
        return open_source(pinned, namespace, policy, stopping, reader="replica")

    return Fetcher(cache, SourcePolicy({"root": root}), opening)


def _assert_nothing_left(tmp_path: Path) -> None:
    assert list((tmp_path / "cache" / "sha256").iterdir()) == []
    (work,) = (tmp_path / "cache" / "work").iterdir()
    assert list(work.iterdir()) == []


def test_fetched_once_and_exactly(cache: DiskCache, root: Path) -> None:
    opened: list[str] = []
    (root / "a" / "README.md").write_text("not in the manifest")
    version = version_of(root / "a")._replace(files=tuple(f for f in manifest(root / "a") if f.path != "README.md"))
    fetcher = _fetcher(cache, root, opened)
    folder, is_verified = fetcher.fetch(version)
    assert is_verified
    assert folder.name == version.digest.removeprefix("sha256:")
    assert manifest(folder) == version.files
    assert fetcher.fetch(version) == (folder, False)
    assert opened == ["file://root/a"]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("bit flipped", DigestMismatch),
        ("truncated", DigestMismatch),
        ("longer", DigestMismatch),
        ("a file vanished", SourceNotFound),
        ("the folder vanished", SourceNotFound),
        ("a symbolic link out of the root", SourceForbidden),
        ("a FIFO", SourceForbidden),
    ],
)
def test_a_source_that_changed(
    cache: DiskCache, root: Path, tmp_path: Path, how: str, expected: type[LoraplexError]
) -> None:
    version = version_of(root / "a")
    weights = root / "a" / WEIGHTS
    match how:
        case "bit flipped":
            flip_a_bit(weights)
        case "truncated":
            os.truncate(weights, 100)
        case "longer":
            weights.write_bytes(weights.read_bytes() * 2)
        case "a file vanished":
            weights.unlink()
        case "the folder vanished":
            (root / "a").rename(root / "b")
        case "a symbolic link out of the root":
            weights.rename(tmp_path / "outside")
            weights.symlink_to(tmp_path / "outside")
        case "a FIFO":
            weights.unlink()
            os.mkfifo(weights)
    with pytest.raises(expected) as caught:
        _fetcher(cache, root).fetch(version)
    assert caught.value.metadata["uri"] == "file://root/a"
    _assert_nothing_left(tmp_path)


def test_the_next_source_is_tried_and_the_most_telling_failure_told(cache: DiskCache, root: Path) -> None:
    write_adapter(root / "bad")
    flip_a_bit(root / "bad" / WEIGHTS)
    uris = ["file://root/gone", "file://elsewhere/a", "ftp://x", "file://root/bad"]
    with pytest.raises(DigestMismatch):
        _fetcher(cache, root).fetch(version_of(root / "a", uris=uris))
    with pytest.raises(SourceNotFound, match="no source"):
        _fetcher(cache, root).fetch(version_of(root / "a", uris=[]))
    assert _fetcher(cache, root).fetch(version_of(root / "a", uris=[*uris, "file://root/a"])).folder.is_dir()


def test_a_full_disk(cache: DiskCache, root: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(AdapterMemory) as caught:
            _fetcher(cache, root).fetch(version_of(root / "a"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.retry_after
    _assert_nothing_left(tmp_path)


def test_a_cache_that_cannot_be_written(cache: DiskCache, root: Path, tmp_path: Path) -> None:
    (tmp_path / "cache" / "sha256").rmdir()
    opened: list[str] = []
    with pytest.raises(CacheUnavailable) as caught:
        _fetcher(cache, root, opened).fetch(version_of(root / "a", uris=["file://root/a", "file://root/a/"]))
    assert f"the disk cache {tmp_path / 'cache'} (--cache-dir) cannot be written" in caught.value.message
    assert "file://" not in caught.value.message
    assert caught.value.metadata == {"tier": "disk", "cache_dir": str(tmp_path / "cache")}
    assert opened == ["file://root/a"]


class _SmallVolume(DiskCache):
    """A volume with room for one adapter."""

    def install(self, digest: str, folder: Path, nbytes: int) -> tuple[Path, bool]:
        if self.entries():
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().install(digest, folder, nbytes)


def test_a_volume_that_is_full_before_the_budget_makes_room_once(root: Path, tmp_path: Path) -> None:
    cache = _SmallVolume(tmp_path / "small", 1 << 20)
    fetcher = _fetcher(cache, root)
    first = fetcher.fetch(version_of(root / "a")).folder
    write_adapter(root / "b", seed=1)
    second = version_of(root / "b")
    with cache.held(version_of(root / "a").digest), pytest.raises(AdapterMemory, match="--cache-dir"):
        fetcher.fetch(second)
    assert first.is_dir()
    assert fetcher.fetch(second).folder.is_dir()
    assert not first.exists()
    assert cache.names.of(second.digest) == {second.name: 4}
    cache.close()


def test_stopping_ends_a_download(cache: DiskCache, root: Path) -> None:
    fetcher = _fetcher(cache, root)
    fetcher.close()
    with pytest.raises(Draining):
        fetcher.fetch(version_of(root / "a"))


def test_what_another_process_prepared_and_is_gone_may_be_asked_for_again(cache: DiskCache, root: Path) -> None:
    version = version_of(root / "a")
    with pytest.raises(SourceUnavailable) as caught:
        _fetcher(cache, root).fetch(of_another_process(version.digest, version.files), lambda _: None)
    assert caught.value.retry_after
    with pytest.raises(SourceNotFound):
        _fetcher(cache, root).fetch(version._replace(sources=()), lambda _: None)

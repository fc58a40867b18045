import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from inference_service.adapters.disk_cache import DiskCache
from shared.digest import FileEntry
from shared.errors import AdapterMemory


def _digest(number: int) -> str:
    return f"sha256:{number:064x}"


def _files(size: int) -> list[FileEntry]:
    return [FileEntry("f", size, "0" * 64)]


def _put(cache: DiskCache, number: int, size: int = 10) -> Path:
    with cache.new_folder(size) as folder:
        (folder / "f").write_bytes(b"x" * size)
        return cache.install(_digest(number), folder, size)[0]


def test_the_least_recently_used_goes_first_and_what_is_held_stays(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 30)
    folders = [_put(cache, number) for number in range(3)]
    assert cache.find(_digest(0), _files(10)) == folders[0]
    with cache.held(_digest(1)):
        _put(cache, 3)
    assert [folder.exists() for folder in folders] == [True, True, False]
    assert [digest for digest, _ in cache.entries()] == [_digest(1), _digest(0), _digest(3)]
    with cache.held(_digest(0)), cache.held(_digest(1)), cache.held(_digest(3)):
        with pytest.raises(AdapterMemory) as caught:
            _put(cache, 4)
        assert caught.value.retry_after
    with pytest.raises(AdapterMemory, match="--disk-bytes") as caught:
        _put(cache, 5, 31)
    assert caught.value.retry_after is None
    cache.close()
    assert list((tmp_path / "work").iterdir()) == []


def test_what_is_pinned_stays_and_the_rest_has_what_is_left(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 30)
    folders = [_put(cache, number) for number in range(3)]
    cache.keep({_digest(0), _digest(1), _digest(9)})
    _put(cache, 3)
    assert [folder.exists() for folder in folders] == [True, True, False]
    cache.keep({_digest(0), _digest(1), _digest(4)})
    _put(cache, 4)
    with pytest.raises(AdapterMemory, match=r"--residency on-demand.*adapter unload NAME.*--disk-bytes") as caught:
        _put(cache, 5)
    assert caught.value.retry_after == 5.0
    cache.keep({_digest(0)})
    in_use = pytest.raises(AdapterMemory, match="in use and the pinned ones")
    with cache.held(_digest(1)), cache.held(_digest(4)), in_use as caught:
        _put(cache, 5)
    assert caught.value.retry_after
    cache.keep(set())
    _put(cache, 5)
    assert [folder.exists() for folder in folders] == [False, True, False]
    cache.close()


def test_a_restart_keeps_order_and_budget(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1000)
    for number in range(3):
        os.utime(_put(cache, number), (number, number))
    cache.find(_digest(0), _files(10))
    cache.close()
    (tmp_path / "sha256" / "notes.txt").write_text("not ours")
    again = DiskCache(tmp_path, 20)
    assert [digest for digest, _ in again.entries()] == [_digest(2), _digest(0)]
    again.close()


@pytest.mark.parametrize("damage", ["missing", "short", "extra", "gone"])
def test_an_incomplete_folder_is_not_used(tmp_path: Path, damage: str) -> None:
    cache = DiskCache(tmp_path, 1000)
    folder = _put(cache, 1)
    match damage:
        case "missing":
            (folder / "f").unlink()
        case "short":
            os.truncate(folder / "f", 3)
        case "extra":
            (folder / "g").touch()
        case "gone":
            folder.rename(tmp_path / "elsewhere")
    assert cache.find(_digest(1), _files(10)) is None
    assert not folder.exists()
    assert cache.entries() == []
    cache.close()


def test_what_a_crash_left_is_swept_and_what_a_living_process_writes_is_not(tmp_path: Path) -> None:
    crashing = f"""
        import os
        from pathlib import Path
        from inference_service.adapters.disk_cache import DiskCache
        cache = DiskCache(Path({str(tmp_path)!r}), 1000)
        with cache.new_folder(10) as folder:
            (folder / "f").write_bytes(b"half")
            os._exit(1)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(crashing)], check=False)
    left = list((tmp_path / "work").iterdir())
    assert len(left) == 1
    one = DiskCache(tmp_path, 1000)
    assert not left[0].exists()
    with one.new_folder(10) as folder:
        two = DiskCache(tmp_path, 1000)
        (folder / "f").write_bytes(b"x" * 10)
        assert one.install(_digest(1), folder, 10)[1]
    assert two.find(_digest(1), _files(10)) is not None
    with two.new_folder(10) as folder:
        (folder / "f").write_bytes(b"y" * 10)
        target, is_ours = two.install(_digest(1), folder, 10)
    assert (target / "f").read_bytes() == b"x" * 10, "the slower of two processes keeps the faster one's folder"
    assert not is_ours
    one.discard(_digest(1))
    assert two.find(_digest(1), _files(10)) is None
    one.close()
    two.close()


def test_a_file_in_a_folder_s_place_is_deleted(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1000)
    folder = tmp_path / "sha256" / f"{1:064x}"
    for make in (Path.touch, lambda path: path.symlink_to(path)):
        make(folder)
        assert cache.find(_digest(1), _files(10)) is None
        assert not folder.is_symlink()
        assert _put(cache, 1) == folder
        cache.discard(_digest(1))
    cache.close()
    assert list((tmp_path / "work").iterdir()) == []


def test_names_outlive_files_and_restarts(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1000)
    cache.names.remember(_digest(1), "namespaces/default/adapters/a/versions/1", 8)
    cache.names.remember(_digest(1), "namespaces/default/adapters/b/versions/2", 8)
    cache.close()
    (tmp_path / "names" / f"{2:064x}.json").write_text("{broken")
    again = DiskCache(tmp_path, 1000)
    assert again.names.of(_digest(1)) == {
        "namespaces/default/adapters/a/versions/1": 8,
        "namespaces/default/adapters/b/versions/2": 8,
    }
    assert again.names.of(_digest(2)) == again.names.of(_digest(3)) == {}
    again.close()

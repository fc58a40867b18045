"""Run folders: private, short, removed at the end, and removed after a supervisor that was killed."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from inference_service.run_folder import remove_stale, run_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the temporary folder of this process and of its children, and short as /tmp is."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("inference_service.run_folder._FALLBACK", str(tmp_path))
    monkeypatch.setattr("inference_service.run_folder._MAX_IPC_PATH", 1 << 10)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def add_socket(folder: Path, name: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        listener.bind(f"/proc/self/fd/{fd}/{name}")
        os.close(fd)


def killed_supervisor(temporary: Path) -> Path:
    code = """
import inference_service.run_folder as module, os, signal
module._MAX_IPC_PATH = 1 << 10
with module.run_folder() as folder:
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    folder = Path(found.stdout.strip())
    add_socket(folder, "engine.sock")
    assert folder.parent == temporary
    return folder


def test_it_is_private_and_gone_at_the_end(temporary: Path) -> None:
    with run_folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        add_socket(folder, "engine.sock")
    assert list(temporary.iterdir()) == []


def test_its_path_is_short_enough_for_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with run_folder() as folder:
        assert len(str(folder)) < 60
        assert list(long.iterdir()) == []


def test_the_next_supervisor_removes_what_a_killed_one_left(temporary: Path) -> None:
    stale = killed_supervisor(temporary)
    assert sorted(path.name for path in stale.iterdir()) == ["engine.sock", "supervisor.lock"]
    with run_folder() as living:
        assert not stale.exists()
        remove_stale(temporary)  # another supervisor's start
        assert (living / "supervisor.lock").exists()


def test_nothing_else_is_removed(temporary: Path) -> None:
    unmarked, linked = temporary / "loraplex-unmarked", temporary / "loraplex-link"
    unmarked.mkdir(0o700)
    (unmarked / "precious").touch()
    full = killed_supervisor(temporary)
    (full / "precious").touch()
    shared = killed_supervisor(temporary)
    shared.chmod(0o770)  # not as we make them
    linked.symlink_to(unmarked)
    (temporary / "loraplex-file").touch()
    remove_stale(temporary)
    remove_stale(temporary / "none")
    assert {p.name for p in temporary.iterdir()} >= {unmarked.name, linked.name, "loraplex-file", shared.name}
    assert (unmarked / "precious").exists()
    assert (shared / "engine.sock").exists()
    assert (full / "precious").exists()

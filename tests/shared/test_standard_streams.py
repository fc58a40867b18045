import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os
from shared.standard_streams import fill_standard_streams
fill_standard_streams()
fill_standard_streams()
file = os.open("/dev/zero", os.O_RDONLY)
names = [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)]
with open("found", "w") as found:
    json.dump([names, file, [os.get_inheritable(fd) for fd in (0, 1, 2)]], found)
"""


@pytest.mark.parametrize("closed", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_those_that_are_closed_are_dev_null_and_the_others_are_let_be(tmp_path: Path, closed: tuple[int, ...]) -> None:
    shell = 'exec "$0" -c "$1" ' + " ".join(f"{fd}>&-" for fd in closed)
    command = ["sh", "-c", shell, sys.executable, PROGRAM]
    with (tmp_path / "open").open("w+") as file:
        subprocess.run(
            command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path.cwd())}, stdin=file, stdout=file,
            stderr=file, timeout=60, check=True,
        )  # fmt: skip
    names, next_fd, inheritable = json.loads((tmp_path / "found").read_text())
    assert names == [os.devnull if fd in closed else str(tmp_path / "open") for fd in range(3)]
    assert next_fd > 2
    assert inheritable == [True, True, True]

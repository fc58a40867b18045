"""No step compiles a kernel: the warm-up has launched every variant, of whatever shape the server is."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
MOST = 60  # of a server; each takes a start without a kernel cache half a second of a core


def test_steps_need_no_variant_that_the_warm_up_has_not_compiled() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.inference_service.engine.variants"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert {server: variants["late"] for server, variants in found.items()} == {server: [] for server in found}
    assert all(20 < variants["warm"] <= MOST for variants in found.values())

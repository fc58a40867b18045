"""What must be so before any test imports a library, and a collection of tests that costs little."""

import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
LONG = ("kinds", "e2e", "registry_service", "kernels")
# They start processes, and wait for each of them up to a minute.
PATIENT = ("kinds", "e2e", "registry_service", "inference_service", "loraplex", "examples", "deploy", "shared")
PATIENT_SECONDS = 300

# Libraries read these when they are first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests run beside each other: OpenMP's threads would wait for cores that the neighbours have.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Services are started dozens of times; each would compile what it imports where the shell forbids to keep that.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts its background jobs deaf to Ctrl-C, and so would be every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every run tries the same examples, however slow the machine is; `--hypothesis-profile=default` looks for others.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pause",
        type=float,
        default=0.2,
        help="seconds between two requests of a line of the traffic beside faults; the shorter, the less of the machine"
        " is left to the tests that run at the same time",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Of the million objects that imports and thousands of tests leave, none is garbage: no collector looks at them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup() -> None:
    """Torch's random numbers are the same in every run, whatever ran before in this process."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folders whose files take longest come first, so that no worker is left with one at the end."""
    items.sort(key=lambda item: _place(_folder(item)))
    for item in items:
        if _folder(item) in PATIENT and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PATIENT_SECONDS))


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


def _place(folder: str) -> int:
    return LONG.index(folder) if folder in LONG else len(LONG)

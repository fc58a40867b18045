"""Fixtures of the end-to-end tests: the real model, the trained adapters, both services over sockets."""

import pytest

from examples.prompts import ADAPTERS
from examples.stack import ADAPTERS as ADAPTERS_FOLDER
from examples.stack import MODEL
from tests.e2e import traffic
from tests.e2e.oracle import Oracle
from tests.e2e.tiny_stack import TinyWorld, build


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle(MODEL, {a.name: ADAPTERS_FOLDER / a.name for a in ADAPTERS})


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """A tiny base model and enough adapters for every test to have its own."""
    return build(tmp_path_factory.mktemp("tiny"), num_contents=26)


@pytest.fixture(autouse=True)
def pause(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traffic is as dense as this run wants it."""
    monkeypatch.setattr(traffic, "PAUSE_SECONDS", request.config.getoption("--pause"))

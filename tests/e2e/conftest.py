"""Fixtures of the end-to-end tests: the real model, the trained adapters, both services over sockets."""

import pytest

from examples.prompts import ADAPTERS
from examples.stack import ADAPTERS as ADAPTERS_FOLDER
from examples.stack import MODEL
from tests.e2e.oracle import Oracle


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle(MODEL, {a.name: ADAPTERS_FOLDER / a.name for a in ADAPTERS})

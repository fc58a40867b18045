from collections.abc import AsyncIterator

import pytest

from tests.inference_service.adapters.fake_registry import FakeRegistry


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    fake = FakeRegistry()
    await fake.start()
    yield fake
    await fake.stop()

from collections.abc import AsyncIterator

import pytest

from tests.inference_service.adapters.fake_registry import FakeRegistry
from tests.shared.sources.store_fixtures import hub, s3, s3_url, store, web

__all__ = ["hub", "registry", "s3", "s3_url", "store", "web"]


@pytest.fixture
async def registry() -> AsyncIterator[FakeRegistry]:
    fake = FakeRegistry()
    await fake.start()
    yield fake
    await fake.stop()

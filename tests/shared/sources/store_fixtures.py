"""Fixtures for tests that read from stores; what only they need is imported when they are used."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """A real S3 server; it knows no limits and checks no signatures."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def hub() -> Iterator[Any]:
    from tests.shared.sources.stores import HubStore

    store = HubStore()
    yield store
    store.close()


@pytest.fixture
def s3(s3_url: str) -> Iterator[Any]:
    from tests.shared.sources.stores import S3Store

    store = S3Store(s3_url)
    yield store
    store.close()


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from tests.shared.sources.stores import WebStore

    store = WebStore(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(store.certificate))
    yield store
    store.close()


@pytest.fixture(params=["hub", "s3", "web"])
def store(request: pytest.FixtureRequest) -> Any:
    """Each of them."""
    return request.getfixturevalue(request.param)


__all__ = ["hub", "s3", "s3_url", "store", "web"]

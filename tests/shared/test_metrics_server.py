"""A scraper that leaves early, and a port that is taken."""

import logging
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shared.errors import InvalidArgument
from shared.metrics import MetricsServer

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


class AfterTheClient(Collector):
    """Says so much that no socket buffers it, once the client has left. `is_broken`: it fails instead."""

    def __init__(self) -> None:
        self.has_left = threading.Event()
        self.is_broken = False

    def collect(self) -> Iterator[Metric]:
        self.has_left.wait(30)
        if self.is_broken:
            raise ZeroDivisionError
        yield GaugeMetricFamily("long", "x" * (8 << 20), value=1.0)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the server is through with a connection."""
    event, shutdown = threading.Event(), ThreadingHTTPServer.shutdown_request

    def shutdown_request(self: ThreadingHTTPServer, request: socket.socket) -> None:
        shutdown(self, request)
        event.set()

    monkeypatch.setattr(ThreadingHTTPServer, "shutdown_request", shutdown_request)
    return event


@pytest.mark.parametrize(
    ("is_broken", "levels"), [(False, ["DEBUG"]), (True, ["WARNING"])], ids=["client left", "collector broken"]
)
def test_only_a_failure_of_ours_is_a_warning(
    is_broken: bool, levels: list[str], ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "shared.metrics")
    collector = AfterTheClient()
    collector.is_broken = is_broken
    server = MetricsServer("127.0.0.1:0", collector)
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        collector.has_left.set()
        assert ended.wait(30)
    finally:
        server.close()
    assert [record.levelname for record in caplog.records if record.name == "shared.metrics"] == levels


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InvalidArgument) as caught:
            MetricsServer(listen, AfterTheClient())
    assert caught.value.message == f"metrics_listen: cannot listen on {listen}: address already in use"

"""Serves a Prometheus registry over HTTP in the classic text format 0.0.4, from threads of its own."""

import logging
import socket
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from shared.errors import InvalidArgument
from shared.listening import refused

log = logging.getLogger(__name__)

PATH = "/metrics"
_CLOSE_SECONDS = 0.1  # that `close` takes at most
_CLIENT_SECONDS = 10.0  # a client that neither sends nor reads keeps a thread no longer


class MetricsServer:
    """Answers GET and HEAD of /metrics with what `collector` says at that moment. `port` is the one it listens on."""

    def __init__(self, listen: str, collector: Collector) -> None:
        """Bind `listen` (HOST:PORT, port 0 = any free one) and start.

        Raises:
            InvalidArgument: the address is taken or not ours (field `metrics_listen`).
        """
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                if isinstance(sys.exception(), ConnectionError | TimeoutError):
                    log.debug("a client left before its answer was whole")
                else:
                    log.warning("a scrape failed", exc_info=True)  # not to stderr itself, which it might wait for

        class Handler(_Handler):
            source = collector

        try:
            self._server = Server((host, int(port)), Handler)
        except OSError as error:
            raise refused("metrics_listen", listen, error) from error
        except OverflowError as error:
            raise InvalidArgument.of("metrics_listen", f"cannot listen on {listen}: {error}") from error
        self.port: int = self._server.server_address[1]
        serve = partial(self._server.serve_forever, poll_interval=_CLOSE_SECONDS)
        threading.Thread(target=serve, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    source: Collector
    server_version = "loraplex"
    timeout = _CLIENT_SECONDS

    def do_GET(self) -> None:
        if urlsplit(self.path).path != PATH:
            self.send_error(404)
            return
        body = generate_latest(self.source)
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Scrapes are not logged."""

"""The engine's two sockets: to the API processes, and to the adapter process."""

import logging
import secrets

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from inference_service.types import (
    Acquire,
    Acquired,
    AcquireFailed,
    AdapterResponse,
    EngineRequest,
    EngineResponse,
    EngineStarted,
    Release,
    decode_adapter_response,
    decode_engine_request,
    encode,
)

log = logging.getLogger(__name__)

OUTPUT_HIGH_WATER = 10_000  # messages a client may be behind before it counts as dead


class ApiSocket:
    """The ROUTER that clients of the engine connect to: API processes, the adapter process, the supervisor."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted process takes its name over
        self.socket.setsockopt(zmq.SNDHWM, OUTPUT_HIGH_WATER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)

    def receive(self) -> tuple[bytes, EngineRequest] | None:
        """The next message and who sent it, or None. What cannot be read is logged and skipped."""
        while True:
            try:
                client, payload = self.socket.recv_multipart(zmq.NOBLOCK)
                return client, decode_engine_request(payload)
            except zmq.Again:
                return None
            except (msgspec.DecodeError, ValueError) as error:
                log.error("unreadable message to the engine: %s", error)

    def send(self, client: bytes, message: EngineResponse) -> bool:
        """False if the client is gone, or so far behind that it may as well be."""
        try:
            self.socket.send_multipart([client, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.warning("the engine's client %s is gone: %s", client.decode(errors="replace"), error)
            return False
        return True


class AdapterSocket:
    """The DEALER to the adapter process.

    `held`: digests whose blobs the engine may still read. `was_lost`: the adapter process went away, and the caller
    has not called `start_anew` yet. `is_connected`: there is one; what is sent before may be lost with the old one.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, b"engine")
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.connect(address)
        self._session = self._start_session()
        self.held: set[str] = set()
        self.was_lost = False
        self.is_connected = False
        self._unanswered: dict[str, None] = {}

    def acquire(self, digest: str) -> None:
        """Ask for a blob; `receive` has the answer."""
        self._unanswered[digest] = None
        if not self.was_lost:
            self.socket.send(encode(Acquire(digest, self._session)))

    def release(self, digest: str) -> None:
        """Give a blob back."""
        self.held.discard(digest)
        if not self.was_lost:
            self.socket.send(encode(Release(digest)))

    def receive(self) -> AdapterResponse | None:
        """The next answer, or None."""
        while self.monitor.poll(0):
            self.is_connected = parse_monitor_message(self.monitor.recv_multipart())["event"] != zmq.EVENT_DISCONNECTED
            self.was_lost = self.was_lost or not self.is_connected
        while self.socket.poll(0):
            message = decode_adapter_response(self.socket.recv())
            if not self.was_lost and not self._is_void(message):
                self._note(message)
                return message
        return None

    def _is_void(self, message: AdapterResponse) -> bool:
        """Whether it answers what was asked of the process before, and reached this one ahead of `EngineStarted`."""
        return isinstance(message, Acquired | AcquireFailed) and message.session != self._session

    def _note(self, message: AdapterResponse) -> None:
        if isinstance(message, Acquired | AcquireFailed):
            self._unanswered.pop(message.digest, None)
        if isinstance(message, Acquired):
            self.held.add(message.digest)

    def start_anew(self) -> None:
        """Tell a new adapter process that no blob is in use, and ask it for what its predecessor did not answer."""
        assert not self.held, "blobs are in use"
        assert self.is_connected, "nobody is there"
        while self.socket.poll(0):
            self.socket.recv()
        self.was_lost = False
        self._session = self._start_session()
        for digest in self._unanswered:
            self.socket.send(encode(Acquire(digest, self._session)))

    def _start_session(self) -> str:
        self.socket.send(encode(EngineStarted()))
        return secrets.token_hex(8)

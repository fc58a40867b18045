"""The engine process: sockets around `Engine.step`.

Started as `python -m inference_service.engine.process` with one JSON line on stdin (`StartMessage`); the end of stdin
means that the parent has died.
"""

import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import NamedTuple

import msgspec
import torch
import zmq

from inference_service.engine.blocks import BlockAllocator
from inference_service.engine.config import EngineConfig
from inference_service.engine.control import AdapterControl
from inference_service.engine.engine import Engine
from inference_service.engine.runner import ModelRunner
from inference_service.engine.scheduler import Scheduler
from inference_service.lora.adapter import AdapterPool, AdapterState
from inference_service.lora.slots import SlotTable
from inference_service.types import (
    Abort,
    Acquire,
    Acquired,
    AcquireFailed,
    AdapterResponse,
    EngineReady,
    EngineRequest,
    EngineResponse,
    EngineStarted,
    Hello,
    Release,
    Reply,
    Submit,
    decode_adapter_response,
    decode_engine_request,
    encode,
)
from shared.errors import Internal
from shared.log import setup

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
COPY_SECONDS = 0.001  # how often a copy under way is looked at while nothing else happens
MESSAGES_PER_STEP = 256
OUTPUT_HIGH_WATER = 10_000  # messages an API process may be behind before it counts as dead
PAGE_LOCK_BYTES = 256 << 20
PARENT_GRACE_SECONDS = 10.0


class StartMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the supervisor says on stdin. `host_arena_fd`: the memfd, inherited."""

    config: EngineConfig
    api_address: str
    adapter_address: str
    host_arena_fd: int
    log_level: str = "INFO"


# ---- sockets


class ApiSocket:
    """The ROUTER that API processes connect to."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted API process takes its name over
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
                log.error("unreadable message from an API process: %s", error)

    def send(self, client: bytes, message: EngineResponse) -> bool:
        """False if the client is gone, or so far behind that it may as well be."""
        try:
            self.socket.send_multipart([client, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            log.warning("API process %r is gone: %s", client, error)
            return False
        return True


class AdapterSocket:
    """The DEALER to the adapter process.

    `held`: digests whose blobs the engine may still read. `was_lost`: the adapter process went away, and the caller
    has not called `start_anew` yet.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, b"engine")
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(address)
        self.socket.send(encode(EngineStarted()))
        self.held: set[str] = set()
        self.was_lost = False
        self._unanswered: dict[str, None] = {}

    def acquire(self, digest: str) -> None:
        """Ask for a blob; `receive` has the answer."""
        self._unanswered[digest] = None
        if not self.was_lost:
            self.socket.send(encode(Acquire(digest)))

    def release(self, digest: str) -> None:
        """Give a blob back."""
        self.held.discard(digest)
        if not self.was_lost:
            self.socket.send(encode(Release(digest)))

    def receive(self) -> AdapterResponse | None:
        """The next answer, or None."""
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
            self.was_lost = True
        try:
            message = decode_adapter_response(self.socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        if self.was_lost:
            return None  # of the old process: its blobs are void
        if isinstance(message, Acquired | AcquireFailed):
            self._unanswered.pop(message.digest, None)
        if isinstance(message, Acquired):
            self.held.add(message.digest)
        return message

    def start_anew(self) -> None:
        """Tell a new adapter process that no blob is in use, and ask it for what its predecessor did not answer."""
        assert not self.held, "blobs are in use"
        while self.socket.poll(0):
            self.socket.recv()
        self.was_lost = False
        self.socket.send(encode(EngineStarted()))
        for digest in self._unanswered:
            self.socket.send(encode(Acquire(digest)))


# ---- the loop


class Parts(NamedTuple):
    """What the loop connects."""

    engine: Engine
    control: AdapterControl
    pool: AdapterPool
    api: ApiSocket
    adapters: AdapterSocket
    ready: EngineReady
    host_bytes: int


class EngineLoop:
    """Receives, steps and sends until told to stop."""

    def __init__(self, parts: Parts, wake: socket.socket) -> None:
        self._parts = parts
        self._poller = zmq.Poller()
        for source in (parts.api.socket, parts.adapters.socket, parts.adapters.monitor, wake):
            self._poller.register(source, zmq.POLLIN)
        self._is_busy = False
        self.stopping = False

    def run(self) -> None:
        """Until `stopping`."""
        while not self.stopping:
            if self._poller.poll(0 if self._is_busy else self._idle_milliseconds()):
                self._receive()
            self._step()

    def _step(self) -> None:
        """One step, and one message to every API process that it concerns."""
        engine, pool = self._parts.engine, self._parts.pool
        pool.poll()
        outputs = engine.step(time.monotonic())
        self._is_busy = engine.is_computing
        for client, output in outputs.items():
            self._send(client, output)
        for client, reply in self._parts.control.poll():
            self._send(client, reply)

    def _send(self, client: bytes, message: EngineResponse) -> None:
        if not self._parts.api.send(client, message):
            self._drop(client)

    def _drop(self, client: bytes) -> None:
        self._parts.engine.drop_client(client)
        self._parts.control.drop_client(client)

    def _receive(self) -> None:
        while (answer := self._parts.adapters.receive()) is not None:
            self._receive_answer(answer)
        if self._parts.adapters.was_lost:
            self._give_up_blobs()
        for _ in range(MESSAGES_PER_STEP):
            message = self._parts.api.receive()
            if message is None:
                return
            self._receive_request(*message)

    def _receive_request(self, client: bytes, message: EngineRequest) -> None:
        engine = self._parts.engine
        match message:
            case Submit(spec):
                engine.submit(client, spec)
            case Abort(request_id, index):
                engine.abort(client, request_id, index)
            case Hello():
                self._drop(client)  # whatever its predecessor asked for
                self._send(client, self._parts.ready)
            case _:
                self._parts.control.receive(client, message)

    def _receive_answer(self, answer: AdapterResponse) -> None:
        pool = self._parts.pool
        match answer:
            case Acquired() if fits(answer, self._parts.host_bytes):
                pool.on_acquired(answer)
            case Acquired():
                log.error("blob of %s lies outside the host arena", answer.digest)
                self._parts.adapters.release(answer.digest)
                error = Internal("internal error (blob outside the host arena)")
                pool.on_acquire_failed(AcquireFailed(answer.digest, error.record()))
            case AcquireFailed():
                pool.on_acquire_failed(answer)
            case Reply():
                log.error("the adapter process answered a call that the engine did not make")

    def _give_up_blobs(self) -> None:
        """The adapter process is being replaced, and its successor writes the arena anew as soon as it hears of us.

        What waits for room is forgotten, and asked for again by the requests that want it; copies under way end first.
        """
        adapters, pool = self._parts.adapters, self._parts.pool
        log.warning("the adapter process is gone; giving %d blobs up", len(adapters.held))
        for digest in tuple(adapters.held):
            if pool.state(digest) is AdapterState.PLACING:
                pool.begin_unload(digest)
        while adapters.held:
            pool.poll()
            time.sleep(COPY_SECONDS)
        adapters.start_anew()

    def _idle_milliseconds(self) -> int:
        """How long to wait for a message when the last step had nothing to compute."""
        engine, pool, now = self._parts.engine, self._parts.pool, time.monotonic()
        wanted = {request.spec.adapter_digest for request in engine.scheduler.requests.values()}
        if any(pool.state(d) is AdapterState.COPYING for d in (*wanted, *self._parts.control.loading) if d):
            return int(COPY_SECONDS * 1e3)
        deadline = engine.scheduler.next_deadline()
        until_deadline = IDLE_SECONDS if deadline is None else deadline - now
        return int(1e3 * min(IDLE_SECONDS, max(until_deadline, 0.0))) + 1


def fits(answer: Acquired, host_bytes: int) -> bool:
    """Whether the blob and its parts lie within the host arena."""
    layout = answer.layout
    return 0 <= answer.host_offset <= host_bytes - layout.nbytes and all(
        0 <= chunk.offset <= layout.nbytes - chunk.nbytes for chunk in layout.chunks
    )


# ---- start and end


def main(start: StartMessage, wake: socket.socket, stop: "Stop") -> None:
    """Serve until stopped. Raises whatever ends the engine before its time."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    api = ApiSocket(context, start.api_address)  # bound at once: a Hello waits there until the engine is warm
    adapters = AdapterSocket(context, start.adapter_address)
    try:
        loop = EngineLoop(build(start, api, adapters), wake)
        stop.loop = loop
        log.info("engine ready")
        if not stop.requested:
            loop.run()
    finally:
        adapters.socket.disable_monitor()
        context.destroy(linger=0)


def build(start: StartMessage, api: ApiSocket, adapters: AdapterSocket) -> Parts:
    """Load and warm the model, and put the engine together."""
    config = start.config
    host = map_host_arena(start.host_arena_fd)
    runner = ModelRunner(config, host)
    if runner.device.type == "cuda":
        page_lock(host)
    runner.warm_up()
    slots = SlotTable(config.max_adapters, runner.arena_bytes)
    pool = AdapterPool(slots, runner.arena, adapters.acquire, adapters.release, time.monotonic)
    blocks = BlockAllocator(runner.num_blocks, runner.block_size, config.prefix_caching)
    engine = Engine(runner, Scheduler(runner.limits, blocks, pool), config.weights_fingerprint)
    return Parts(engine, AdapterControl(engine, pool), pool, api, adapters, describe(runner), host.numel())


def describe(runner: ModelRunner) -> EngineReady:
    """What API processes must know."""
    return EngineReady(
        max_model_len=runner.limits.max_model_len,
        max_num_seqs=runner.limits.max_num_seqs,
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        arena_bytes=runner.arena_bytes,
        device=str(runner.device),
        dtype=str(runner.dtype).removeprefix("torch."),
    )


def map_host_arena(fd: int) -> torch.Tensor:
    """The shared host arena as a flat uint8 tensor; it stays mapped as long as the tensor lives."""
    return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)


def page_lock(host: torch.Tensor) -> None:
    """Page-lock the arena in pieces, so that copies from it to the GPU are asynchronous."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for start in range(0, host.numel(), PAGE_LOCK_BYTES):
        piece = host[start : start + PAGE_LOCK_BYTES]
        torch.cuda.check_error(int(cudart.cudaHostRegister(piece.data_ptr(), piece.numel(), 0)))


class Stop:
    """SIGTERM ends the loop after the step under way; SIGINT is the parent's business."""

    def __init__(self) -> None:
        self.requested = False
        self.loop: EngineLoop | None = None

    def install(self) -> socket.socket:
        """Handle signals; the socket returned becomes readable with each, to end a poll."""
        readable, written = socket.socketpair()
        written.setblocking(False)
        signal.set_wakeup_fd(written.detach(), warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_signal)
        return readable

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        self.requested = True
        if self.loop is not None:
            self.loop.stopping = True


def watch_parent() -> None:
    """End this process when stdin does: gently, then at once."""

    def wait_for_end() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PARENT_GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=wait_for_end, name="parent-watch", daemon=True).start()


def read_line(fd: int) -> bytes:
    """One line, without reading beyond it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            break
        line += byte
    return line


def run_from_stdin() -> int:
    """The process's entry; its exit status."""
    stop = Stop()
    wake = stop.install()
    start = msgspec.json.decode(read_line(0), type=StartMessage)
    setup("engine", start.log_level)
    watch_parent()
    try:
        main(start, wake, stop)
    except Exception:
        log.exception("the engine ends")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_from_stdin())

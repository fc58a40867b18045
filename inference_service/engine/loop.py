"""Receive, step, send: the engine process's loop."""

import logging
import socket
import time
from typing import NamedTuple

import zmq

from inference_service.engine.control import AdapterControl
from inference_service.engine.counters import engine_stats
from inference_service.engine.engine import Engine
from inference_service.engine.sockets import AdapterSocket, ApiSocket
from inference_service.lora.adapter import AdapterState
from inference_service.lora.pool import AdapterPool
from inference_service.stats import EngineStats
from inference_service.types import (
    Abort,
    Acquired,
    AcquireFailed,
    AdapterResponse,
    CancelCall,
    EngineReady,
    EngineRequest,
    EngineResponse,
    GetStats,
    Hello,
    Reply,
    Submit,
)
from shared.errors import Internal

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
COPY_SECONDS = 0.001  # how often a copy is looked at that must end before anything else happens
MESSAGES_PER_STEP = 256


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
            if self._parts.adapters.is_connected:
                self._parts.adapters.start_anew()
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
            case GetStats(call_id):
                self._send(client, Reply(call_id, engine_stats=self._stats()))
            case CancelCall(call_id):
                self._parts.control.cancel(client, call_id)
            case _:
                self._parts.control.receive(client, message)

    def _stats(self) -> EngineStats:
        engine = self._parts.engine
        return engine_stats(engine.counters, engine.scheduler, self._parts.pool, time.monotonic())

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
        if adapters.held:
            log.warning("the adapter process is gone; giving %d blobs up", len(adapters.held))
        for digest in tuple(adapters.held):
            if pool.state(digest) is AdapterState.PLACING:
                pool.begin_unload(digest)
        while adapters.held:
            pool.poll()
            time.sleep(COPY_SECONDS)

    def _idle_milliseconds(self) -> int:
        """How long to wait for a message when the last step had nothing to compute."""
        if self._parts.pool.is_moving:
            return 0
        deadline = self._parts.engine.scheduler.next_deadline()
        until_deadline = IDLE_SECONDS if deadline is None else deadline - time.monotonic()
        return int(1e3 * min(IDLE_SECONDS, max(until_deadline, 0.0))) + 1


def fits(answer: Acquired, host_bytes: int) -> bool:
    """Whether the blob and its parts lie within the host arena."""
    layout = answer.layout
    return 0 <= answer.host_offset <= host_bytes - layout.nbytes and all(
        0 <= chunk.offset <= layout.nbytes - chunk.nbytes for chunk in layout.chunks
    )

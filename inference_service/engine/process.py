"""The engine process: loads the model, connects the parts, serves until told to stop.

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
from pathlib import Path
from types import FrameType

# Read when torch is loaded. OpenMP's threads wait for each other after every operation. Spinning as long as by default,
# they take from the last one the time it needs if other processes are busy; to sleep at once is a fifth slower.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")

import msgspec
import torch
import zmq

from inference_service.engine.blocks import BlockAllocator
from inference_service.engine.config import EngineConfig
from inference_service.engine.control import AdapterControl
from inference_service.engine.engine import Engine
from inference_service.engine.loop import EngineLoop, Parts
from inference_service.engine.runner import ModelRunner, placement
from inference_service.engine.scheduler import Scheduler
from inference_service.engine.sockets import AdapterSocket, ApiSocket
from inference_service.lora.pool import AdapterPool
from inference_service.lora.slots import SlotTable
from inference_service.types import EXIT_CONFIG, READY_LINE, EngineReady
from shared.errors import InvalidArgument, LoraplexError
from shared.log import setup
from shared.process_end import end_process

log = logging.getLogger(__name__)

MOVE_BYTES = {"cpu": 8 << 20, "cuda": 128 << 20}  # of adapters, within the arena between two steps: below 5 and 0.2 ms
PARENT_GRACE_SECONDS = 10.0


class StartMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the supervisor says on stdin. `host_arena_fd`: the memfd, inherited."""

    config: EngineConfig
    api_address: str
    adapter_address: str
    host_arena_fd: int
    log_level: str = "INFO"


def main(start: StartMessage, wake: socket.socket, stop: "Stop") -> None:
    """Serve until stopped. Raises whatever ends the engine before its time."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    api = ApiSocket(context, start.api_address)  # bound at once: a Hello waits there until the engine is warm
    adapters = AdapterSocket(context, start.adapter_address)
    try:
        loop = EngineLoop(build(start, api, adapters), wake)
        stop.loop = loop
        print(READY_LINE, flush=True)
        log.info("engine ready after %.1f s", process_age())
        if not stop.requested:
            loop.run()
    finally:
        adapters.socket.disable_monitor()
        context.destroy(linger=0)


def build(start: StartMessage, api: ApiSocket, adapters: AdapterSocket) -> Parts:
    """Load and warm the model, and put the engine together."""
    config = start.config
    host = map_host_arena(start.host_arena_fd)
    runner = build_runner(config, host)
    runner.warm_up()
    slots = SlotTable(
        config.max_adapters,
        runner.arena_bytes,
        move_bytes=MOVE_BYTES[runner.device.type],
        owner_bytes=config.adapter_bytes_per_tenant,
    )
    pool = AdapterPool(slots, runner.arena, adapters.acquire, adapters.release, time.monotonic)
    blocks = BlockAllocator(runner.num_blocks, runner.block_size, config.prefix_caching)
    engine = Engine(runner, Scheduler(runner.limits, blocks, pool), config.weights_fingerprint)
    return Parts(engine, AdapterControl(engine, pool), pool, api, adapters, describe(runner), host.numel())


def build_runner(config: EngineConfig, host: torch.Tensor) -> ModelRunner:
    """The runner of the device: plain PyTorch on a CPU, fused kernels and graphs on a GPU."""
    if placement(config).device.type == "cpu":
        return ModelRunner(config, host)
    started = time.monotonic()
    page_lock(host)
    log.info("%d MiB of host memory page-locked in %.1f s", host.numel() >> 20, time.monotonic() - started)
    from inference_service.engine.cuda_runner import CudaRunner  # imports Triton

    return CudaRunner(config, host)


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
        memory=runner.memory,
    )


def map_host_arena(fd: int) -> torch.Tensor:
    """The shared host arena as a flat uint8 tensor; it stays mapped as long as the tensor lives."""
    return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)


def process_age() -> float:
    """Seconds since this process was started; the imports, torch's above all, are some of them."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def page_lock(host: torch.Tensor) -> None:
    """Page-lock the arena, so that copies from it to the GPU are asynchronous.

    As one piece: CUDA refuses a copy that begins in one locked range and ends in another.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(cudart.cudaHostRegister(host.data_ptr(), host.numel(), 0)))


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
    except LoraplexError as error:
        print(f"error: {error.summary}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, InvalidArgument) else 1
    except Exception:
        log.exception("the engine ends")
        return 1
    return 0


if __name__ == "__main__":
    end_process(run_from_stdin())

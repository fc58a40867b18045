"""Time of a call on a device, and the bandwidth that times are compared with."""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

import statistics
import time
from collections.abc import Callable

import torch

REPLAYS = 20
# So much is touched before anything is touched again; caches are smaller.
ROTATED_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}


def time_graph(call: Callable[[], object]) -> float:
    """Seconds of one `call` replayed from a CUDA graph: the median."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3)
    return statistics.median(times)


def time_loop(call: Callable[[], object]) -> float:
    """Seconds of one `call` on a CPU: the best of a few."""
    call()  # fills the table's views
    best = float("inf")
    for _ in range(REPLAYS // 2):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def time_call(call: Callable[[], object], device: str) -> float:
    """Seconds of one `call`."""
    return time_graph(call) if device == "cuda" else time_loop(call)


def copy_bandwidth(device: str) -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.zeros(ROTATED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / time_call(lambda: target.copy_(source), device)

"""Captured decode steps: one graph for each batch bucket, with and without adapters."""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Batch sizes that are captured: 1, 2, 4, 8, then steps of 16, 32 and 64; `most` is one."""
    sizes = [1, 2, 4, 8, *range(16, 64, 16), *range(64, 256, 32), *range(256, most + 1, 64)]
    return (*(size for size in sizes if size < most), most)


class DecodeGraphs:
    """Graphs by (bucket, with adapters). They share one memory pool: only one runs at a time."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # a handle whose type torch keeps to itself

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, bucket: int, has_adapters: bool, step: Callable[[], Tensor]) -> None:
        """Run `step` once for its compilation, then capture it; what it returns is what `replay` returns."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = step()
        self._pool = self._pool or graph.pool()
        self._graphs[bucket, has_adapters] = graph, out

    def replay(self, bucket: int, has_adapters: bool) -> Tensor:
        """Run the captured step on what the device's metadata says now. Its result holds until the next replay."""
        graph, out = self._graphs[bucket, has_adapters]
        graph.replay()
        return out

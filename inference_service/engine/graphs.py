"""Captured decode steps: one graph for each batch bucket and class of lengths, with and without adapters."""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Batch sizes that are captured: 1, 2, 4, 8, then steps of 16, 32 and 64; `most` is one."""
    sizes = [1, 2, 4, 8, *range(16, 64, 16), *range(64, 256, 32), *range(256, most + 1, 64)]
    return (*(size for size in sizes if size < most), most)


SHORT = 2048


def length_classes(max_model_len: int) -> tuple[int, ...]:
    """Bounds of a step's longest sequence that are captured. Attention splits long ones over more programs, which costs
    a batch of short ones 5 % of its step (`kernels.paged_decode_triton.num_splits`)."""
    return (SHORT, max_model_len) if max_model_len > SHORT else (max_model_len,)


class Kind(NamedTuple):
    """What a captured step fixes: its padded rows, the bound of its lengths, and whether it serves adapters."""

    bucket: int
    max_len: int
    has_adapters: bool


class DecodeGraphs:
    """Graphs by kind. They share one memory pool: only one runs at a time."""

    def __init__(self) -> None:
        self._graphs: dict[Kind, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # a handle whose type torch keeps to itself

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, kind: Kind, step: Callable[[], Tensor]) -> None:
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
        self._graphs[kind] = graph, out

    def replay(self, kind: Kind) -> Tensor:
        """Run the captured step on what the device's metadata says now. Its result holds until the next replay."""
        graph, out = self._graphs[kind]
        graph.replay()
        return out

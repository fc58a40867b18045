"""Captured steps, one graph for each kind."""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inference_service.engine.step_kinds import Kind


class StepGraphs:
    """Graphs by kind. They share one memory pool: only one runs at a time."""

    def __init__(self) -> None:
        self._graphs: dict[Kind, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # a handle whose type torch keeps to itself

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, kind: Kind) -> bool:
        return kind in self._graphs

    def capture(self, kind: Kind, step: Callable[[], Tensor]) -> None:
        """Capture `step`, whose kernels are compiled; what it returns is what `replay` returns, and must outlive it."""
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

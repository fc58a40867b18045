"""Another system's kernels, for the benchmark: PyTorch, one adapter after the other."""

from torch import Tensor

from kernels.table import AdapterTable, Group
from kernels.workloads import Workload


class PlainPeer:
    """A `kernels.bench.linears.Peer`."""

    def __init__(self, table: AdapterTable, group: Group, load: Workload) -> None:
        self.table, self.group, self.segments = table, group, load.segments()

    def shrink_expand(self, y: Tensor, x: Tensor, layer: int) -> None:
        for slot, start, end in self.segments:
            for part in self.table.parts(slot, layer, self.group):
                v = x[start:end] @ part.a
                for expand in part.expands:
                    delta = v[:, expand.first : expand.last] @ expand.b * expand.scale
                    y[start:end, expand.begin : expand.end] += delta


class WrongPeer(PlainPeer):
    """Forgets the last rows."""

    def __init__(self, table: AdapterTable, group: Group, load: Workload) -> None:
        super().__init__(table, group, load)
        self.segments = self.segments[:-1]

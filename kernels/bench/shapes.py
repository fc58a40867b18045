"""Sizes of base models' linears, and the bytes that adapters on them must move."""

from typing import NamedTuple

import torch

from kernels.table import Group
from kernels.workloads import Workload


class Model(NamedTuple):
    """Sizes of a base model's linears and heads, and tokens of its vocabulary."""

    hidden: int
    kv: int
    intermediate: int
    head_dim: int
    vocab: int

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.kv // self.head_dim

    def groups(self) -> dict[str, Group]:
        """The four packed projections."""
        q, k, mlp = self.hidden, self.kv, self.intermediate
        return {
            "qkv": Group((0, 1, 2), (0, q, q + k, q + 2 * k), self.hidden),
            "o": Group((3,), (0, self.hidden), q),
            "gate_up": Group((4, 5), (0, mlp, 2 * mlp), self.hidden),
            "down": Group((6,), (0, self.hidden), mlp),
        }


MODELS = {"llama-3.1-8b": Model(4096, 1024, 14336, 128, 128256), "smollm2-135m": Model(576, 192, 1536, 64, 49152)}
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


def bytes_touched(group: Group, load: Workload, dtype: torch.dtype) -> int:
    """What a call must move at least: adapters used and x once, y read and written."""
    rows = [slot for slot in load.row_slots if slot >= 0]
    per_rank = len(group.modules) * group.in_features + group.columns[-1]
    adapters = sum(load.ranks[slot] for slot in set(rows)) * per_rank
    return (adapters + len(rows) * (group.in_features + 2 * group.columns[-1])) * dtype.itemsize

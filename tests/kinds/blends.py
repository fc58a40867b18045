"""Weighted sums of adapters, which requests name instead of one."""

from typing import NamedTuple


class Blend(NamedTuple):
    """`parts`: cases and their weights."""

    parts: dict[str, float]


# PEFT gives the sum the first part's use_rslora, and then scales it wrongly: the first is not of rsLoRA.
BLENDS = {
    "two adapters": Blend({"plain": 0.7, "rank 33": 0.5}),
    "three adapters, one subtracted": Blend({"saved in bfloat16": -0.4, "patterns and rslora": 1.5, "rank 33": 0.25}),
}
KIND = "blends"

"""Weighted sums of adapters, which requests name instead of one."""

from typing import NamedTuple


class Blend(NamedTuple):
    """`parts`: cases and their weights."""

    parts: dict[str, float]


# PEFT gives the sum the first part's use_rslora, and then scales it wrongly: the first is not of rsLoRA.
BLENDS = {
    "two adapters": Blend({"plain": 0.7, "rank 33": 0.5}),
    "three adapters, one subtracted": Blend({"saved in bfloat16": -0.4, "patterns and rslora": 1.5, "rank 33": 0.25}),
    "embedding, head and linears": Blend({"plain": -0.8, "embed_tokens": 0.6, "lm_head": 1.25}),
}
KIND = "blends"

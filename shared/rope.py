"""Rotary embeddings as a base model's config.json states them, in both generations of its keys.

The older: `rope_theta` and `rope_scaling` {`rope_type` or `type`, …}. The newer (transformers 5): `rope_parameters`
{`rope_type`, `rope_theta`, …}. The meaning of every key and default is transformers' `modeling_rope_utils`.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shared.json_fields import JsonFields

RopeKind = Literal["llama3", "yarn", "linear"]


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched. Fields that `kind` does not use keep their defaults.

    `attention_factor` multiplies cos and sin; it is resolved here (1.0 except for YaRN).
    """

    kind: RopeKind
    factor: float
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


class Rope(NamedTuple):
    theta: float
    scaling: RopeScaling | None


def parse_rope(config: JsonFields, max_position: int) -> Rope:
    """Theta and scaling of `config`; what is wrong is recorded in `config`."""
    group = config.group("rope_scaling") or config.group("rope_parameters")
    theta = config.number("rope_theta", 10000.0)
    _check_full_rotation(config)
    if group is None:
        return Rope(theta, None)
    if any(isinstance(value, dict) for value in group.raw.values()):
        config.wrong("rope_parameters", "rotary parameters per layer type are not supported")
        return Rope(theta, None)
    theta = group.number("rope_theta", theta)
    _check_full_rotation(group)
    kind = group.text("rope_type", group.text("type", "default"))
    original = config.integer("original_max_position_embeddings", 0) or group.integer(
        "original_max_position_embeddings", max_position
    )
    match kind:
        case "default":
            return Rope(theta, None)
        case "linear":
            return Rope(theta, RopeScaling("linear", group.number("factor")))
        case "llama3":
            return Rope(theta, _llama3(group, original))
        case "yarn":
            return Rope(theta, _yarn(group, original))
    group.wrong("rope_type", f"rope type {kind!r:.80} is not supported; supported: default, linear, llama3, yarn")
    return Rope(theta, None)


def _check_full_rotation(fields: JsonFields) -> None:
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        fields.wrong("partial_rotary_factor", "only full rotary embeddings (1.0) are supported")


def _llama3(group: JsonFields, original: int) -> RopeScaling:
    low, high = group.number("low_freq_factor"), group.number("high_freq_factor")
    if high < low:
        group.wrong("high_freq_factor", f"must not be below low_freq_factor ({low})")
    return RopeScaling("llama3", group.number("factor"), original, low_freq_factor=low, high_freq_factor=high)


def _yarn(group: JsonFields, original: int) -> RopeScaling:
    factor = group.number("factor")
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=group.number("beta_fast", 32.0),
        beta_slow=group.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(group, factor),
        truncate=group.flag("truncate", True),
    )


def _yarn_attention_factor(group: JsonFields, factor: float) -> float:
    """The stated factor, or 0.1·mscale·ln(factor) + 1 (over the same with mscale_all_dim where both are given)."""
    if group.raw.get("attention_factor") is not None:
        return group.number("attention_factor")

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if group.raw.get("mscale") and group.raw.get("mscale_all_dim"):
        return scale(group.number("mscale")) / scale(group.number("mscale_all_dim"))
    return scale(1.0)

"""Rotary position embeddings, rotate-half form (RoFormer, arXiv:2104.09864), tables in float32."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from shared.base_model import ModelConfig, RopeScaling


class Rotation(NamedTuple):
    """cos and sin of every token's angles, [tokens, 1, head_dim] float32; the first half of `sin` is negated."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair of channels, [head_dim / 2] float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    match config.rope_scaling:
        case None:
            return frequencies
        case RopeScaling(kind="linear", factor=factor):
            return frequencies / factor
        case RopeScaling(kind="llama3") as scaling:
            return _llama3(frequencies, scaling)
        case scaling:
            return _yarn(frequencies, scaling, config)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    stretched = frequencies / scaling.factor
    if high == low:
        return torch.where(wavelengths > scaling.original_max_position / low, stretched, frequencies)
    kept = ((scaling.original_max_position / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * stretched + kept * frequencies


def _yarn(frequencies: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    """YaRN (arXiv:2309.00071, section 3.2): a linear ramp over channels between keeping and stretching."""

    def channel(rotations: float) -> float:
        turns = scaling.original_max_position / (rotations * 2 * math.pi)
        return config.head_dim * math.log(turns) / (2 * math.log(config.rope_theta))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    width = last - first if last != first else 0.001
    stretch = ((torch.arange(len(frequencies), dtype=torch.float32) - first) / width).clamp(0, 1)
    return frequencies / scaling.factor * stretch + frequencies * (1 - stretch)


def rotation(positions: Tensor, frequencies: Tensor, attention_factor: float) -> Rotation:
    """The rotation of tokens at `positions` [tokens]. YaRN's `attention_factor` scales both tables."""
    angles = positions[:, None].float() * frequencies  # [tokens, head_dim / 2]
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return Rotation(torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1))


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """`x` [tokens, heads, head_dim] rotated in float32, in x's dtype."""
    swapped = torch.roll(x, x.shape[-1] // 2, -1)  # the halves change places; their signs are in by.sin
    return torch.addcmul(x * by.cos, swapped.to(by.sin.dtype), by.sin).to(x.dtype)

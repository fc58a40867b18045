"""Tensors of adapter kinds that PEFT knows and that are not served: how to tell them, and what to do.

A kind that comes to be served leaves this table (and `fields.py`) and gets a file of its own.
"""

import re
from typing import NamedTuple

from shared.adapter_format.fields import FIELDS
from shared.adapter_format.reasons import tensor_invalid, tensor_unsupported
from shared.errors import LoraplexError


class _Kind(NamedTuple):
    """Tensors whose name `pattern` finds belong to the kind that the config key `key` switches on."""

    pattern: str
    key: str
    advice: str


def _by_field(pattern: str, key: str) -> _Kind:
    return _Kind(pattern, key, FIELDS[key].advice)


_EMBEDDING = "adapters of embed_tokens and lm_head are not served; target the linears of the layers only"
_KINDS = (
    _by_field(r"\.lora_magnitude_vector(\.weight)?$", "use_dora"),
    _by_field(r"\.lora_B\.bias$", "lora_bias"),
    _by_field(r"\.lora_diag$", "kasa_config"),
    _by_field(r"\.trainable_tokens_delta$", "trainable_token_indices"),
    _by_field(r"\.experts\.(base_layer\.)?lora_[AB]\.weight$", "target_parameters"),
    _Kind(r"\.lora_embedding_[AB]$", "target_modules", _EMBEDDING),
    _Kind(r"(^|\.)(embed_tokens|lm_head)\.(base_layer\.|lora_)", "target_modules", _EMBEDDING),
    _by_field(r"(_proj|\.base_layer|norm)\.bias$", "bias"),
    _by_field(r"(^|\.)(embed_tokens|lm_head|[a-z_]*norm|[a-z]_proj|(gate|up|down)_proj)\.weight$", "modules_to_save"),
)


def left_over(tensor: str) -> LoraplexError:
    """The error for a tensor that is no lora_A or lora_B of one of the model's linears."""
    for kind in _KINDS:
        if re.search(kind.pattern, tensor):
            return tensor_unsupported(tensor, kind.key, kind.advice)
    return tensor_invalid(tensor, "belongs to no linear of this base model")

"""Biases: one on lora_B (`lora_bias`), or the linear's own, trained (`bias`: lora_only for adapted linears, all)."""

from collections.abc import Mapping
from typing import Any, Literal

from shared.adapter_format import values
from shared.adapter_format.bound import VectorBinding
from shared.adapter_format.draft import Draft
from shared.adapter_format.kinds.block_diagonal import is_block_b
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.names import HEAD, linear_site
from shared.adapter_format.reasons import value_invalid
from shared.adapter_format.values import Field, used
from shared.base_model import ModelConfig, linear_shape
from shared.json_text import as_json

_ON_B = "lora_B.bias"
_UNSAVED = (
    "PEFT before 0.21 does not save the biases of adapted linears: save again with a newer one, or set bias to 'none' "
    "to serve without"
)
_OWN = ("base_layer.bias", "bias")  # of an adapted linear, of another; before PEFT 0.6 the latter of both


def _bias(key: str, value: Any) -> Literal["none", "lora_only", "all"]:
    if value not in ("none", "lora_only", "all"):
        raise value_invalid(key, f"none, lora_only or all, is {as_json(value):.60}")
    return value  # type: ignore[no-any-return]


FIELDS: Mapping[str, Field] = {"bias": used("none", _bias, is_nullable=False), "lora_bias": used(False, values.flag)}


def check(config: LoraConfig) -> None:
    """What contradicts a bias is checked by the kinds that it contradicts."""


def bind(draft: Draft) -> None:
    """Bind the biases that the config promises. Others stay, and are refused as left over."""
    if draft.config.lora_bias:
        _bind_on_b(draft)
    if draft.config.bias != "none":
        _bind_own(draft)


def _bind_on_b(draft: Draft) -> None:
    for module in draft.modules:
        site = linear_site(module.layer, module.module)
        if not is_block_b(draft.config, draft.names.module(site)):  # PEFT's block-diagonal B has none
            tensor = draft.require(site, _ON_B, key="lora_bias")
            draft.check_shape(tensor, linear_shape(draft.model, module.module)[0])
            draft.vectors.append(VectorBinding(module.layer, module.module, "lora_bias", tensor))
    if draft.head.a is not None and not is_block_b(draft.config, draft.names.module(HEAD)):
        tensor = draft.require(HEAD, _ON_B, key="lora_bias")
        draft.check_shape(tensor, draft.vocab)
        draft.head = draft.head._replace(lora_bias=tensor)


def _bind_own(draft: Draft) -> None:
    adapted = {(module.layer, module.module) for module in draft.modules}
    for layer in range(draft.model.num_layers):
        for module, has_bias in enumerate(_has_bias(draft.model)):
            if has_bias and (draft.config.bias == "all" or (layer, module) in adapted):
                site = linear_site(layer, module)
                roles = _OWN if (layer, module) in adapted else _OWN[::-1]
                tensor = draft.require(site, *roles, key="bias", advice=_UNSAVED)
                draft.check_shape(tensor, linear_shape(draft.model, module)[0])
                draft.vectors.append(VectorBinding(layer, module, "bias", tensor))


def _has_bias(model: ModelConfig) -> tuple[bool, ...]:
    """By module."""
    return (model.qkv_bias,) * 3 + (model.o_bias,) + (model.mlp_bias,) * 3

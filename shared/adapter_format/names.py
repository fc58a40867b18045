"""Tensor names of an adapter file → linears of the base model.

A PEFT tensor is `base_model.model.` + the module's name in the model PEFT wrapped + `.lora_A.weight`. That name begins
with `model.` for a causal language model, with nothing for a bare backbone, and has `language_model.` somewhere in
front under vision wrappers. Old files have only `base_model.` in front, or nothing.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from shared.adapter_format.files import WEIGHTS
from shared.adapter_format.reasons import file_invalid, tensor_invalid
from shared.adapter_format.unsupported import left_over
from shared.base_model import MODULES, ModelConfig

MAX_NAME_LENGTH = 512

_TENSOR = re.compile(
    r"(?P<prefix>base_model\.model\.|base_model\.)?"
    r"(?P<head>(?:model\.)?(?:language_model\.)?(?:model\.)?)"
    r"layers\.(?P<layer>0|[1-9][0-9]{0,4})\."
    r"(?:self_attn\.(?P<attention>[qkvo]_proj)|mlp\.(?P<mlp>(?:gate|up|down)_proj))\.lora_(?P<side>[AB])\.weight"
)


class ModuleTensors(NamedTuple):
    """One adapted linear: its place, its name as PEFT saw it, and the names of its two tensors."""

    layer: int
    module: int
    name: str
    a: str
    b: str


class AdapterNames(NamedTuple):
    """Tensors are called `prefix` + `head` + `layers.…`; PEFT's name of a module has no prefix.

    Modules are in order of (layer, module).
    """

    prefix: str
    head: str
    modules: tuple[ModuleTensors, ...]


def read_names(tensors: Iterable[str], model: ModelConfig) -> AdapterNames:
    """Assign every tensor to a linear of `model`.

    Raises:
        AdapterInvalid: a tensor belongs to no linear, A comes without B, or modules are named in more than one way
            (metadata `tensor`), or there is no tensor (metadata `file`).
        UnsupportedAdapter: a tensor belongs to a kind of adapter that is not served.
    """
    found: dict[tuple[int, int], dict[str, str]] = {}
    style: tuple[str, str] | None = None
    for tensor in tensors:
        match = _TENSOR.fullmatch(tensor) if len(tensor) <= MAX_NAME_LENGTH else None
        if match is None:
            raise left_over(tensor[:MAX_NAME_LENGTH])
        layer = int(match["layer"])
        if layer >= model.num_layers:
            raise tensor_invalid(tensor, f"the base model has layers 0 to {model.num_layers - 1}")
        style = style or (match["prefix"] or "", match["head"])
        if style != (match["prefix"] or "", match["head"]):
            raise tensor_invalid(tensor, f"is named differently from others, which begin with {''.join(style)}layers.")
        module = MODULES.index(match["attention"] or match["mlp"])
        found.setdefault((layer, module), {})[match["side"]] = tensor
    if style is None:
        raise file_invalid(WEIGHTS, "holds no tensor")
    return AdapterNames(*style, tuple(_pair(place, sides, style[1]) for place, sides in sorted(found.items())))


def module_name(head: str, path: str) -> str:
    """The name PEFT saw for the linear that the base model calls `path`."""
    return head + path.removeprefix("model.")


def _pair(place: tuple[int, int], sides: dict[str, str], head: str) -> ModuleTensors:
    if len(sides) != 2:
        present = next(iter(sides.values()))
        missing = "lora_B" if "A" in sides else "lora_A"
        raise tensor_invalid(present, f"its {missing} is missing")
    layer, module = place
    prefix = "self_attn" if module < 4 else "mlp"
    return ModuleTensors(layer, module, f"{head}layers.{layer}.{prefix}.{MODULES[module]}", sides["A"], sides["B"])

"""Tensor names of an adapter file → places in the base model.

A PEFT tensor is `base_model.model.` + the module's name in the model PEFT wrapped + what it is (`lora_A.weight`). That
name begins with `model.` for a causal language model, with nothing for a bare backbone, and has `language_model.`
somewhere in front under vision wrappers. Old files have only `base_model.` in front, or nothing.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from shared.adapter_format.files import WEIGHTS
from shared.adapter_format.reasons import file_invalid, tensor_invalid
from shared.base_model import MODULES, ModelConfig

MAX_NAME_LENGTH = 512
OUTSIDE = -1

_LAYER_PARTS = (
    r"self_attn\.(?:[qkvo]_proj|[qk]_norm)|mlp\.(?:gate|up|down)_proj|input_layernorm|post_attention_layernorm"
)
_TENSOR = re.compile(
    r"(?P<prefix>base_model\.model\.|base_model\.)?"
    r"(?:(?P<head>(?:model\.)?(?:language_model\.)?(?:model\.)?)"
    rf"(?:layers\.(?P<layer>0|[1-9][0-9]{{0,4}})\.(?P<part>{_LAYER_PARTS})|(?P<outer>embed_tokens|norm))"
    r"|(?P<wrapper>(?:language_model\.)?)lm_head)"
    r"\.(?P<role>[A-Za-z_.]+)"
)


class Site(NamedTuple):
    """A module of the base model by the last part of its name, in a layer or `OUTSIDE` all of them."""

    layer: int
    part: str


EMBED, HEAD, FINAL_NORM = Site(OUTSIDE, "embed_tokens"), Site(OUTSIDE, "lm_head"), Site(OUTSIDE, "norm")


class AdapterNames(NamedTuple):
    """Tensors are called `prefix` + PEFT's name of a module + `.` + role.

    found: at each site, the tensors by their role (`lora_A.weight`).
    unknown: the tensors that belong to no site.
    """

    prefix: str
    head: str
    wrapper: str
    found: dict[Site, dict[str, str]]
    unknown: tuple[str, ...]

    def module(self, site: Site) -> str:
        """The name that PEFT saw."""
        if site == HEAD:
            return f"{self.wrapper}lm_head"
        if site.layer == OUTSIDE:
            return f"{self.head}{site.part}"
        return f"{self.head}layers.{site.layer}.{_parent(site.part)}{site.part}"

    def tensor(self, site: Site, role: str) -> str:
        return f"{self.prefix}{self.module(site)}.{role}"


def read_names(tensors: Iterable[str], model: ModelConfig) -> AdapterNames:
    """Assign every tensor to a module of `model`.

    Raises:
        AdapterInvalid: a layer does not exist or modules are named in more than one way (metadata `tensor`), or there
            is no tensor (metadata `file`).
    """
    found: dict[Site, dict[str, str]] = {}
    unknown: list[str] = []
    style: tuple[str, str] | None = None
    prefix, wrapper = "", ""
    for tensor in tensors:
        match = _TENSOR.fullmatch(tensor) if len(tensor) <= MAX_NAME_LENGTH else None
        if match is None:
            unknown.append(tensor[:MAX_NAME_LENGTH])
            continue
        prefix = match["prefix"] or ""
        if match["wrapper"] is not None:
            wrapper = match["wrapper"]
            site = HEAD
        else:
            style = style or (prefix, match["head"])
            if style != (prefix, match["head"]):
                raise tensor_invalid(tensor, f"is named differently from others, which begin with {''.join(style)}")
            site = Site(OUTSIDE, match["outer"]) if match["outer"] else _in_layer(tensor, match, model)
        found.setdefault(site, {})[match["role"]] = tensor
    if not found and not unknown:
        raise file_invalid(WEIGHTS, "holds no tensor")
    prefix, head = style or (prefix, "model.")
    return AdapterNames(prefix, head, wrapper or _wrapper(head), found, tuple(unknown))


def linear_site(layer: int, module: int) -> Site:
    return Site(layer, MODULES[module])


def _in_layer(tensor: str, match: re.Match[str], model: ModelConfig) -> Site:
    layer = int(match["layer"])
    if layer >= model.num_layers:
        raise tensor_invalid(tensor, f"the base model has layers 0 to {model.num_layers - 1}")
    return Site(layer, match["part"].rpartition(".")[2])


def _parent(part: str) -> str:
    if part.endswith("layernorm"):
        return ""
    return "mlp." if part in MODULES[4:] else "self_attn."


def _wrapper(head: str) -> str:
    """What stands before `lm_head` where the backbone's modules begin with `head`."""
    return "language_model." if head == "language_model.model." else ""

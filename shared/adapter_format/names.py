"""Tensor names of an adapter file → places in the base model.

A PEFT tensor is `base_model.model.` + the module's name in the model PEFT wrapped + what it is (`lora_A.weight`). That
name begins with `model.` for a causal language model, with nothing for a bare backbone, and has `language_model.`
somewhere in front under vision wrappers. Old files have only `base_model.` in front, or nothing. So
`base_model.model.layers…` is either a bare backbone's or an old file's; only the config's patterns can tell which.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from shared.adapter_format.files import WEIGHTS
from shared.adapter_format.reasons import OTHER_BASE, SAVE_AGAIN, file_invalid, tensor_invalid
from shared.base_model import MODULES, ModelConfig

MAX_NAME_LENGTH = 512
OUTSIDE = -1
_PREFIX, _OLD_PREFIX = "base_model.model.", "base_model."

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

    def readings(self) -> "tuple[AdapterNames, ...]":
        """What the same tensors may be: as they were read, and if that is a bare backbone's, an old file's too."""
        found = [{site: dict(roles) for site, roles in self.found.items()} for _ in range(2)]
        here = self._replace(found=found[0])
        if self.prefix != _PREFIX or self.head.startswith("model.") or HEAD in self.found:
            return (here,)
        return here, self._replace(prefix=_OLD_PREFIX, head=f"model.{self.head}", found=found[1])


def read_names(tensors: Iterable[str], model: ModelConfig) -> AdapterNames:
    """Assign every tensor to a module of `model`.

    Raises:
        AdapterInvalid: a layer does not exist or modules are named in more than one way (metadata `tensor`), or there
            is no tensor (metadata `file`).
    """
    found: dict[Site, dict[str, str]] = {}
    unknown: list[str] = []
    style: tuple[str, str] | None = None
    of_head: tuple[str, str] | None = None
    for tensor in tensors:
        match = _TENSOR.fullmatch(tensor) if len(tensor) <= MAX_NAME_LENGTH else None
        if match is None:
            unknown.append(tensor[:MAX_NAME_LENGTH])
            continue
        prefix = match["prefix"] or ""
        if match["wrapper"] is not None:
            of_head = of_head or (prefix, match["wrapper"])
            _check_style(tensor, of_head, (prefix, match["wrapper"]))
            site = HEAD
        else:
            style = style or (prefix, match["head"])
            _check_style(tensor, style, (prefix, match["head"]))
            site = Site(OUTSIDE, match["outer"]) if match["outer"] else _in_layer(tensor, match, model)
        found.setdefault(site, {})[match["role"]] = tensor
    if not found and not unknown:
        raise file_invalid(WEIGHTS, "holds no tensor", SAVE_AGAIN)
    prefix, head = _joined(style, of_head, found)
    return AdapterNames(prefix, head, of_head[1] if of_head else _wrapper(head), found, tuple(unknown))


def _check_style(tensor: str, expected: tuple[str, str], style: tuple[str, str]) -> None:
    if style != expected:
        raise tensor_invalid(
            tensor, f"is named differently from others, which begin with {''.join(expected)}", SAVE_AGAIN
        )


def _joined(
    style: tuple[str, str] | None, of_head: tuple[str, str] | None, found: dict[Site, dict[str, str]]
) -> tuple[str, str]:
    """Prefix and head of all names: the head's tensors tell an old file from a bare backbone, which has none."""
    if style is None:
        return of_head[0] if of_head else "", "model."
    if of_head is None or of_head[0] == style[0]:
        return style
    if of_head[0] == _OLD_PREFIX and style[0] == _PREFIX:
        return _OLD_PREFIX, f"model.{style[1]}"
    tensor = next(iter(found[HEAD].values()))
    raise tensor_invalid(tensor, f"is named differently from others, which begin with {''.join(style)}", SAVE_AGAIN)


def linear_site(layer: int, module: int) -> Site:
    return Site(layer, MODULES[module])


def _in_layer(tensor: str, match: re.Match[str], model: ModelConfig) -> Site:
    layer = int(match["layer"])
    if layer >= model.num_layers:
        raise tensor_invalid(tensor, f"the base model has layers 0 to {model.num_layers - 1}", OTHER_BASE)
    return Site(layer, match["part"].rpartition(".")[2])


def _parent(part: str) -> str:
    if part.endswith("layernorm"):
        return ""
    return "mlp." if part in MODULES[4:] else "self_attn."


def _wrapper(head: str) -> str:
    """What stands before `lm_head` where the backbone's modules begin with `head`."""
    return "language_model." if head == "language_model.model." else ""

"""A binding in the making: what the kinds of adapters read from and add to, each in its turn."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.adapter_format.bound import EmbedBinding, HeadBinding, ModuleBinding, NormBinding, VectorBinding
from shared.adapter_format.floats import FLOATS
from shared.adapter_format.header import TensorInfo
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.names import AdapterNames, Site
from shared.adapter_format.overrides import Overrides
from shared.adapter_format.reasons import OTHER_BASE, SAVE_AGAIN, tensor_invalid
from shared.adapter_format.targets import Targets
from shared.base_model import ModelConfig


@dataclass
class Draft:
    """What is known of the adapter, what is bound so far, and which of its tensors nobody has taken yet.

    `vocab`: rows of the embedding and the head, the adapter's own tokens included.
    `unread`: tensors that PEFT writes and that do not count.
    """

    config: LoraConfig
    tensors: Mapping[str, TensorInfo]
    model: ModelConfig
    names: AdapterNames
    targets: Targets
    ranks: Overrides
    alphas: Overrides
    vocab: int
    modules: list[ModuleBinding] = field(default_factory=list)
    vectors: list[VectorBinding] = field(default_factory=list)
    embed: EmbedBinding = field(default_factory=EmbedBinding)
    head: HeadBinding = field(default_factory=HeadBinding)
    norms: list[NormBinding] = field(default_factory=list)
    activation: tuple[int, ...] = ()
    unread: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def is_tied(self) -> bool:
        return self.model.tie_word_embeddings

    def take(self, site: Site, *roles: str) -> str | None:
        """The tensor of the first of `roles` that is there; it counts as bound from now on."""
        roles_there = self.names.found.get(site, {})
        for role in roles:
            if role in roles_there:
                return roles_there.pop(role)
        return None

    def require(self, site: Site, *roles: str, key: str, advice: str = "") -> str:
        """As `take`; AdapterInvalid naming the first of `roles` if none is there, though `key` of the config promises
        it. `advice`: what to do other than to save it or to take the key back."""
        tensor = self.take(site, *roles)
        if tensor is None:
            raise tensor_invalid(
                self.names.tensor(site, roles[0]),
                f"is missing: {key} promises it",
                advice or f"save it with the adapter, or remove {key}",
            )
        return tensor

    def leave_unread(self, site: Site, *roles: str) -> None:
        """Take those of `roles` that are there, to no use."""
        for role in roles:
            if (tensor := self.take(site, role)) is not None:
                self.unread.append(tensor)

    def check_shape(self, tensor: str, *shape: int) -> None:
        """Raises unless `tensor` has this shape and a dtype that is served."""
        info = self.tensors[tensor]
        check_dtype(tensor, info)
        if info.shape != shape:
            advice = SAVE_AGAIN if math.prod(info.shape) == math.prod(shape) else OTHER_BASE
            raise tensor_invalid(
                tensor, f"has shape {list(info.shape)}, not {list(shape)} as the base model takes", advice
            )


def check_dtype(tensor: str, info: TensorInfo) -> None:
    if info.dtype not in FLOATS:
        raise tensor_invalid(tensor, f"has dtype {info.dtype}", f"save it as one of {', '.join(FLOATS)}")

"""DoRA: a magnitude for each row of W + scale · BA, on every module that has LoRA (`VectorBinding`)."""

from collections.abc import Mapping

from shared.adapter_format import values
from shared.adapter_format.bound import VectorBinding
from shared.adapter_format.draft import Draft
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.names import EMBED, HEAD, Site, linear_site
from shared.adapter_format.reasons import TRAIN_WITHOUT, key_invalid
from shared.adapter_format.values import Field, used
from shared.base_model import linear_shape

KEY = "use_dora"
# PEFT drops the `.weight` while saving, and saves that of a head with LoRA under both names where it saves its weights.
_ROLES = ("lora_magnitude_vector", "lora_magnitude_vector.weight")

FIELDS: Mapping[str, Field] = {KEY: used(False, values.flag)}


def check(config: LoraConfig) -> None:
    """PEFT scales no bias on lora_B by the magnitude."""
    if config.use_dora and config.lora_bias:
        raise key_invalid("lora_bias", "cannot be used with use_dora", TRAIN_WITHOUT)


def bind(draft: Draft) -> None:
    """Bind one magnitude for each module with LoRA."""
    if not draft.config.use_dora:
        return
    for module in draft.modules:
        rows = linear_shape(draft.model, module.module)[0]
        tensor = _magnitude(draft, linear_site(module.layer, module.module), rows)
        draft.vectors.append(VectorBinding(module.layer, module.module, "magnitude", tensor))
    if draft.embed.a is not None:
        draft.embed = draft.embed._replace(magnitude=_magnitude(draft, EMBED, draft.model.hidden_size))
    if draft.head.a is not None:
        draft.head = draft.head._replace(magnitude=_magnitude(draft, HEAD, draft.vocab))


def _magnitude(draft: Draft, site: Site, size: int) -> str:
    tensor = draft.require(site, *_ROLES, key=KEY)
    draft.check_shape(tensor, size)
    draft.leave_unread(site, *_ROLES)
    return tensor

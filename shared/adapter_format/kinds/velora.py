"""VeLoRA compresses activations while it trains; what it leaves is a plain LoRA, and a buffer that nothing reads."""

from collections.abc import Mapping

from shared.adapter_format.draft import Draft
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.names import HEAD, linear_site
from shared.adapter_format.values import Field, used

KEY = "velora_config"


FIELDS: Mapping[str, Field] = {KEY: used(None, lambda _, value: value is not None, is_group=True)}


def check(config: LoraConfig) -> None:
    """Nothing that it contradicts."""


def bind(draft: Draft) -> None:
    """Leave the buffers of adapted modules."""
    if draft.config.velora_config:
        for site in [*(linear_site(module.layer, module.module) for module in draft.modules), HEAD]:
            draft.leave_unread(site, "lora_velora_embed")

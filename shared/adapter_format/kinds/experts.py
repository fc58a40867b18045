"""target_parameters: LoRA on the bare parameters of a mixture of experts. `adapter_format.experts` reads such files.

No decoder with experts is served yet, so they are refused.
"""

from collections.abc import Mapping
from typing import Any

from shared.adapter_format import values
from shared.adapter_format.draft import Draft
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.reasons import key_unsupported
from shared.adapter_format.values import Field, used

KEY = "target_parameters"
_TARGET_LINEARS = "target the linears of a dense model with target_modules"
ADVICE = f"no model with experts is served yet; {_TARGET_LINEARS}"


def _read(key: str, value: Any) -> tuple[str, ...]:
    return () if values.is_nothing(value) and value != "" else values.names(key, value)  # PEFT takes no string


FIELDS: Mapping[str, Field] = {KEY: used(None, _read)}


def check(config: LoraConfig) -> None:
    """Refused until there is a decoder for it."""
    if config.target_parameters:
        raise key_unsupported(KEY, f"LoRA on bare parameters, as experts have them, is not served; {_TARGET_LINEARS}")


def bind(draft: Draft) -> None:
    """Tensors of experts belong to no site of a dense model; `unsupported` knows their names."""

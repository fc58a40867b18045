"""`init_lora_weights`: which initialisations leave a saved file that is right on the unmodified base model.

The others subtract something from the base weights before training. Their saved A and B count from that modified
base, and served on the real one they give wrong answers, unless they were converted. PiSSA, OLoRA and KaSA can be
converted from the files and the base weights alone; the rest only by PEFT while saving.
"""

from collections.abc import Mapping
from typing import Any

from shared.adapter_format.draft import Draft
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.reasons import key_invalid, key_unsupported
from shared.adapter_format.values import Field, informational, refused, used

KEY = "init_lora_weights"
_PLAIN = ("gaussian", "orthogonal", "eva", "mica")
_CONVERTIBLE = ("pissa", "olora", "kasa")
_MODIFIES_BASE = ("pissa_niter_", "corda", "loftq", "lora_ga")
_CONVERT = "convert it with `loraplex adapter convert`, where the base weights are"


def _initialisation(key: str, value: Any) -> bool | str:
    if isinstance(value, bool) or value in _PLAIN:
        return bool(value) if isinstance(value, bool) else str(value)
    if not isinstance(value, str):
        raise key_invalid(key, f"must be true, false or a name, is {value!r:.80}")
    if value.lower() in _CONVERTIBLE:
        raise key_unsupported(key, f"{value!r:.60} trains against a modified base model; {_CONVERT}")
    if value.lower().startswith(_MODIFIES_BASE):
        raise key_unsupported(
            key,
            f"{value!r:.60} trains against a modified base model; save again with "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...), which makes it a plain LoRA",
        )
    raise key_unsupported(
        key, f"the initialisation {value!r:.60} is not known; train with one of true, {', '.join(_PLAIN)}"
    )


FIELDS: Mapping[str, Field] = {
    KEY: used(True, _initialisation),
    "kasa_config": refused(None, f"KaSA trains against a truncated base model; {_CONVERT}"),
    "eva_config": informational(None),  # what these four did shows in init_lora_weights
    "corda_config": informational(None),
    "lora_ga_config": informational(None),
    "loftq_config": informational({}),
}


def check(config: LoraConfig) -> None:
    """MiCA is a forward pass of its own in PEFT while it trains, which nothing else may share."""
    if config.init_lora_weights == "mica" and config.use_dora:
        raise key_invalid("use_dora", "cannot be used with init_lora_weights 'mica'")


def bind(draft: Draft) -> None:
    """No tensors."""

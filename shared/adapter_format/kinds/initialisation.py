"""`init_lora_weights`: which initialisations leave a saved file that is right on the unmodified base model.

The others subtract something from the base weights before training. Their saved A and B count from that modified
base, and served on the real one they give wrong answers, unless they were converted. PiSSA, OLoRA and KaSA can be
converted from the files and the base weights alone. Of the rest PEFT can convert some while saving, from the adapter
as it was before training. LoftQ's it converts to one that counts from the quantised base model, and leaves its
loftq_config in place.
"""

from collections.abc import Mapping
from typing import Any

from shared.adapter_format.draft import Draft
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.reasons import key_unsupported, value_invalid
from shared.adapter_format.values import Field, informational, is_nothing, refused, used
from shared.json_text import as_json

KEY = "init_lora_weights"
_PLAIN = ("gaussian", "orthogonal", "eva", "mica")
_CONVERTIBLE = ("pissa", "olora", "kasa")
_CONVERT = "convert it with `loraplex adapter convert`, where the base weights are"
_RETRAIN = "else train again with init_lora_weights true"
RESAVE = (
    "in the run that trained it, save_pretrained(..., path_initial_model_for_weight_conversion=...), which is the "
    f"adapter as it was before training, makes it a plain LoRA; {_RETRAIN}"
)
FROM_QUANTISED = (
    "it counts from the base model that LoftQ quantised: merge it into that one (merge_and_unload) and register the "
    f"result as a base model; {_RETRAIN}"
)
# By how a name begins, what to do about initialisations whose part of the base weights the files do not tell.
LOST = {"pissa_niter_": RESAVE, "corda": RESAVE, "lora_ga": RESAVE, "loftq": FROM_QUANTISED}


def _initialisation(key: str, value: Any) -> bool | str:
    """Names as PEFT takes them: in letters of any case."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise value_invalid(key, f"true, false or a name, is {as_json(value):.80}")
    name = value.lower()
    if name in _PLAIN:
        return name
    if name in _CONVERTIBLE:
        raise key_unsupported(key, f"{as_json(value):.60} trains against a modified base model; {_CONVERT}")
    for start, advice in LOST.items():
        if name.startswith(start):
            raise key_unsupported(key, f"{as_json(value):.60} trains against a modified base model; {advice}")
    raise key_unsupported(
        key, f"the initialisation {as_json(value):.60} is not known; train with one of true, {', '.join(_PLAIN)}"
    )


FIELDS: Mapping[str, Field] = {
    KEY: used(True, _initialisation),
    "kasa_config": refused(None, f"KaSA trains against a truncated base model; {_CONVERT}", is_group=True),
    "loftq_config": used({}, lambda _, value: not is_nothing(value)),
    "eva_config": informational(None, is_group=True),  # what these three did shows in init_lora_weights
    "corda_config": informational(None, is_group=True),
    "lora_ga_config": informational(None, is_group=True),
}


def check(config: LoraConfig) -> None:
    """PEFT empties loftq_config unless the adapter began with LoftQ."""
    if config.loftq_config:
        raise key_unsupported("loftq_config", f"the adapter was converted from LoftQ; {FROM_QUANTISED}")


def bind(draft: Draft) -> None:
    """No tensors."""

"""`init_lora_weights`: which initialisations leave a saved file that is right on the unmodified base model.

The others subtract something from the base weights before training. Their saved A and B count from that modified
base, and served on the real one they give wrong answers, unless PEFT converted them while saving.
"""

from typing import Any

from shared.adapter_format.reasons import key_invalid, key_unsupported

KEY = "init_lora_weights"
_PLAIN = ("gaussian", "orthogonal", "eva", "mica")
_MODIFIES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "kasa")


def check_initialisation(value: Any) -> None:
    """Raise unless adapters initialised like this are served as they are.

    Raises:
        UnsupportedAdapter: the initialisation changes the base weights, or is not known.
        AdapterInvalid: not a boolean or a string.
    """
    if value is None or isinstance(value, bool) or value in _PLAIN:
        return
    if not isinstance(value, str):
        raise key_invalid(KEY, f"must be true, false or a name, is {value!r:.80}")
    if value.lower().startswith(_MODIFIES_BASE):
        raise key_unsupported(
            KEY,
            f"{value!r:.60} trains against a modified base model; save again with "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...), which makes it a plain LoRA",
        )
    raise key_unsupported(
        KEY, f"the initialisation {value!r:.60} is not known; train with one of true, {', '.join(_PLAIN)}"
    )

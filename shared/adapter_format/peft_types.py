"""`peft_type`: only LORA is served. What can be done about each of PEFT's other types."""

import json
from typing import Any

from shared.adapter_format.reasons import key_invalid, key_unsupported
from shared.json_text import as_json

KEY = "peft_type"
# Those that add a matrix to a weight, which PEFT can write as a LoRA: exactly, if its rank reaches the matrix's.
CONVERTIBLE = frozenset((
    "C3A", "DELORA", "FOURIERFT", "GRALORA", "LOHA", "LOKR", "MISS", "PSOFT", "RANDLORA", "TINYLORA", "UNILORA",
    "VBLORA", "VERA", "WAVEFT",
))  # fmt: skip
# Those that are more than other weights: tokens or layers in front, or a choice that depends on the input. BEFT is
# biases, which most base models have no place for.
NOT_MERGED = frozenset((
    "ADAPTION_PROMPT", "BEFT", "CARTRIDGE", "CPT", "LILY", "MULTITASK_PROMPT_TUNING", "POLY", "PREFIX_TUNING",
    "PROMPT_TUNING", "P_TUNING", "SHADOW", "XLORA",
))  # fmt: skip
_MERGE = "merge it into the base model and register that as a base model"


def check_type(value: Any) -> None:
    """Raises AdapterInvalid for what PEFT cannot load, UnsupportedAdapter for another type than LORA."""
    if value == "LORA":
        return
    if not isinstance(value, str) or value.upper() == "LORA":
        raise key_invalid(KEY, f"is {json.dumps(value):.60}, which PEFT cannot load", 'write "LORA" if it is one')
    raise key_unsupported(KEY, f"{as_json(value):.60} is not served, only LORA is; {_advice(value)}")


def _advice(peft_type: str) -> str:
    if peft_type in NOT_MERGED:
        return "train a LoRA"
    if peft_type in CONVERTIBLE:
        return f"convert it with PEFT's save_as_lora, nearly exact at a rank that is high enough, or {_MERGE}"
    return f"train a LoRA, or {_MERGE}"

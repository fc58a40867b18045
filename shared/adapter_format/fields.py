"""Every field that PEFT's LoraConfig writes to adapter_config.json. `values.Field` says how they are treated.

The fields of one kind of adapter are listed with it (`kinds/`). A key that is listed nowhere is refused unless it is
null, false or empty.
"""

from collections.abc import Mapping
from typing import Any

from shared.adapter_format import values
from shared.adapter_format.kinds import KINDS
from shared.adapter_format.reasons import value_invalid
from shared.adapter_format.values import MAX_ENTRIES, Field, informational, refused, used
from shared.json_text import as_json

# What PEFT targets on Llama, Mistral, Qwen2 and Qwen3 when target_modules is null
# (TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING).
DEFAULT_TARGETS = ("q_proj", "v_proj")
# PEFT's TaskType.
TASKS = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")


def _task(key: str, value: Any) -> None:
    if value not in TASKS:
        raise value_invalid(key, f"null or one of {', '.join(TASKS)}, is {as_json(value):.60}")


def _dropout(key: str, value: Any) -> None:
    """PEFT takes what is below 0 for none."""
    if not isinstance(value, int | float) or not value <= 1:
        raise value_invalid(key, f"a number from 0 to 1, is {as_json(value):.60}")


def _target_modules(key: str, value: Any) -> tuple[str, ...] | str:
    return DEFAULT_TARGETS if value is None else values.names_or_pattern(key, value)


def _layers(key: str, value: Any) -> tuple[int, ...] | None:
    layers = [value] if type(value) is int else value
    if layers is None or layers == []:
        return None
    if not isinstance(layers, list) or len(layers) > MAX_ENTRIES or not all(type(i) is int and i >= 0 for i in layers):
        raise value_invalid(key, "a layer index or a list of them")
    return tuple(layers)


def _layers_pattern(key: str, value: Any) -> tuple[str, ...]:
    names = values.names_or_pattern(key, value)
    return tuple(name for name in ((names,) if isinstance(names, str) else names) if name)


_GENERAL: Mapping[str, Field] = {
    "peft_type": used("LORA", lambda _, value: value),
    "task_type": informational(None, check=_task),
    "auto_mapping": informational(None),
    "peft_version": informational(None),
    "base_model_name_or_path": used(None, values.text),
    "revision": informational(None),
    "inference_mode": informational(True),
    "runtime_config": informational(None),
    "r": used(8, values.rank, is_nullable=False),
    "lora_alpha": used(8, values.alpha, is_nullable=False),
    "lora_dropout": informational(0.0, is_nullable=False, check=_dropout),
    "target_modules": used(None, _target_modules),
    "exclude_modules": used(None, values.names_or_pattern),
    "use_rslora": used(False, values.flag),
    "layers_to_transform": used(None, _layers),
    "layers_pattern": used(None, _layers_pattern),
    "rank_pattern": used({}, lambda key, value: values.pattern(key, value, values.rank), is_nullable=False),
    "alpha_pattern": used({}, lambda key, value: values.pattern(key, value, values.alpha_of_some), is_nullable=False),
    "fan_in_fan_out": refused(False, "no served model stores its linears transposed; set it to false"),
    "layer_replication": refused(None, "the base model is not served with replicated layers; train without them"),
    "monteclora_config": refused(
        None, "it samples while it trains only; PEFT's save_as_lora, at the adapter's own rank, leaves the plain LoRA"
    ),
    "arrow_config": refused(
        None, "Arrow routing is not served; register the adapters it routes between", is_group=True
    ),
    "megatron_config": informational(None),
    "megatron_core": informational("megatron.core"),
}

FIELDS: Mapping[str, Field] = {**_GENERAL, **{key: field for kind in KINDS for key, field in kind.FIELDS.items()}}

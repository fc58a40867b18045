"""Every field that PEFT's LoraConfig writes to adapter_config.json, its default, and how it is treated.

* used: read by `config.py`.
* informational: does not change what a saved adapter computes.
* refused: changes it in a way that is not served. Must be the default, or null, false or empty.

A key that is not listed here is refused unless it is null, false or empty.
"""

from typing import Any, Literal, NamedTuple


class Field(NamedTuple):
    default: Any
    treatment: Literal["used", "informational", "refused"]
    advice: str = ""


def _used(default: Any) -> Field:
    return Field(default, "used")


def _informational(default: Any) -> Field:
    return Field(default, "informational")


def _refused(default: Any, advice: str) -> Field:
    return Field(default, "refused", advice)


FIELDS = {
    "peft_type": _used("LORA"),
    "task_type": _informational(None),
    "auto_mapping": _informational(None),
    "peft_version": _informational(None),
    "base_model_name_or_path": _used(None),
    "revision": _informational(None),
    "inference_mode": _informational(True),
    "runtime_config": _informational(None),
    "r": _used(8),
    "lora_alpha": _used(8),
    "lora_dropout": _informational(0.0),
    "target_modules": _used(None),
    "exclude_modules": _used(None),
    "use_rslora": _used(False),
    "init_lora_weights": _used(True),
    "layers_to_transform": _used(None),
    "layers_pattern": _used(None),
    "rank_pattern": _used({}),
    "alpha_pattern": _used({}),
    "fan_in_fan_out": _refused(False, "no served model stores its linears transposed; set it to false"),
    "bias": _refused("none", "trained biases are not served; train with bias='none'"),
    "use_dora": _refused(False, "DoRA is not served; train with use_dora=False"),
    "lora_bias": _refused(False, "a bias on lora_B is not served; train with lora_bias=False"),
    "modules_to_save": _refused(None, "fully trained modules are not served; train with modules_to_save=None"),
    "trainable_token_indices": _refused(None, "trained token embeddings are not served; train without them"),
    "layer_replication": _refused(None, "the base model is not served with replicated layers; train without them"),
    "target_parameters": _refused(None, "LoRA on bare parameters is not served; use target_modules"),
    "alora_invocation_tokens": _refused(None, "activated LoRA is not served; train a plain LoRA"),
    "use_bdlora": _refused(None, "block-diagonal LoRA is not served; train a plain LoRA"),
    "use_qalora": _refused(False, "QALoRA is not served; on unquantised linears PEFT ignores it: set it to false"),
    "kasa_config": _refused(None, "KaSA is not served; save with path_initial_model_for_weight_conversion"),
    "monteclora_config": _refused(None, "sampled adapters are not served; train a plain LoRA"),
    "arrow_config": _refused(None, "Arrow routing is not served; register the adapters it routes between"),
    "ensure_weight_tying": _informational(False),  # matters only to embeddings and modules_to_save
    "qalora_group_size": _informational(16),
    "velora_config": _informational(None),  # training only
    "eva_config": _informational(None),  # what these four did shows in init_lora_weights
    "corda_config": _informational(None),
    "lora_ga_config": _informational(None),
    "loftq_config": _informational({}),
    "megatron_config": _informational(None),
    "megatron_core": _informational("megatron.core"),
}

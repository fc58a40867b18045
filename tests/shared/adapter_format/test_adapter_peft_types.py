"""What is said of PEFT's other types is what PEFT can do with them."""

import peft
import pytest
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import LlamaConfig, LlamaForCausalLM

from shared.adapter_format.config import parse_adapter_config
from shared.adapter_format.peft_types import CONVERTIBLE, NOT_MERGED
from shared.errors import UnsupportedAdapter

TYPES = sorted(each.value for each in peft.PeftType if each != peft.PeftType.LORA)
# Needs a package, or adapters of its own.
NOT_TRIED = {"ADAMSS", "XLORA"}
TOKENS = {"num_virtual_tokens": 2}
LINEARS = {"target_modules": ["q_proj", "v_proj"]}
KEYS = {
    "PROMPT_TUNING": TOKENS,
    "PREFIX_TUNING": TOKENS,
    "CARTRIDGE": TOKENS,
    "P_TUNING": {**TOKENS, "encoder_hidden_size": 8},
    "MULTITASK_PROMPT_TUNING": {**TOKENS, "num_tasks": 2},
    "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]},
    "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 1},
    "ADALORA": {**LINEARS, "total_step": 10},
    "IA3": {"target_modules": ["down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["norm"]},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2]},
    "FOURIERFT": {**LINEARS, "n_frequency": 20},
    "WAVEFT": {**LINEARS, "n_frequency": 20},
    "VBLORA": {**LINEARS, "vector_length": 16},
    "C3A": {**LINEARS, "block_size": 16},
    "MISS": {**LINEARS, "r": 8},
    "PSOFT": {**LINEARS, "r": 8},
    "SHIRA": {**LINEARS, "r": 4},
}
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


def advice(peft_type):
    with pytest.raises(UnsupportedAdapter) as caught:
        parse_adapter_config({"peft_type": peft_type})
    assert caught.value.metadata == {"key": "peft_type"}
    assert caught.value.message.startswith(f'adapter_config.json: peft_type: "{peft_type}" is not served, only LORA is')
    return caught.value.message.rpartition("; ")[2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("peft_type", sorted(set(TYPES) - NOT_TRIED))
def test_what_can_be_done_about_it(peft_type):
    base = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=1, **SIZES))
    keys = {"task_type": "CAUSAL_LM", **KEYS.get(peft_type, LINEARS)}
    model = peft.get_peft_model(base, PEFT_TYPE_TO_CONFIG_MAPPING[peft_type](**keys))
    said = advice(peft_type)
    assert ("save_as_lora" in said) == model.supports_lora_conversion()
    try:
        model.merge_and_unload()
    except (AttributeError, NotImplementedError, ValueError):
        assert said == "train a LoRA"
    else:
        assert "merge it into the base model and register that as a base model" in said


def test_the_types_are_those_of_peft():
    assert set(TYPES) > CONVERTIBLE | NOT_MERGED
    assert not CONVERTIBLE & NOT_MERGED
    assert advice("XLORA") == "train a LoRA"
    assert advice("A_TYPE_OF_TOMORROW").startswith("train a LoRA, or merge")

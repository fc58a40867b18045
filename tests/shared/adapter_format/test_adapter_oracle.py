"""Adapters that PEFT saved bind with exactly the modules, ranks and scales that PEFT has after loading them.

After loading, because saving sorts the patterns, and where patterns overlap the first in the file counts.
"""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

from shared.adapter_format.binding import plan
from shared.adapter_format.config import parse_adapter_config
from shared.adapter_format.header import read_header_of
from shared.base_model import MODULES
from tests.shared.adapter_format.adapter_samples import MODEL, RAW_MODEL

# transformers warns of its own coming changes; PEFT of patterns that match nothing, which is a case here.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:The following .*_pattern keys:RuntimeWarning")

CASES = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "all seven": {"target_modules": list(MODULES), "r": 3, "lora_alpha": 7},
    "all-linear": {"target_modules": "all-linear"},
    "all-linear without": {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    "regex": {"target_modules": r".*\.layers\.[02]\.(self_attn\.[qk]_proj|mlp\.up_proj)"},
    "excluded by regex": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": r".*layers\.1\..*q_proj"},
    "layers": {"target_modules": ["k_proj", "gate_proj"], "layers_to_transform": [0, 2]},
    "one layer": {"target_modules": ["k_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    "named in full": {"target_modules": ["model.layers.0.mlp.up_proj", "v_proj"], "layers_to_transform": [1]},
    "missing target": {"target_modules": ["q_proj", "query_key_value"]},
    "rslora and patterns": {
        "target_modules": list(MODULES),
        "use_rslora": True,
        "r": 5,
        "lora_alpha": 11,
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 9, "up_proj": 2, "model.layers.2.mlp.down_proj": 1},
        "alpha_pattern": {r".*\.[02]\.mlp\..*": 6, "v_proj": 3.5, "_proj": 99, r"(self_attn|mlp)\.gate_proj": 13},
    },
}


def saved_plan(model, folder, keys, dtype=torch.float32):
    """Our plan for an adapter that PEFT saved, and rank and scale by module as PEFT loads it."""
    get_peft_model(model, LoraConfig(**keys)).to(dtype).save_pretrained(folder)
    bound = plan(
        parse_adapter_config((folder / "adapter_config.json").read_bytes()),
        read_header_of(folder / "adapter_model.safetensors"),
        MODEL,
    )
    loaded = PeftModel.from_pretrained(type(model)(model.config), folder)
    expected = {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in loaded.named_modules()
        if isinstance(getattr(module, "scaling", None), dict)
    }
    return bound, expected


@pytest.mark.parametrize("case", CASES)
def test_scales_are_those_of_peft(case, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**RAW_MODEL))
    bound, expected = saved_plan(model, tmp_path, CASES[case])
    assert {module.path: (module.rank, module.scale) for module in bound.modules} == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files(dtype, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**RAW_MODEL))
    bound, expected = saved_plan(model, tmp_path, CASES["plain"], dtype)
    assert len(bound.modules) == len(expected)


def test_a_bare_backbone(tmp_path):
    model = AutoModel.from_config(LlamaConfig(**RAW_MODEL))
    bound, expected = saved_plan(model, tmp_path, CASES["rslora and patterns"])
    found = {module.path.removeprefix("model."): (module.rank, module.scale) for module in bound.modules}
    assert found == expected

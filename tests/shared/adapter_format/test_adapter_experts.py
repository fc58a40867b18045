"""LoRA on experts, in both layouts, against what PEFT makes of the same files."""

import dataclasses
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from shared.adapter_format.config import parse_adapter_config
from shared.adapter_format.experts import Experts, plan_experts
from shared.adapter_format.header import read_header_of
from shared.adapter_format.reasons import ONE_TRAINING, OTHER_BASE, RIGHT_RANK, SAVE_AGAIN
from shared.errors import AdapterInvalid
from tests.shared.adapter_format.adapter_samples import config, info

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=4)),
    "qwen3": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=12)),
    "gpt-oss": (GptOssForCausalLM, GptOssConfig(**SIZES, num_local_experts=4, layer_types=["full_attention"] * 2)),
}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def experts_of(family):
    return [
        Experts(f"model.layers.{layer}.mlp.experts", 4, 16, 12 if family == "qwen3" else 24, family == "gpt-oss")
        for layer in range(2)
    ]


def fused_deltas(plan, tensors):
    """By parameter name, what is added to it."""
    deltas = {}
    for binding in plan.fused:
        a = tensors[binding.a].double().view(binding.experts.num_experts, binding.rank, -1)
        b = tensors[binding.b].double()
        parts = [
            binding.scale * b[:, expert :: binding.experts.num_experts] @ a[expert]
            for expert in range(binding.experts.num_experts)
        ]
        stacked = torch.stack([part.T if binding.experts.is_transposed else part for part in parts])
        deltas[f"{binding.experts.path}.{binding.parameter}"] = stacked
    for binding in plan.by_expert:
        name = f"{binding.experts.path}.{binding.parameter}"
        delta = deltas.setdefault(name, torch.zeros(4, *binding.experts.shape(binding.parameter)).double())
        b = tensors[binding.b].double()
        rows = slice(binding.first_row, binding.first_row + b.shape[0])
        delta[binding.expert, rows] += binding.scale * b @ tensors[binding.a].double()
    return deltas


def assert_merged(loaded, base, deltas):
    merged = dict(loaded.merge_and_unload().named_parameters())
    for name, parameter in base.named_parameters():
        if "experts." in name and not name.endswith("_bias"):
            expected = parameter.double() + deltas.get(name, 0)
            torch.testing.assert_close(merged[name].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("targets", [BOTH, BOTH[::-1], BOTH[:1], ["experts.down_proj"]])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_parameters(family, targets, tmp_path):
    model_class, model_config = FAMILIES[family]
    base = model_class(model_config)
    keys = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj"], "use_rslora": True}
    patterns = {"rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"0.mlp.experts.gate_up_proj": 7}}
    adapted = get_peft_model(base, LoraConfig(**keys, **patterns, target_parameters=targets, init_lora_weights=False))
    adapted.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    parsed = parse_adapter_config({**raw, "target_parameters": None})
    parsed = dataclasses.replace(parsed, target_parameters=tuple(targets))
    plan = plan_experts(parsed, read_header_of(tmp_path / "adapter_model.safetensors"), experts_of(family))
    assert len(plan.fused) == 2 * len(targets)
    assert len(plan.others) == 4
    fresh = model_class(model_config)
    fresh.load_state_dict(adapted.unload().state_dict())
    deltas = fused_deltas(plan, load_file(tmp_path / "adapter_model.safetensors"))
    base_copy = model_class(model_config)
    base_copy.load_state_dict(fresh.state_dict())
    assert_merged(PeftModel.from_pretrained(fresh, tmp_path), base_copy, deltas)


@pytest.mark.parametrize(
    ("family", "parent", "linears"),
    [
        ("mixtral", "block_sparse_moe", ("w1", "w2", "w3")),
        ("qwen3", "mlp", ("gate_proj", "down_proj", "up_proj")),
    ],
)
def test_pairs_of_each_expert(family, parent, linears, tmp_path):
    model_class, model_config = FAMILIES[family]
    layers = experts_of(family)
    tensors = {}
    for layer, experts in enumerate(layers):
        for expert in range(4):
            for linear in linears:
                rows, columns = (experts.intermediate, 16) if linear != linears[1] else (16, experts.intermediate)
                name = f"base_model.model.model.layers.{layer}.{parent}.experts.{expert}.{linear}"
                tensors[f"{name}.lora_A.weight"] = torch.randn(4, columns)
                tensors[f"{name}.lora_B.weight"] = torch.randn(rows, 4)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    raw = config(target_modules=list(linears), task_type="CAUSAL_LM")
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw))
    plan = plan_experts(parse_adapter_config(raw), read_header_of(tmp_path / "adapter_model.safetensors"), layers)
    assert len(plan.by_expert) == 2 * 4 * 3
    base, fresh = model_class(model_config), model_class(model_config)
    fresh.load_state_dict(base.state_dict())
    assert_merged(PeftModel.from_pretrained(fresh, tmp_path), base, fused_deltas(plan, tensors))


# ---- what does not fit

PATH = "base_model.model.model.layers.0.mlp.experts"
LAYERS = experts_of("mixtral")[:1]
PARSED = parse_adapter_config(config())


def fused(inner="base_layer.", rows=48, columns=16, total=16):
    return {
        f"{PATH}.{inner}lora_A.weight": info("F32", (total, columns)),
        f"{PATH}.{inner}lora_B.weight": info("F32", (rows, total)),
    }


GOOD = fused() | fused("", 16, 24)


def refused(tensors, targets=tuple(BOTH), **changes):
    with pytest.raises(AdapterInvalid) as caught:
        plan_experts(dataclasses.replace(PARSED, target_parameters=targets, **changes), tensors, LAYERS)
    return caught.value.metadata


def test_the_good_one():
    plan = plan_experts(dataclasses.replace(PARSED, target_parameters=tuple(BOTH)), GOOD, LAYERS)
    assert [(binding.parameter, binding.rank, binding.scale) for binding in plan.fused] == [
        ("gate_up_proj", 4, 2.0),
        ("down_proj", 4, 2.0),
    ]


@pytest.mark.parametrize(
    "tensors",
    [
        fused(),
        GOOD | fused(rows=47),
        GOOD | fused(columns=24),
        GOOD | fused(total=15),
        GOOD | fused(total=12),
        {name: found for name, found in GOOD.items() if not name.endswith("base_layer.lora_B.weight")},
        {name: found for name, found in GOOD.items() if not name.endswith("base_layer.lora_A.weight")},
        GOOD | {f"{PATH}.lora_C.weight": info("F32", (1, 1))},
        GOOD | {f"{PATH.replace('0', '1')}.lora_A.weight": info("F32", (16, 16))},
        GOOD | {f"{PATH}.4.w1.lora_A.weight": info("F32", (4, 16)), f"{PATH}.4.w1.lora_B.weight": info("F32", (24, 4))},
    ],
)
def test_tensors_that_do_not_fit(tensors):
    assert "experts" in refused(tensors)["tensor"]


def text_of(tensors):
    with pytest.raises(AdapterInvalid) as caught:
        plan_experts(dataclasses.replace(PARSED, target_parameters=tuple(BOTH)), tensors, LAYERS)
    return caught.value.message


A, B = (f"tensor {PATH}.base_layer.lora_{side}.weight: " for side in "AB")


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (GOOD | fused(rows=47), f"{B}has shape [47, 16], not [48, 16] as the base model takes; {OTHER_BASE}"),
        (GOOD | fused(columns=24), f"{A}has shape [16, 24], not [16, 16] as the base model takes; {OTHER_BASE}"),
        (
            GOOD | {f"{PATH}.base_layer.lora_B.weight": info("F32", (48, 12))},
            f"{B}has shape [48, 12], not [48, 16]: its lora_A has 16 rows; {ONE_TRAINING}",
        ),
        (
            GOOD | {f"{PATH}.base_layer.lora_B.weight": info("F32", (16, 48))},
            f"{B}has shape [16, 48], not [48, 16] as the base model takes; {SAVE_AGAIN}",
        ),
        (GOOD | fused(total=12), f"{A}has rank 3; adapter_config.json says 4 (r or rank_pattern); {RIGHT_RANK}"),
        (
            {PATH.replace("0", "1") + ".lora_A.weight": info("F32", (16, 16))},
            f"tensor {PATH.replace('0', '1')}.lora_A.weight: belongs to no experts of this base model; {OTHER_BASE}, "
            "or remove the tensor",
        ),
        (
            fused(),
            f"tensor {LAYERS[0].path}.lora_A.weight: is missing: target_parameters promises LoRA on down_proj; "
            f"{OTHER_BASE}, or save it again",
        ),
    ],
)
def test_the_advice_is_that_for_other_tensors(tensors, text):
    assert text_of(tensors) == text


def test_an_inner_pair_needs_two_targets():
    assert refused(fused(), targets=("mlp.experts.gate_up_proj",))["tensor"] == f"{PATH}.base_layer.lora_A.weight"
    assert refused(fused(""), targets=("mlp.experts.other",))["tensor"] == f"{PATH}.lora_A.weight"


@pytest.mark.parametrize("key", ["use_dora", "lora_bias", "velora_config"])
def test_what_peft_cannot_combine(key):
    assert refused(GOOD, **{key: True}) == {"key": key}

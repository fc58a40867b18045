"""Tiny random models of every supported family, built and saved by transformers: the oracle of these tests."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}

FAMILIES: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-no-gqa": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 6}),
    "llama-head-dim": (LlamaForCausalLM, LlamaConfig, {"head_dim": 14}),
    "llama3-rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "linear-rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LINEAR}),
    "yarn": (Qwen2ForCausalLM, Qwen2Config, {"rope_parameters": YARN}),
    "yarn-factor": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True, "head_dim": 12}),
    "qwen3-bias": (Qwen3ForCausalLM, Qwen3Config, {"attention_bias": True}),
}


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A float32 model of `family` with random weights, biases and norms that matter."""
    model_class, config_class, options = FAMILIES[family]
    sizes = SIZES if config_class is not Qwen2Config else {k: v for k, v in SIZES.items() if k != "head_dim"}
    model = model_class(config_class(**(sizes | options))).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_norm = name.endswith("norm.weight")
        parameter.normal_(1.0 if is_norm else 0.0, 0.2, generator=generator)
    return model


def oracle_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """[tokens, vocab] from one forward pass without cache."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def rewrite_old_generation(folder: Path) -> None:
    """Rewrite config.json as transformers 4 wrote it: rope_theta, rope_scaling, torch_dtype, no layer_types."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    rope: Mapping[str, Any] = raw.pop("rope_parameters")
    raw["torch_dtype"] = raw.pop("dtype")
    raw.pop("layer_types", None)
    raw["rope_theta"] = rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    raw["rope_scaling"] = None if rope["rope_type"] == "default" else scaling
    path.write_text(json.dumps(raw))

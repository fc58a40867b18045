"""Random base models, small enough that every kind of adapter can be tried on each: 64 wide, three layers."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 256
LAYERS = 3
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "initializer_range": 0.12, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Base(NamedTuple):
    """One base model. `is_default`: every run serves adapters of each kind on it; the others where slow tests run."""

    model: Callable[[Any], PreTrainedModel]
    config: Any
    keys: dict[str, Any]
    is_tied: bool
    is_default: bool


BASES = {
    "llama": Base(LlamaForCausalLM, LlamaConfig, {}, is_tied=False, is_default=False),
    # The only Llamas with biases on all seven linears.
    "llama-tied": Base(
        LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}, is_tied=True, is_default=True
    ),
    "qwen2": Base(Qwen2ForCausalLM, Qwen2Config, {}, is_tied=False, is_default=True),
    "qwen2-tied": Base(Qwen2ForCausalLM, Qwen2Config, {}, is_tied=True, is_default=False),
    "qwen3": Base(Qwen3ForCausalLM, Qwen3Config, {}, is_tied=False, is_default=False),
    "qwen3-tied": Base(Qwen3ForCausalLM, Qwen3Config, {}, is_tied=True, is_default=False),
}


def build(name: str, folder: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> None:
    """Writes the base model `name`, in `dtype` and with other `sizes` if wanted.

    Biases and norms are random too: transformers would leave them 0 and 1.
    """
    base = BASES[name]
    torch.manual_seed(zlib.crc32(name.encode()))
    model = base.model(base.config(**(_SIZES | sizes), **base.keys, tie_word_embeddings=base.is_tied))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(".bias") or "norm" in key:
                parameter += 0.1 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(folder)

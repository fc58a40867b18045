"""A tiny base model and adapters for it, as plain headers, for the tests in this folder."""

import json

import pytest

from shared.adapter_format.binding import plan
from shared.adapter_format.config import parse_adapter_config
from shared.adapter_format.header import ITEM_SIZES, TensorInfo
from shared.base_model import MODULES, linear_shape, module_path, parse_config

RAW_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODEL = parse_config(RAW_MODEL)
TIED_MODEL = parse_config({**RAW_MODEL, "tie_word_embeddings": True})
BIASED_MODEL = parse_config({**RAW_MODEL, "architectures": ["Qwen2ForCausalLM"]})
PREFIX = "base_model.model."


def config(**keys):
    """An adapter_config.json for rank 4 on q and v."""
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **keys}


def info(dtype, shape, begin=0):
    size = ITEM_SIZES[dtype]
    for dimension in shape:
        size *= dimension
    return TensorInfo(dtype, tuple(shape), begin, begin + size)


def tensors(
    modules=("q_proj", "v_proj"), layers=range(3), rank=4, prefix=PREFIX, dtype="F32", rename=lambda path: path
):
    """Header entries of lora_A and lora_B of `modules` in `layers`."""
    found = {}
    for layer in layers:
        for name in modules:
            module = MODULES.index(name)
            rows, columns = linear_shape(MODEL, module)
            path = prefix + rename(module_path(layer, module))
            found[f"{path}.lora_A.weight"] = info(dtype, (rank, columns))
            found[f"{path}.lora_B.weight"] = info(dtype, (rows, rank))
    return found


def bind(entries, model=MODEL, **keys):
    """The plan for header entries and keys of an adapter_config.json."""
    return plan(parse_adapter_config(config(**keys)), entries, model)


def refused(error, entries, model=MODEL, **keys):
    """The error of a plan that must fail."""
    with pytest.raises(error) as caught:
        bind(entries, model, **keys)
    return caught.value


def safetensors_bytes(header, data=b""):
    """A safetensors file with this header (an object, or the bytes of one) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data

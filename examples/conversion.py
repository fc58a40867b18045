"""A Llama model in a GGUF file, written as a Hugging Face folder's config and weights (numpy only).

llama.cpp stores the rows of the query and key projections in another order than Hugging Face, because its rotary
embedding pairs neighbouring rows and Hugging Face's pairs row i with row i + head_dim / 2; `unpermute` restores it.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

from shared.errors import FailedPrecondition

# GGUF name -> Hugging Face name; {} is the layer.
MODEL_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def metadata(reader: GGUFReader) -> dict[str, Any]:
    """Every key of the GGUF file's metadata as plain Python values."""
    return {name: field.contents() for name, field in reader.fields.items()}


def model_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json, in the generation of keys that every reader understands.

    Raises:
        FailedPrecondition: The file holds something else than a Llama model.
    """
    if meta["general.architecture"] != "llama":
        raise FailedPrecondition(f"architecture {meta['general.architecture']!r} is not llama")
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": hidden**-0.5,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        # GGUF keeps a float32: its shortest decimal is the number that was meant.
        "rms_norm_eps": float(str(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": meta["llama.vocab_size"],
    }


def generation_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The content of generation_config.json."""
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """weight [out, in], rows as `[heads, head_dim / 2, 2]` (llama.cpp) to `[heads, 2, head_dim / 2]` (Hugging Face)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even; values are finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def tensor_name(gguf_name: str) -> str:
    """The Hugging Face name of a tensor.

    Raises:
        FailedPrecondition: The tensor belongs to no Llama model with tied embeddings.
    """
    if gguf_name in MODEL_NAMES:
        return MODEL_NAMES[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, part, "weight"] if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    raise FailedPrecondition(f"tensor {gguf_name!r} has no place in a Llama model", metadata={"tensor": gguf_name})


def tensors(reader: GGUFReader, config: Mapping[str, Any]) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """Every tensor under its Hugging Face name, as bfloat16 bits."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        name = tensor_name(tensor.name)
        weight = dequantize(tensor.data, tensor.tensor_type)
        module = name.split(".")[-2]
        yield name, to_bfloat16(unpermute(weight, heads[module]) if module in heads else weight)


def write_safetensors(path: Path, arrays: Mapping[str, NDArray[np.uint16]]) -> None:
    """A safetensors file of bfloat16 bits: the header's length (8 bytes), the header (JSON), the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            array.tofile(file)

"""Model folders of real shapes without a download: config.json, a tokenizer, and random weights if wanted."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shared.base_model import parse_config, tensor_shapes
from tests.inference_service.serving_fakes import byte_alphabet

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 128001, "bos_token_id": 128000,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "eos_token_id": 1,
    },
}  # fmt: skip

SHARD_BYTES = 2 << 30
RANDOM_ELEMENTS = 1 << 25  # the same numbers in other places are read and multiplied like others


def write_model(folder: Path, shape: str, *, with_weights: bool = False) -> None:
    """config.json and tokenizer.json of a shape, and on demand a checkpoint in shards of bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    _tokenizer(SHAPES[shape]["vocab_size"]).save(str(folder / "tokenizer.json"))
    if with_weights:
        _write_weights(folder, shape)


def _tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of as many tokens: the bytes, then pairs and triples of ASCII characters."""
    ascii_characters = [chr(code) for code in range(33, 127)]
    pairs = list(product(ascii_characters, repeat=2))
    triples = ((a + b, c) for (a, b), c in product(pairs, ascii_characters))
    merges = list(islice((merge for group in (pairs, triples) for merge in group), vocab_size - 256))
    vocab = {token: number for number, token in enumerate([*byte_alphabet(), *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write_weights(folder: Path, shape: str) -> None:
    shards = list(_shards(tensor_shapes(parse_config(SHAPES[shape]))))
    random = (torch.randn(RANDOM_ELEMENTS) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy()
    names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name, shard: _write_shard(folder / name, shard, random), names, shards))
    index = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    nbytes = 0
    for name, shape in shapes.items():
        if shard and nbytes + 2 * prod(shape) > SHARD_BYTES:
            yield shard
            shard, nbytes = {}, 0
        shard[name] = shape
        nbytes += 2 * prod(shape)
    yield shard


def _write_shard(file: Path, shard: dict[str, tuple[int, ...]], random: Any) -> None:
    """A safetensors file: the length of the header, the header, the data."""
    header, end = {}, 0
    for name, shape in shard.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for shape in shard.values():
            left = 2 * prod(shape)
            while left:
                left -= out.write(random[: min(left, random.size)].data)

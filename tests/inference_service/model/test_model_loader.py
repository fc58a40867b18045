"""Checkpoints of every kind load; broken ones are refused, naming the tensor or file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference_service.model.decoder import Decoder
from inference_service.model.loader import destinations, init_random, load_config, load_model
from shared.base_model import tensor_shapes
from shared.errors import BaseModelMismatch, InvalidArgument
from tests.inference_service.model.paged import PagedRun
from tests.inference_service.model.tiny_models import FAMILIES, build, oracle_logits, rewrite_old_generation

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(folder, load_config(folder)[1], "cpu", dtype)


def assert_same_logits(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> None:
    model = build(family)
    for parameter in model.parameters():  # not model.to(), which would round the rotary frequencies too
        parameter.copy_(parameter.to(dtype))
    logits = PagedRun(load(folder)).step({"a": TOKENS})["a"]
    torch.testing.assert_close(logits, oracle_logits(model, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_config_of_the_older_generation(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    rewrite_old_generation(tmp_path)
    assert_same_logits(tmp_path, family)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3"])
def test_sharded_files(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_logits(tmp_path, family)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files(dtype: torch.dtype, tmp_path: Path) -> None:
    build("qwen2").to(dtype).save_pretrained(tmp_path)
    assert_same_logits(tmp_path, "qwen2", dtype)


def test_tied_output_layer_is_the_embedding(tmp_path: Path) -> None:
    build("llama-tied").save_pretrained(tmp_path)
    decoder = load(tmp_path)
    assert decoder.lm_head.data_ptr() == decoder.embed.data_ptr()
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    numel = sum(torch.Size(shape).numel() for shape in tensor_shapes(decoder.config).values())
    assert sum(parameter.numel() for parameter in decoder.parameters()) == numel


def test_inv_freq_and_the_copy_of_a_tied_layer_are_ignored(tmp_path: Path) -> None:
    build("llama-tied").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_logits(tmp_path, "llama-tied")


@pytest.mark.parametrize("family", FAMILIES)
def test_destinations_are_the_tensors_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.config.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"architectures": [type(model).__name__]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_config(tmp_path)[1]
    places = destinations(init_random(config, "cpu", torch.float32, seed=0))
    assert {name: tuple(place.shape) for name, place in places.items()} == tensor_shapes(config)


def test_random_weights_follow_the_seed(tmp_path: Path) -> None:
    build("qwen3").save_pretrained(tmp_path)
    config = load_config(tmp_path)[1]
    one, same, other = (init_random(config, "cpu", torch.float32, seed).embed for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_eos_ids_of_both_files(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    raw, config = load_config(tmp_path)
    assert config.eos_token_ids == (2, 7)
    assert raw["eos_token_id"] == [2, 7]


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        load_config(tmp_path)


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        (lambda t: t.pop(Q), Q, "lacks"),
        (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.ones(2)}), "model.layers.9", "not part"),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.ones(56)}), "up_proj.bias", "not part"),
        (lambda t: t.update({Q: t[Q][1:].clone()}), Q, "shape"),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), Q, "dtype"),
    ],
)
def test_wrong_tensors_are_named(change, name: str, reason: str, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BaseModelMismatch, match=reason) as caught:
        load(tmp_path)
    assert name in caught.value.message
    assert name in caught.value.metadata["tensor"]


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    first = next(iter(load_file(shards[0]).items()))
    save_file(load_file(shards[1]) | dict([first]), shards[1])
    with pytest.raises(BaseModelMismatch, match=f"{first[0]} is there twice"):
        load(tmp_path)


def test_broken_and_missing_files_are_named(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(BaseModelMismatch, match=r"model\.safetensors cannot be read"):
        load(tmp_path)
    weights.unlink()
    with pytest.raises(BaseModelMismatch, match="holds neither"):
        load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {Q: "gone.safetensors"}}))
    with pytest.raises(BaseModelMismatch, match=r"gone\.safetensors cannot be read"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": {Q: "../elsewhere.safetensors"}}))
    with pytest.raises(BaseModelMismatch, match="files beside it"):
        load(tmp_path)

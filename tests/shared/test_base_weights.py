import json

import pytest
import torch
from safetensors.torch import save_file

from shared.base_model import parse_config, tensor_shapes
from shared.base_weights import fingerprint_with_weights
from shared.errors import InvalidArgument

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in tensor_shapes(parse_config(CONFIG)).items()}


def save(folder, tensors, name="model.safetensors"):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def test_how_the_checkpoint_is_split_and_what_else_it_holds_do_not_matter(tmp_path, tensors):
    whole = fingerprint_with_weights(CONFIG, save(tmp_path / "whole", tensors))
    assert whole.startswith("sha256:")
    names = sorted(tensors)
    split = save(tmp_path / "split", {name: tensors[name] for name in names[:4]}, "a.safetensors")
    save(split, {name: tensors[name] for name in names[4:]} | {"rotary.inv_freq": torch.ones(3)}, "b.safetensors")
    weight_map = {name: "a.safetensors" if name in names[:4] else "b.safetensors" for name in names}
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert fingerprint_with_weights(CONFIG, split) == whole


@pytest.mark.parametrize(("row", "changes"), [(0, True), (-1, True), (150, False)])
def test_first_and_last_bytes_of_every_tensor_count(tmp_path, tensors, row, changes):
    before = fingerprint_with_weights(CONFIG, save(tmp_path / "before", tensors))
    tensors["model.embed_tokens.weight"][row, 5] += 1  # 19,200 bytes: the middle is not sampled
    after = fingerprint_with_weights(CONFIG, save(tmp_path / "after", tensors))
    assert (after != before) == changes


def test_dtype_counts(tmp_path, tensors):
    before = fingerprint_with_weights(CONFIG, save(tmp_path / "before", tensors))
    half = {name: tensor.half() for name, tensor in tensors.items()}
    assert fingerprint_with_weights(CONFIG, save(tmp_path / "after", half)) != before


def _missing(folder, tensors):
    del tensors["model.norm.weight"]
    save(folder, tensors)


def _misshapen(folder, tensors):
    save(folder, tensors | {"model.norm.weight": torch.ones(3)})


def _truncated(folder, tensors):
    save(folder, tensors)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _no_files(folder, tensors):
    folder.mkdir()


def _bad_index(folder, tensors):
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')


@pytest.mark.parametrize("spoil", [_missing, _misshapen, _truncated, _no_files, _bad_index])
def test_a_broken_checkpoint_is_an_invalid_model(tmp_path, tensors, spoil):
    spoil(tmp_path / "model", tensors)
    with pytest.raises(InvalidArgument) as caught:
        fingerprint_with_weights(CONFIG, tmp_path / "model")
    assert caught.value.violations[0].field == "model"

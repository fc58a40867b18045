"""Adapters that PEFT trained against a modified base model compute the same after the conversion to plain LoRA."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import KasaConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from loraplex.convert.conversion import convert
from loraplex.convert.removed import kasa, olora, pissa
from shared.errors import AdapterInvalid, InvalidArgument, SourceNotFound, UnsupportedAdapter
from tests.loraplex.cli_fakes import run_cli, serving

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*modified:UserWarning"),  # PEFT of pattern and rsLoRA with PiSSA
    pytest.mark.filterwarnings("ignore:.*rank_pattern:UserWarning"),
]

SIZES = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
BASES = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen2": (Qwen2ForCausalLM, Qwen2Config)}
INPUTS = torch.arange(40)[None] * 37 % 96
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

CASES = {
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "kasa": {"kasa_config": KasaConfig()},
    "pissa at the largest rank": {"init_lora_weights": "pissa", "r": 24, "target_modules": ["k_proj"]},
    "pissa of rank 1": {"init_lora_weights": "pissa", "r": 1},
    "kasa at the largest rank": {"kasa_config": KasaConfig(), "r": 23, "target_modules": ["v_proj"]},
    "rslora and patterns": {
        "init_lora_weights": "pissa", "use_rslora": True, "lora_alpha": 5, "rank_pattern": {"q_proj": 3},
        "alpha_pattern": {r".*\.1\..*proj": 7},
    },
    "olora with biases": {"init_lora_weights": "olora", "bias": "all"},
    "kasa with rslora": {"kasa_config": KasaConfig(), "use_rslora": True},
    "pissa with dora": {"init_lora_weights": "pissa", "use_dora": True},
    "olora with a saved norm": {"init_lora_weights": "olora", "modules_to_save": ["model.norm"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """The folders of random base models by name; Qwen2's linears have biases."""
    torch.manual_seed(1)
    folders = {}
    for name, (model, config) in BASES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        model(config(**SIZES, initializer_range=0.06)).save_pretrained(folders[name])
    return folders


@pytest.fixture
def base(bases):
    return bases["llama"]


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def trained(base, folder, **keys):
    """Writes an adapter whose every number moved after its initialisation."""
    torch.manual_seed(2)
    keys = {"r": 6, "lora_alpha": 9, "target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"], **keys}
    model = get_peft_model(load(base), LoraConfig(**keys))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or name.endswith(".bias"):
                parameter += torch.randn_like(parameter) * 0.05
    model.save_pretrained(folder)
    return folder


def silent(done, of):
    assert 0 < done <= of


@torch.inference_mode()
def logits(base, adapter, dtype=torch.float32):
    model = PeftModel.from_pretrained(load(base, dtype), adapter).to(dtype).eval()
    return model(INPUTS).logits


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("case", CASES)
def test_the_same_as_peft(case, name, bases, tmp_path):
    base = bases[name]
    adapter = trained(base, tmp_path / "adapter", **CASES[case])
    found = convert(adapter, base, tmp_path / "plain", silent)
    expected, got = logits(base, adapter), logits(base, tmp_path / "plain")
    unchanged = load(base)(INPUTS).logits
    naive = shutil.copytree(adapter, tmp_path / "naive")
    (naive / CONFIG).write_text(json.dumps(json.loads((naive / CONFIG).read_text()) | {"init_lora_weights": True}))
    # What differs is PEFT's decomposition in float32, by up to 3e-5 of the logits.
    assert (got - expected).abs().max() < 1e-4
    assert (got - logits(base, tmp_path / "plain", torch.float64)).abs().max() < 1e-5
    assert (unchanged - expected).abs().max() > 0.01
    assert found.warnings == ()
    if "kasa" not in case:
        assert (logits(base, naive) - expected).abs().max() > 0.01


def matrices(rows, columns):
    return np.random.default_rng(rows * 1000 + columns).normal(size=(rows, columns))


@given(st.integers(1, 40), st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_what_was_taken_out(rows, columns, data):
    """As the whole decompositions of torch in float64 say."""
    weight, scale = matrices(rows, columns), 1.7
    rank = data.draw(st.integers(1, min(rows, columns)))
    u, s, v = torch.linalg.svd(torch.from_numpy(weight), full_matrices=False)
    q, r = torch.linalg.qr(torch.from_numpy(weight))
    parts = {
        pissa: (u[:, :rank] * s[:rank]) @ v[:rank],
        kasa: (u[:, -rank:] * s[-rank:]) @ v[-rank:],
        olora: scale * q[:, :rank] @ r[:rank],
    }
    for take, expected in parts.items():
        removed = take(weight, rank, scale)
        assert removed.a.shape == (rank, columns)
        assert removed.b.shape == (rows, rank)
        np.testing.assert_allclose(scale * removed.b @ removed.a, expected.numpy(), atol=1e-9)
        assert not removed.is_chance


def test_equal_singular_values_are_chance():
    assert pissa(np.eye(4), 2, 1.0).is_chance
    assert kasa(np.eye(4), 2, 1.0).is_chance
    assert olora(np.ones((4, 4)), 2, 1.0).is_chance
    assert not pissa(np.eye(4), 4, 1.0).is_chance  # all of them are taken
    assert not kasa(np.diag([3.0, 2, 0, 0, 0]), 2, 1.0).is_chance  # nothing is taken


def test_a_checkpoint_in_bfloat16_and_in_shards(base, tmp_path):
    """PEFT takes the part out in float32 and keeps the rest in float32 where the model is loaded so."""
    load(base).to(torch.bfloat16).save_pretrained(tmp_path / "base", max_shard_size="20kB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    adapter = trained(tmp_path / "base", tmp_path / "adapter", init_lora_weights="pissa")
    convert(adapter, tmp_path / "base", tmp_path / "plain", silent)
    difference = logits(tmp_path / "base", adapter) - logits(tmp_path / "base", tmp_path / "plain")
    assert difference.abs().max() < 1e-4


def test_half_precision_adapters_and_files_beside_them(base, tmp_path):
    adapter = trained(base, tmp_path / "adapter", init_lora_weights="olora")
    save_file({k: v.to(torch.bfloat16) for k, v in load_file(adapter / WEIGHTS).items()}, adapter / WEIGHTS)
    (adapter / "tokenizer.json").write_text("{}")
    (adapter / "optimizer.pt").write_text("large")
    convert(adapter, base, tmp_path / "plain", silent)
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == [
        "README.md", CONFIG, WEIGHTS, "tokenizer.json",
    ]  # fmt: skip
    assert (logits(base, adapter) - logits(base, tmp_path / "plain")).abs().max() < 1e-4


REFUSED = {
    "plain": ({"init_lora_weights": True}, InvalidArgument, "nothing to convert"),
    "gaussian": ({"init_lora_weights": "gaussian"}, InvalidArgument, "nothing to convert"),
    "pissa_niter": ({"init_lora_weights": "pissa_niter_4"}, UnsupportedAdapter, "path_initial_model"),
    "corda": ({"init_lora_weights": "corda"}, UnsupportedAdapter, "path_initial_model"),
    "lora_ga": ({"init_lora_weights": "lora_ga"}, UnsupportedAdapter, "path_initial_model"),
    "loftq": ({"init_lora_weights": "loftq"}, UnsupportedAdapter, "quantised"),
    "kasa and pissa": ({"kasa_config": {"beta": 1}, "init_lora_weights": "pissa"}, UnsupportedAdapter, "kasa_config"),
    "alora": ({"alora_invocation_tokens": [1]}, UnsupportedAdapter, "alora_invocation_tokens"),
    "no diagonals": ({"kasa_config": {"beta": 1}, "init_lora_weights": True}, AdapterInvalid, "lora_diag"),
    "wrong rank": ({"r": 5}, AdapterInvalid, "lora_A"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, base, tmp_path):
    changes, error, text = REFUSED[case]
    adapter = trained(base, tmp_path / "adapter", init_lora_weights="pissa")
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(config | changes))
    with pytest.raises(error, match=text):
        convert(adapter, base, tmp_path / "plain", silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


def test_refused_for_what_is_or_is_not_there(base, tmp_path):
    adapter = trained(base, tmp_path / "adapter", init_lora_weights="pissa")
    other = tmp_path / "other"
    LlamaForCausalLM(LlamaConfig(**{**SIZES, "hidden_size": 32})).save_pretrained(other)
    with pytest.raises(SourceNotFound, match="nowhere"):
        convert(tmp_path / "nowhere", base, tmp_path / "plain", silent)
    with pytest.raises(AdapterInvalid, match=r"shape .*; give with --base the folder of the base model that it was"):
        convert(adapter, other, tmp_path / "plain", silent)
    shallow = tmp_path / "shallow"
    LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 1})).save_pretrained(shallow)
    with pytest.raises(AdapterInvalid, match=r"layers 0 to 0; give with --base the folder of the base model that it"):
        convert(adapter, shallow, tmp_path / "plain", silent)
    empty = shutil.copytree(base, tmp_path / "empty", ignore=lambda *_: ["model.safetensors"])
    with pytest.raises(InvalidArgument, match="safetensors"):
        convert(adapter, empty, tmp_path / "plain", silent)
    with pytest.raises(InvalidArgument, match="exists"):
        convert(adapter, base, adapter, silent)
    (adapter / "tokenizer.json").mkdir()
    with pytest.raises(AdapterInvalid, match=r"tokenizer\.json: .*folder"):
        convert(adapter, base, tmp_path / "plain", silent)


def test_base_weights_that_are_not_sound(base, tmp_path):
    adapter = trained(base, tmp_path / "adapter", init_lora_weights="pissa")
    broken = shutil.copytree(base, tmp_path / "broken")
    weights = load_file(base / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] = torch.nan
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(InvalidArgument, match=r"layers\.1\.mlp\.down_proj.weight holds NaN"):
        convert(adapter, broken, tmp_path / "plain", silent)
    (broken / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(InvalidArgument, match="truncated"):
        convert(adapter, broken, tmp_path / "plain", silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "broken"]


def test_a_base_model_of_another_name_is_told(base, tmp_path):
    adapter = trained(base, tmp_path / "below" / "mine", init_lora_weights="olora")
    other = shutil.copytree(base, tmp_path / "other")
    (told,) = convert(adapter.parent, other, tmp_path / "plain", silent).warnings  # in a folder by its name
    assert str(base) in told


def test_a_rank_whose_double_is_not_served(tmp_path):
    sizes = {**SIZES, "hidden_size": 288, "num_key_value_heads": 4, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "base")
    adapter = trained(tmp_path / "base", tmp_path / "a", init_lora_weights="pissa", r=260, target_modules=["q_proj"])
    with pytest.raises(UnsupportedAdapter, match=r"rank 260 becomes 520.*512"):
        convert(adapter, tmp_path / "base", tmp_path / "plain", silent)


def test_the_command(base, tmp_path):
    adapter = trained(base, tmp_path / "adapter", init_lora_weights="pissa")
    arguments = ("adapter", "convert", adapter, "--base", base, "--out", tmp_path / "plain")
    ran = run_cli(*arguments)
    assert ran.out == f"converted: {tmp_path / 'plain'} pissa, 8 linears, rank 12\n"
    again = run_cli(*arguments)
    assert again.status == 1
    assert f"{tmp_path / 'plain'} exists already; choose another --out" in again.err
    assert run_cli(*arguments, "--register", "mine").status == 2
    assert "INVALID_ARGUMENT" in run_cli(*arguments).err
    (tmp_path / "file").touch()
    assert "FAILED_PRECONDITION" in run_cli(*arguments[:-1], tmp_path / "file" / "x").err


def test_what_is_named_is_repeated_as_it_was_named(base, tmp_path):
    ran = run_cli("adapter", "convert", "hf://org/x", "--base", base, "--out", tmp_path / "plain")
    assert "SOURCE_NOT_FOUND: hf://org/x is not a folder on this machine; download the adapter first" in ran.err
    ran = run_cli("adapter", "convert", tmp_path, "--base", "hf://org/base", "--out", tmp_path / "plain")
    assert "hf://org/base is not a folder on this machine; give the local folder" in ran.err


def test_a_converted_adapter_that_could_not_be_registered(base, tmp_path):
    """Neither that run nor the next one, which finds it there, leaves its user without a way on."""
    adapters = tmp_path / "adapters"
    adapter = trained(base, adapters / "trained", init_lora_weights="olora", r=2)
    with serving(tmp_path) as servers:
        registry = ("--registry", servers.registry)
        arguments = (
            "adapter", "convert", adapter, "--base", base, "--out", adapters / "plain", "--register", "repaired",
            "--source", "file://main/plain", "--base-model", "tiny", "--alias", "prod", *registry,
        )  # fmt: skip
        command = (
            "loraplex adapter register repaired --base-model tiny --source file://main/plain --alias prod "
            f"--registry {servers.registry}"
        )
        first = run_cli(*arguments)
        assert first.status == 1
        assert f"plain is converted and not registered; for that alone: {command}" in first.err
        assert "BASE_MODEL_UNKNOWN" in first.err
        second = run_cli(*arguments)
        assert second.status == 1
        assert f"plain exists already; choose another --out, or if it is converted: {command}" in second.err
        run_cli("base-model", "register", base, "--id", "tiny", *registry)
        assert "registered: repaired@1 rank 4" in run_cli(*command.split()[1:]).out


def test_a_new_version_of_a_registered_adapter(base, tmp_path):
    adapters = tmp_path / "adapters"
    adapter = trained(base, adapters / "trained", init_lora_weights="olora", r=2)
    with serving(tmp_path) as servers:
        registry = ("--registry", servers.registry)
        run_cli("base-model", "register", base, "--id", "tiny", *registry)
        ran = run_cli(
            "adapter", "convert", adapter, "--base", base, "--out", adapters / "plain", "--register", "repaired",
            "--source", "file://main/plain", "--base-model", "tiny", "--alias", "prod", *registry,
        )  # fmt: skip
        assert "registered: repaired@1 rank 4" in ran.out, ran
        assert "prod→1" in run_cli("adapter", "show", "repaired", *registry).out

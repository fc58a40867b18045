"""config.json readings compared with transformers' own models and configs."""

import json
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shared.base_model import (
    MODULES,
    default_id,
    fingerprint,
    linear_shape,
    linear_shapes,
    module_path,
    parse_config,
    tensor_shapes,
)
from shared.errors import InvalidArgument

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def raw(family="llama", **keys):
    return {"architectures": [f"{ARCHITECTURES[family]}ForCausalLM"], "model_type": family, **SIZES, **keys}


def violated(config):
    with pytest.raises(InvalidArgument) as caught:
        parse_config(config)
    return {violation.field: violation.description for violation in caught.value.violations}


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("llama", {"head_dim": 6}),
        ("llama", {"num_key_value_heads": None}),
        ("mistral", {"head_dim": 8}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3", {"head_dim": 8, "attention_bias": True}),
    ],
)
def test_tensor_table_is_that_of_transformers(family, keys):
    config = raw(family, **keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if keys.get("tie_word_embeddings"):
        del expected["lm_head.weight"]
    assert tensor_shapes(parse_config(config)) == expected
    linears = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    assert linear_shapes(parse_config(config)) == linears


def test_module_indices():
    config = parse_config(raw())
    assert module_path(2, MODULES.index("down_proj")) == "model.layers.2.mlp.down_proj"
    assert linear_shape(config, MODULES.index("k_proj")) == (8, 16)
    assert linear_shape(config, MODULES.index("down_proj")) == (16, 24)


ROPES = [
    {"rope_type": "default", "rope_theta": 5000.0},
    {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "attention_factor": 1.5, "truncate": False},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 16.0},
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 0.5, "mscale": 0.7},
]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_both_generations_of_config_keys_read_the_same(family, rope):
    older = raw(family, max_position_embeddings=512, torch_dtype="bfloat16", rope_theta=rope["rope_theta"])
    older["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    newer = json.loads(AutoConfig.for_model(**raw(family, max_position_embeddings=512)).to_json_string(use_diff=False))
    newer |= {"architectures": older["architectures"], "dtype": "bfloat16", "rope_parameters": rope}
    newer.pop("rope_theta", None)
    assert parse_config(newer).rope_scaling == parse_config(older).rope_scaling
    assert parse_config(newer).rope_theta == parse_config(older).rope_theta == rope["rope_theta"]
    assert parse_config(newer).sliding_windows == parse_config(older).sliding_windows
    assert parse_config(newer).dtype == parse_config(older).dtype == "bfloat16"
    assert fingerprint(newer) == fingerprint(older)


@pytest.mark.parametrize("rope", [rope for rope in ROPES if rope["rope_type"] == "yarn"])
def test_yarn_attention_factor_is_that_of_transformers(rope):
    config = AutoConfig.for_model(**raw(max_position_embeddings=512, rope_parameters=dict(rope)))
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    scaling = parse_config(raw(max_position_embeddings=512, rope_parameters=rope)).rope_scaling
    assert scaling.attention_factor == expected
    assert scaling.original_max_position == config.rope_parameters["original_max_position_embeddings"]


def test_older_spelling_of_the_rope_type():
    scaling = parse_config(raw(rope_scaling={"type": "linear", "factor": 2})).rope_scaling
    assert (scaling.kind, scaling.factor) == ("linear", 2.0)
    assert parse_config(raw(rope_scaling=None)).rope_scaling is None
    assert parse_config(raw()).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("family", "keys", "windows"),
    [
        ("llama", {"sliding_window": 8}, (None, None, None)),
        ("mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("mistral", {}, (4096, 4096, 4096)),
        ("qwen2", {"sliding_window": 8}, (None, None, None)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, (None, None, None)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8, 8)),
        ("qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 1}, (None, None, None)),
        (
            "qwen3",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_sliding_windows(family, keys, windows):
    assert parse_config(raw(family, **keys)).sliding_windows == windows


@pytest.mark.parametrize(
    ("keys", "ids"), [({"eos_token_id": 2}, (2,)), ({"eos_token_id": [5, 3, 5]}, (5, 3)), ({"eos_token_id": None}, ())]
)
def test_eos_ids(keys, ids):
    assert parse_config(raw(**keys)).eos_token_ids == ids


@pytest.mark.parametrize(
    "name", [["GPT2LMHeadModel"], ["LlamaForCausalLM", "X"], [], None, "Gemma2ForCausalLM", 3, [None]]
)
def test_unsupported_architecture_is_named(name):
    violations = violated({**raw(), "architectures": name})
    assert list(violations) == ["config.architectures"]
    assert "not supported" in violations["config.architectures"]
    if isinstance(name, str):
        assert name in violations["config.architectures"]


def test_every_wrong_key_is_reported_at_once():
    config = raw(hidden_act="gelu", num_key_value_heads=3, head_dim=5, rope_theta=-1.0, torch_dtype="int8")
    del config["vocab_size"]
    config["num_hidden_layers"] = "3"
    violations = violated(config)
    assert set(violations) == {
        f"config.{key}"
        for key in (
            "hidden_act",
            "num_key_value_heads",
            "head_dim",
            "rope_theta",
            "torch_dtype",
            "vocab_size",
            "num_hidden_layers",
        )
    }
    assert violations["config.vocab_size"] == "is missing"
    assert "gelu" in violations["config.hidden_act"]


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "config.rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "config.rope_parameters.rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "config.rope_parameters"),
        ({"rope_scaling": {"type": "linear"}}, "config.rope_scaling.factor"),
        ({"rope_scaling": "yarn"}, "config.rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "config.partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "config.quantization_config"),
        ({"num_hidden_layers": 10**9}, "config.num_hidden_layers"),
        ({"hidden_size": True}, "config.hidden_size"),
        ({"rms_norm_eps": float("nan")}, "config.rms_norm_eps"),
        ({"rms_norm_eps": None}, "config.rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "config.rope_scaling.factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": None}}, "config.rope_parameters.factor"),
        ({"eos_token_id": ["a"]}, "config.eos_token_id"),
        ({"tie_word_embeddings": "no"}, "config.tie_word_embeddings"),
    ],
)
def test_wrong_values(keys, field):
    assert list(violated(raw(**keys))) == [field]


def test_wrong_layer_types():
    keys = {"use_sliding_window": True, "layer_types": ["full_attention"]}
    assert list(violated(raw("qwen2", **keys))) == ["config.layer_types"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("aé", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("aé", max_size=3), inner, max_size=3),
    max_leaves=5,
)
KEYS = [*SIZES, "head_dim", "rope_scaling", "rope_parameters", "eos_token_id", "sliding_window", "dtype", "layer_types"]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(ARCHITECTURES)), st.dictionaries(st.sampled_from(KEYS), json_values))
def test_no_config_raises_anything_else(family, keys):
    with suppress(InvalidArgument):
        fingerprint(raw(family, **keys))


def test_fingerprint_covers_what_changes_results_only():
    same = raw(bos_token_id=1, eos_token_id=[2, 3], use_cache=False, transformers_version="4.1", torch_dtype="float16")
    assert fingerprint(same) == fingerprint(raw())
    assert fingerprint(raw()).startswith("sha256:")
    assert len(fingerprint(raw())) == 71
    for change in ({"rope_theta": 9.0}, {"vocab_size": 33}, {"rms_norm_eps": 1e-5}, {"attention_bias": True}):
        assert fingerprint(raw(**change)) != fingerprint(raw())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "huggingfacetb--smollm2-135m-instruct"),
        ("gpt", "gpt"),
        ("/models/Some-Folder/", "some-folder"),
        ("./SmolLM2", "smollm2"),
        ("a/b/C", "c"),
    ],
)
def test_default_id(name, expected):
    assert default_id(name) == expected

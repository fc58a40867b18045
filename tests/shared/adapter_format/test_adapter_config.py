import dataclasses
import functools
import json
import re
import shutil

import peft
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from shared.adapter_format.config import MAX_RANK, parse_adapter_config
from shared.adapter_format.fields import FIELDS, TASKS
from shared.errors import AdapterInvalid, UnsupportedAdapter
from tests.shared.adapter_format.adapter_samples import config

PEFT_FIELDS = {field.name: field for field in dataclasses.fields(peft.LoraConfig)}


def test_defaults_are_those_of_peft():
    parsed = parse_adapter_config({"peft_type": "LORA"})
    assert (parsed.r, parsed.lora_alpha, parsed.use_rslora) == (8, 8.0, False)
    assert parsed.target_modules == ("q_proj", "v_proj")
    assert parsed.exclude_modules == parsed.layers_pattern == parsed.rank_pattern == parsed.alpha_pattern == ()
    assert parsed.layers_to_transform is None


@pytest.mark.parametrize("name", PEFT_FIELDS)
def test_every_field_of_peft_is_in_the_table_with_its_default(name):
    if name in ("peft_type", "inference_mode", "runtime_config"):  # differ between a class and a saved file
        assert name in FIELDS
        return
    default = PEFT_FIELDS[name].default
    assert FIELDS[name].default == ({} if default is dataclasses.MISSING else default)


def test_a_config_that_peft_saved_is_read(tmp_path):
    saved = peft.LoraConfig(
        r=6,
        lora_alpha=3,
        use_rslora=True,
        target_modules=["q_proj"],
        exclude_modules=["v_proj"],
        rank_pattern={"b": 2, "a": 1},
        alpha_pattern={"x": 5, "y": 0},
        layers_pattern="h",
        layers_to_transform=[0, 2],
        task_type="CAUSAL_LM",
    )
    saved.save_pretrained(tmp_path)
    parsed = parse_adapter_config((tmp_path / "adapter_config.json").read_bytes())
    assert (parsed.r, parsed.lora_alpha, parsed.use_rslora) == (6, 3.0, True)
    assert (parsed.target_modules, parsed.exclude_modules) == (("q_proj",), ("v_proj",))
    assert parsed.rank_pattern == (("a", 1), ("b", 2))  # PEFT sorts while saving
    assert parsed.alpha_pattern == (("x", 5.0), ("y", 0.0))
    assert (parsed.layers_to_transform, parsed.layers_pattern) == ((0, 2), ("h",))


def test_patterns_keep_the_order_of_the_file():
    raw = b'{"peft_type": "LORA", "rank_pattern": {"z": 1, "a": 2, "m": 3}}'
    assert parse_adapter_config(raw).rank_pattern == (("z", 1), ("a", 2), ("m", 3))


REFUSED = {
    "fan_in_fan_out": True,
    "layer_replication": [[0, 1]],
    "kasa_config": {"beta": 1},
    "monteclora_config": {"a": 1},
    "arrow_config": {"a": 1},
}


def test_every_refused_field_is_tried_below():
    assert set(REFUSED) == {key for key, field in FIELDS.items() if field.treatment == "refused"}


@pytest.mark.parametrize(("key", "value"), REFUSED.items())
def test_refused_fields_name_the_key_and_say_what_to_do(key, value):
    with pytest.raises(UnsupportedAdapter) as caught:
        parse_adapter_config(config(**{key: value}))
    assert caught.value.metadata == {"key": key}
    assert FIELDS[key].advice in caught.value.message
    for neutral in (None, FIELDS[key].default, *([] if FIELDS[key].is_group else [False, [], {}])):
        assert parse_adapter_config(config(**{key: neutral}))


@pytest.mark.parametrize("key", ["kasa_config", "arrow_config"])
def test_an_empty_object_is_a_configuration_with_defaults(key):
    with pytest.raises(UnsupportedAdapter) as caught:
        parse_adapter_config(config(**{key: {}}))
    assert caught.value.metadata == {"key": key}


@pytest.fixture(scope="module")
def saved_by_peft(tmp_path_factory):
    """The folder of an adapter, and what makes its base model."""
    folder = tmp_path_factory.mktemp("saved") / "adapter"
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    base = functools.partial(LlamaForCausalLM, LlamaConfig(vocab_size=16, num_hidden_layers=1, **sizes))
    targets = ["q_proj", "v_proj"]
    peft.get_peft_model(base(), peft.LoraConfig(target_modules=targets, init_lora_weights=False)).save_pretrained(
        folder
    )
    return folder, base


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", [*FIELDS, "a key of tomorrow"])
def test_null_is_read_where_peft_loads_it(key, saved_by_peft, tmp_path):
    folder, base = saved_by_peft
    raw = {**json.loads((folder / "adapter_config.json").read_text()), key: None}
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw))
    try:
        peft.PeftModel.from_pretrained(base(), tmp_path)
    except (TypeError, AttributeError, KeyError):
        with pytest.raises(AdapterInvalid, match=r"is null, which PEFT cannot load; \w+") as caught:
            parse_adapter_config(raw)
        assert caught.value.metadata == {"key": key}
    else:
        assert parse_adapter_config(raw)


def test_null_that_peft_cannot_load_is_told_with_what_peft_takes_without_the_key():
    with pytest.raises(AdapterInvalid, match=r"set it as in training; without the key PEFT takes its default, 8$"):
        parse_adapter_config(config(lora_alpha=None))


GROUPS = ("eva_config", "corda_config", "lora_ga_config", "kasa_config", "arrow_config", "velora_config", "use_bdlora")


@pytest.mark.parametrize("key", GROUPS)
@pytest.mark.parametrize("value", [False, [], "", 1])
def test_what_peft_makes_no_configuration_of(key, value):
    with pytest.raises(TypeError, match=re.escape("a dict, or None")):
        peft.LoraConfig(**{key: value})
    with pytest.raises(AdapterInvalid, match="an object or null") as caught:
        parse_adapter_config(config(**{key: value}))
    assert caught.value.metadata == {"key": key}


def test_a_number_out_of_bounds_is_told_the_bounds():
    for keys, bounds in [
        ({"lora_alpha": 1e12}, "above -1e+12 and below 1e+12, is 1000000000000.0; set it as in training"),
        ({"alpha_pattern": {"q_proj": -(10**13)}}, "above -1e+12 and below 1e+12"),
        ({"qalora_group_size": 1 << 30}, "from 1 to 1048576, is 1073741824"),
        ({"trainable_token_indices": [1 << 24]}, "from 0 to 16777215"),
        ({"use_bdlora": {"nblocks": 1 << 30}}, "from 1 to 1048576"),
    ]:
        with pytest.raises(AdapterInvalid, match=re.escape(bounds)):
            parse_adapter_config(config(**keys))


LOADED_OR_NOT = {
    "task_type": ["CAUSAL_LM", "SEQ_CLS", "causal_lm", "TEXT", "", [], [1, 2], {}, 5, True],
    "lora_dropout": [0, 0.5, 1, True, -0.1, 1.5, "0.1", "", [], {}, [0.1]],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("key", "value"), [(key, value) for key, all_of in LOADED_OR_NOT.items() for value in all_of])
def test_what_is_not_used_must_still_be_what_peft_loads(key, value, saved_by_peft, tmp_path):
    folder, base = saved_by_peft
    raw = {**json.loads((folder / "adapter_config.json").read_text()), key: value}
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw))
    try:
        peft.PeftModel.from_pretrained(base(), tmp_path)
    except (TypeError, ValueError):
        with pytest.raises(AdapterInvalid, match=rf"{key} must be .*; set it as in training$") as caught:
            parse_adapter_config(raw)
        assert caught.value.metadata == {"key": key}
    else:
        assert parse_adapter_config(raw)


def test_the_tasks_are_those_of_peft():
    assert set(TASKS) == {task.value for task in peft.TaskType}


@pytest.mark.parametrize(
    "key",
    [key for key, field in FIELDS.items() if field.treatment == "informational" and key not in LOADED_OR_NOT],
)
def test_informational_fields_may_hold_anything(key):
    assert parse_adapter_config(config(**{key: {"some": "thing"}})) == parse_adapter_config(config())


def test_unknown_keys():
    assert parse_adapter_config(config(enable_lora=None, merge_weights=False, future={}, other=[], name=""))
    with pytest.raises(UnsupportedAdapter) as caught:
        parse_adapter_config(config(future_option=1))
    assert caught.value.metadata == {"key": "future_option"}


def test_what_peft_makes_of_loftq_counts_from_the_quantised_base_model():
    assert not parse_adapter_config(config(loftq_config={})).loftq_config
    with pytest.raises(UnsupportedAdapter, match="merge_and_unload") as caught:
        parse_adapter_config(config(loftq_config={"loftq_bits": 4, "loftq_iter": 1}))
    assert caught.value.metadata == {"key": "loftq_config"}


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "Gaussian", "orthogonal", "eva", "mica"])
def test_plain_initialisations(value):
    assert parse_adapter_config(config(init_lora_weights=value))


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("pissa", "loraplex adapter convert"),
        ("PiSSA", "loraplex adapter convert"),
        ("olora", "loraplex adapter convert"),
        ("kasa", "loraplex adapter convert"),
        ("pissa_niter_16", "path_initial_model_for_weight_conversion"),
        ("corda", "path_initial_model_for_weight_conversion"),
        ("loftq", "merge_and_unload"),
        ("lora_ga", "path_initial_model_for_weight_conversion"),
        ("new", "not known"),
    ],
)
def test_other_initialisations(value, advice):
    with pytest.raises(UnsupportedAdapter, match=value) as caught:
        parse_adapter_config(config(init_lora_weights=value))
    assert caught.value.metadata == {"key": "init_lora_weights"}
    assert advice in caught.value.message


def test_unconverted_kasa():
    with pytest.raises(UnsupportedAdapter, match="loraplex adapter convert"):
        parse_adapter_config(config(kasa_config={"beta": 1e-4, "gamma": 1e-3}))


def test_parameters_of_experts():
    with pytest.raises(UnsupportedAdapter, match="experts") as caught:
        parse_adapter_config(config(target_parameters=["mlp.experts.gate_up_proj"]))
    assert caught.value.metadata == {"key": "target_parameters"}


def test_parameters_of_anything_are_the_reason_where_no_module_is_targeted():
    """PEFT saves `target_modules: []` beside them."""
    with pytest.raises(UnsupportedAdapter) as caught:
        parse_adapter_config(config(target_modules=[], target_parameters=["q_proj.weight"]))
    assert caught.value.metadata == {"key": "target_parameters"}
    assert caught.value.message.endswith("; target the linears of a dense model with target_modules")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "trainable_token_indices is an empty list; name the tokens that were trained, or remove it"),
        ([7, 5, 5], "trainable_token_indices names token 5 twice; name each token that has a row once"),
        ({"embed_tokens": []}, "trainable_token_indices for 'embed_tokens' is an empty list; name the tokens"),
        ({"lm_head": [3, 3]}, "trainable_token_indices for 'lm_head' names token 3 twice; name each token"),
    ],
)
def test_trained_tokens_are_told_what_is_wrong_of_two(value, said):
    with pytest.raises(AdapterInvalid, match=re.escape(said)):
        parse_adapter_config(config(trainable_token_indices=value))


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"r": 0}, "r"),
        ({"r": -1}, "r"),
        ({"r": True}, "r"),
        ({"r": "8"}, "r"),
        ({"r": 8.0}, "r"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"use_rslora": 1}, "use_rslora"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": ""}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
        ({"target_modules": {"q_proj": 1}}, "target_modules"),
        ({"target_modules": ["x"] * 5000}, "target_modules"),
        ({"exclude_modules": 3}, "exclude_modules"),
        ({"layers_to_transform": "0"}, "layers_to_transform"),
        ({"layers_to_transform": [-1]}, "layers_to_transform"),
        ({"layers_to_transform": [True]}, "layers_to_transform"),
        ({"layers_to_transform": [0], "target_modules": ".*"}, "layers_to_transform"),
        ({"layers_pattern": "layers"}, "layers_pattern"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern.q_proj"),
        ({"init_lora_weights": 3}, "init_lora_weights"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path"),
        ({"use_dora": 1}, "use_dora"),
        ({"bias": "some"}, "bias"),
        ({"bias": True}, "bias"),
        ({"lora_bias": "yes"}, "lora_bias"),
        ({"modules_to_save": "lm_head"}, "modules_to_save"),
        ({"modules_to_save": [1]}, "modules_to_save"),
        ({"ensure_weight_tying": 1}, "ensure_weight_tying"),
        ({"trainable_token_indices": "5"}, "trainable_token_indices"),
        ({"trainable_token_indices": ""}, "trainable_token_indices"),
        ({"trainable_token_indices": []}, "trainable_token_indices"),
        ({"trainable_token_indices": False}, "trainable_token_indices"),
        ({"trainable_token_indices": [-1]}, "trainable_token_indices"),
        ({"trainable_token_indices": [5, 5]}, "trainable_token_indices"),
        ({"trainable_token_indices": {"embed_tokens": []}}, "trainable_token_indices"),
        ({"trainable_token_indices": {"embed_tokens": [True]}}, "trainable_token_indices"),
        ({"alora_invocation_tokens": 5}, "alora_invocation_tokens"),
        ({"alora_invocation_tokens": [1.0]}, "alora_invocation_tokens"),
        ({"use_bdlora": True}, "use_bdlora"),
        ({"use_bdlora": {"blocks": 2}}, "use_bdlora"),
        ({"use_bdlora": {"nblocks": 0}}, "use_bdlora.nblocks"),
        ({"use_bdlora": {"target_modules_bd_a": "q"}}, "use_bdlora.target_modules_bd_a"),
        ({"use_qalora": 1}, "use_qalora"),
        ({"qalora_group_size": 0}, "qalora_group_size"),
        ({"target_parameters": "w"}, "target_parameters"),
        ({"target_parameters": ""}, "target_parameters"),
    ],
)
def test_wrong_values_name_the_key(keys, key):
    with pytest.raises(AdapterInvalid) as caught:
        parse_adapter_config(config(**keys))
    assert caught.value.metadata == {"key": key}
    assert re.search(r"; (set|write|name|list|remove|leave)\b[^;]+$", caught.value.message), caught.value.message


@pytest.mark.parametrize("keys", [{"r": MAX_RANK + 1}, {"rank_pattern": {"q_proj": MAX_RANK + 1}}])
def test_rank_limit(keys):
    assert parse_adapter_config(config(r=MAX_RANK)).r == MAX_RANK
    with pytest.raises(UnsupportedAdapter, match="rank 513"):
        parse_adapter_config(config(**keys))


def test_other_peft_types():
    with pytest.raises(AdapterInvalid, match="peft_type is missing"):
        parse_adapter_config({"r": 8})
    for value in ("lora", "Lora", None, 1):
        with pytest.raises(AdapterInvalid, match=r'peft_type is .* PEFT cannot load; write "LORA"') as caught:
            parse_adapter_config({"peft_type": value})
        assert caught.value.metadata == {"key": "peft_type"}

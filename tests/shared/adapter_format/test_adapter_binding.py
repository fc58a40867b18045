import math

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from shared.base_model import MODULES
from shared.errors import AdapterInvalid, UnsupportedAdapter
from tests.shared.adapter_format.adapter_samples import PREFIX, RAW_MODEL, bind, info, refused, tensors

Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"


def places(bound):
    return [(module.layer, module.module) for module in bound.modules]


def test_a_plain_adapter():
    bound = bind(tensors())
    assert places(bound) == [(0, 0), (0, 2), (1, 0), (1, 2), (2, 0), (2, 2)]
    first = bound.modules[0]
    assert first.path == "model.layers.0.self_attn.q_proj"
    assert (first.rank, first.scale) == (4, 2.0)
    assert (first.a, first.b) == (f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight")
    assert (bound.rank, bound.num_tensors, bound.warnings) == (4, 12, ())


def test_file_order_does_not_matter():
    assert bind(dict(reversed(tensors().items()))) == bind(tensors())


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_dtypes(dtype):
    assert bind(tensors(dtype=dtype)).rank == 4


@pytest.mark.parametrize("rank", [1, 3, 512])
def test_any_rank(rank):
    assert bind(tensors(rank=rank), r=rank).rank == rank


def test_rslora_and_patterns_in_file_order():
    entries = tensors(["q_proj"], rank=4) | tensors(["q_proj"], [1], rank=9) | tensors(["v_proj"], rank=2)
    bound = bind(
        entries,
        use_rslora=True,
        rank_pattern={r"layers\.1\.self_attn\.q_proj": 9, "v_proj": 2},
        alpha_pattern={"self_attn.v_proj": 3, "v_proj": 100, r".*\.[02]\..*q_proj": 5},
    )
    scales = {(m.layer, m.module): m.scale for m in bound.modules}
    assert scales[0, 0] == 5 / math.sqrt(4)
    assert scales[1, 0] == 8 / math.sqrt(9)
    assert scales[2, 2] == 3 / math.sqrt(2)
    assert bound.rank == 9
    assert bound.warnings == ("alpha_pattern: 'v_proj' applies to no module",)


@pytest.mark.parametrize(
    ("prefix", "rename", "keys"),
    [
        ("base_model.", lambda path: path, {}),
        ("", lambda path: path, {}),
        (PREFIX, lambda path: path.removeprefix("model."), {}),
        (PREFIX, lambda path: path.removeprefix("model."), {"target_modules": r"layers\.\d\.self_attn\.[qv]_proj"}),
        (PREFIX, lambda path: path.replace("model.", "model.language_model."), {}),
        (PREFIX, lambda path: f"language_model.{path}", {"target_modules": r"language_model\..*[qv]_proj"}),
    ],
)
def test_other_namings(prefix, rename, keys):
    bound = bind(tensors(prefix=prefix, rename=rename), **keys)
    assert bound.modules[0].path == "model.layers.0.self_attn.q_proj"
    assert len(bound.modules) == 6


@pytest.mark.parametrize(
    ("keys", "modules", "layers"),
    [
        ({"target_modules": "all-linear"}, MODULES, range(3)),
        ({"target_modules": "ALL-LINEAR", "exclude_modules": ["down_proj"]}, MODULES[:6], range(3)),
        ({"target_modules": r".*\.self_attn\.\w+"}, MODULES[:4], range(3)),
        ({"target_modules": None}, ["q_proj", "v_proj"], range(3)),
        ({"layers_to_transform": [0, 2]}, ["q_proj", "v_proj"], [0, 2]),
        ({"layers_to_transform": 1}, ["q_proj", "v_proj"], [1]),
        ({"layers_to_transform": []}, ["q_proj", "v_proj"], range(3)),
        ({"layers_to_transform": [1], "layers_pattern": "layers"}, ["q_proj", "v_proj"], [1]),
        ({"layers_to_transform": [1], "layers_pattern": ["h", "layers"]}, ["q_proj", "v_proj"], [1]),
        ({"exclude_modules": r".*\.layers\.1\..*"}, ["q_proj", "v_proj"], [0, 2]),
        ({"target_modules": ["model.layers.1.mlp.up_proj"], "layers_to_transform": [0]}, ["up_proj"], [1]),
        ({"target_modules": ["self_attn.q_proj", "2.self_attn.q_proj"]}, ["q_proj"], range(3)),
    ],
)
def test_targets(keys, modules, layers):
    assert len(bind(tensors(modules, layers), **keys).modules) == len(modules) * len(layers)


def test_targets_that_the_model_lacks_warn():
    bound = bind(tensors(), target_modules=["q_proj", "v_proj", "query_key_value"])
    assert len(bound.warnings) == 1
    assert "query_key_value" in bound.warnings[0]


def test_what_targets_promise_must_be_there():
    error = refused(AdapterInvalid, tensors(layers=[0, 2]))
    assert error.metadata == {"tensor": f"{PREFIX}model.layers.1.self_attn.q_proj.lora_A.weight"}
    assert "model.layers.1.self_attn.v_proj" in error.message
    error = refused(AdapterInvalid, tensors(["q_proj"]), target_modules="all-linear")
    assert "and 15 more" in error.message


def test_what_targets_do_not_promise_must_not_be_there():
    error = refused(AdapterInvalid, tensors(["q_proj", "v_proj", "up_proj"]))
    assert error.metadata == {"tensor": f"{PREFIX}model.layers.0.mlp.up_proj.lora_A.weight"}
    assert "set target_modules and exclude_modules as in training" in error.message.rpartition("; ")[2]


@pytest.mark.parametrize(
    ("keys", "key", "advice"),
    [
        ({"target_modules": ["query_key_value", "qproj"]}, "target_modules", "correct it, or register it for the base"),
        ({"target_modules": r"q_proj"}, "target_modules", "correct it"),  # as a pattern it is a whole name
        ({"exclude_modules": ["self_attn.q_proj", "v_proj"]}, "exclude_modules", "correct both as in training"),
        ({"target_modules": "all-linear", "exclude_modules": r".*_proj|lm_head"}, "exclude_modules", "correct both"),
        ({"modules_to_save": ["self_attn"]}, "modules_to_save", "correct both"),
        ({"layers_to_transform": [7]}, "layers_to_transform", "correct both"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_targets_of_which_nothing_is_left_are_for_correction(keys, key, advice):
    error = refused(AdapterInvalid, tensors(), **keys)
    assert error.metadata == {"key": key}
    assert advice in error.message.rpartition("; ")[2]
    asked = {"target_modules": ["q_proj", "v_proj"]} | keys
    with pytest.raises(ValueError, match=r"target_modules|[Tt]arget modules"):
        get_peft_model(LlamaForCausalLM(LlamaConfig(**RAW_MODEL)), LoraConfig(**asked))


@pytest.mark.parametrize(
    ("target", "tensor"),
    [
        (["q_proj", "v_proj", "lm_head"], f"{PREFIX}lm_head.lora_A.weight"),
        (["q_proj", "v_proj", "embed_tokens"], f"{PREFIX}model.embed_tokens.lora_embedding_A"),
        (".*(v_proj|q_proj|lm_head)", f"{PREFIX}lm_head.lora_A.weight"),
    ],
)
def test_targets_outside_the_layers_must_be_there_too(target, tensor):
    assert refused(AdapterInvalid, tensors(), target_modules=target).metadata == {"tensor": tensor}


@pytest.mark.parametrize("side", "AB")
def test_a_without_b(side):
    entries = tensors()
    del entries[f"{Q0}.lora_{side}.weight"]
    other = "B" if side == "A" else "A"
    assert refused(AdapterInvalid, entries).metadata == {"tensor": f"{Q0}.lora_{other}.weight"}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (f"{Q0}.lora_diag", "kasa_config"),
        (f"{Q0}.base_layer.weight", "modules_to_save"),
        (f"{PREFIX}model.layers.0.mlp.up_proj.weight", "modules_to_save"),
        (f"{PREFIX}score.weight", "modules_to_save"),
        (f"{PREFIX}model.layers.0.mlp.experts.lora_A.weight", "target_parameters"),
        (f"{PREFIX}model.layers.0.mlp.experts.base_layer.lora_B.weight", "target_parameters"),
        (f"{PREFIX}model.layers.0.mlp.experts.3.down_proj.lora_A.weight", "target_modules"),
        (f"{PREFIX}model.layers.0.block_sparse_moe.experts.0.w1.lora_A.weight", "target_modules"),
    ],
)
def test_tensors_of_kinds_that_are_not_served(name, key):
    error = refused(UnsupportedAdapter, tensors() | {name: info("F32", (4,))})
    assert error.metadata == {"tensor": name, "key": key}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (f"{Q0}.lora_magnitude_vector", "use_dora"),
        (f"{Q0}.lora_magnitude_vector.weight", "use_dora"),
        (f"{Q0}.lora_B.bias", "lora_bias"),
        (f"{Q0}.bias", "bias"),
        (f"{Q0}.base_layer.bias", "bias"),
        (f"{PREFIX}model.embed_tokens.base_layer.weight", "modules_to_save"),
        (f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta", "trainable_token_indices"),
        (f"{PREFIX}model.norm.weight", "modules_to_save"),
        (f"{PREFIX}model.layers.0.input_layernorm.weight", "modules_to_save"),
    ],
)
def test_tensors_that_the_config_does_not_ask_for(name, key):
    error = refused(AdapterInvalid, tensors() | {name: info("F32", (4,))})
    assert error.metadata == {"tensor": name}
    assert key in error.message


@pytest.mark.parametrize(
    "name",
    [
        "x",
        f"{PREFIX}model.layers.3.self_attn.q_proj.lora_A.weight",
        f"{PREFIX}model.layers.00.self_attn.q_proj.lora_A.weight",
        f"{PREFIX}model.layers.0.mlp.q_proj.lora_A.weight",
        f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.default.weight",
        f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight\n",
        f"{PREFIX}model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight",
        f"{PREFIX}transformer.h.0.attn.c_attn.lora_A.weight",
        "base_model.model.layers.0.self_attn.k_proj.lora_A.weight",  # the naming of a bare backbone among others
        "x" * 600,
    ],
)
def test_tensors_that_belong_nowhere(name):
    error = refused(AdapterInvalid, tensors() | {name: info("F32", (4, 16))})
    assert error.metadata == {"tensor": name[:300]}


@pytest.mark.parametrize(
    ("side", "dtype", "shape"),
    [
        ("A", "F32", (4, 15)),
        ("A", "F32", (16, 4)),
        ("A", "F32", (64,)),
        ("A", "F32", (0, 16)),
        ("A", "F32", (4, 16, 1)),
        ("A", "F32", (5, 16)),
        ("B", "F32", (16, 5)),
        ("B", "F32", (8, 4)),
        ("B", "F32", (0,)),
        ("B", "I32", (16, 4)),
        ("A", "BOOL", (4, 16)),
    ],
)
def test_shapes_and_dtypes(side, dtype, shape):
    entries = tensors() | {f"{Q0}.lora_{side}.weight": info(dtype, shape)}
    assert refused(AdapterInvalid, entries).metadata["tensor"].startswith(Q0)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_floats_of_every_size(dtype):
    assert bind(tensors() | {f"{Q0}.lora_A.weight": info(dtype, (4, 16))}).rank == 4


def test_a_rank_that_the_config_contradicts():
    error = refused(AdapterInvalid, tensors(), r=8)
    assert error.metadata == {"tensor": f"{Q0}.lora_A.weight"}
    assert "rank 4" in error.message
    error = refused(AdapterInvalid, tensors(), rank_pattern={"v_proj": 2})
    assert error.metadata == {"tensor": f"{PREFIX}model.layers.0.self_attn.v_proj.lora_A.weight"}


BARE = "base_model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "keys",
    [
        {"layers_to_transform": [0, 1, 2]},
        {"target_modules": r"model\.layers\..*[qv]_proj"},
        {"target_modules": ["q_proj", "v_proj", "k_proj"], "exclude_modules": r"model\..*k_proj"},
    ],
)
def test_an_old_file_that_a_bare_backbones_names_do_not_explain(keys):
    bound = bind(tensors(prefix="base_model."), **keys)
    assert [module.path for module in bound.modules] == [module.path for module in bind(tensors()).modules]


def test_patterns_that_mean_something_else_on_a_bare_backbone():
    for pattern, scale in (("k_proj", 2), ("0.self_attn.q_proj", 0.75)):
        bound = bind(tensors(prefix="base_model."), alpha_pattern={pattern: 3})
        assert bound.modules[0].scale == scale
    error = refused(AdapterInvalid, tensors(prefix="base_model."), alpha_pattern={"model.layers.0.self_attn.q_proj": 3})
    assert error.metadata == {"tensor": f"{BARE}.lora_A.weight"}
    assert "save it again" in error.message


def test_the_heads_name_tells_an_old_file_from_a_bare_backbones():
    head = {"base_model.lm_head.lora_A.weight": (4, 16), "base_model.lm_head.lora_B.weight": (32, 4)}
    entries = tensors(prefix="base_model.") | {name: info("F32", shape) for name, shape in head.items()}
    keys = {"target_modules": ["q_proj", "v_proj", "lm_head"], "alpha_pattern": {"model.layers.0.self_attn.q_proj": 3}}
    bound = bind(entries, **keys)
    assert (bound.modules[0].scale, bound.head.rank) == (0.75, 4)
    mixed = tensors(prefix="") | {name: info("F32", shape) for name, shape in head.items()}
    assert "named differently" in refused(AdapterInvalid, mixed, **keys).message


def test_an_empty_file():
    assert refused(AdapterInvalid, {}).metadata == {"file": "adapter_model.safetensors"}


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules"])
def test_evil_patterns_do_not_hang(key):
    keys = {key: "(" * 15 + ".*" + ")*" * 15 + "!"}
    refused(AdapterInvalid, tensors(), **({"target_modules": ["q_proj"]} | keys))

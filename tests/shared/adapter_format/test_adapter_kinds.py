"""Adapters of every kind that PEFT saves, on models of three families: merged as the binding says, they compute what
PEFT computes after it loaded the same files."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import BdLoraConfig, VeloraConfig
from transformers import (
    AutoModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from shared.adapter_format.binding import plan
from shared.adapter_format.config import parse_adapter_config
from shared.adapter_format.header import read_header_of
from shared.base_model import MODULES, parse_config
from tests.shared.adapter_format.adapter_samples import RAW_MODEL
from tests.shared.adapter_format.merging import merged

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of most of what is tried here

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
VOCAB = RAW_MODEL["vocab_size"]
IDS = torch.tensor([[1, 5, 3, 7, 5, 31, 0, 2, 9]])
QV = ["q_proj", "v_proj"]
ALORA = {"alora_invocation_tokens": [1, 5], "task_type": "CAUSAL_LM"}
BLOCKS = BdLoraConfig(target_modules_bd_a=["o_proj", "down"], target_modules_bd_b=["q_proj", "up_proj"], nblocks=2)
LOOSE = BdLoraConfig(target_modules_bd_a=["o_proj"], target_modules_bd_b=["q_proj"], nblocks=2, match_strict=False)

# Keys of LoraConfig, and the kinds that must be found.
CASES = {
    "plain": ({"target_modules": list(MODULES)}, {"lora"}),
    "dora": ({"target_modules": [*MODULES], "use_dora": True}, {"lora", "dora"}),
    "dora, rslora, patterns, biases": (
        {
            "target_modules": [*QV, "up_proj"],
            "use_dora": True,
            "use_rslora": True,
            "bias": "all",
            "rank_pattern": {"v_proj": 3, r"layers\.1\..*up_proj": 7},
            "alpha_pattern": {"q_proj": 5},
        },
        {"lora", "dora", "bias"},
    ),
    "lora_bias": ({"target_modules": [*MODULES, "lm_head"], "lora_bias": True}, {"lora", "lora_bias", "lm_head"}),
    "bias lora_only": ({"target_modules": ["q_proj", "down_proj"], "bias": "lora_only"}, {"lora", "bias"}),
    "bias all": ({"target_modules": ["o_proj"], "bias": "all", "layers_to_transform": [1]}, {"lora", "bias"}),
    "embed": ({"target_modules": ["embed_tokens"], "r": 3}, {"embedding"}),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, {"lora", "lm_head"}),
    "embed and head": ({"target_modules": [*QV, "embed_tokens", "lm_head"]}, {"lora", "embedding", "lm_head"}),
    "embed and head by regex, tied": (
        {"target_modules": r".*(v_proj|lm_head)", "ensure_weight_tying": True},
        {"lora", "lm_head", "embedding"},
    ),
    "head, tied": ({"target_modules": ["lm_head"], "ensure_weight_tying": True}, {"lm_head", "embedding"}),
    "dora of embed and head": (
        {"target_modules": ["k_proj", "embed_tokens", "lm_head"], "use_dora": True},
        {"lora", "dora", "embedding", "embedding_dora", "lm_head"},
    ),
    "saved embed": ({"target_modules": QV, "modules_to_save": ["embed_tokens"]}, {"lora", "modules_to_save"}),
    "saved head": ({"target_modules": "all-linear", "modules_to_save": ["lm_head"]}, {"lora", "modules_to_save"}),
    "saved and targeted": (
        {"target_modules": [*QV, "lm_head"], "modules_to_save": ["lm_head"]},
        {"lora", "modules_to_save"},
    ),
    "saved head, tied": (
        {"target_modules": QV, "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
        {"lora", "modules_to_save"},
    ),
    "saved norms": ({"target_modules": QV, "modules_to_save": ["norm"]}, {"lora", "norms"}),
    "some norms": ({"target_modules": QV, "modules_to_save": ["1.input_layernorm", "model.norm"]}, {"lora", "norms"}),
    "tokens": ({"target_modules": QV, "trainable_token_indices": [5, 3, 31]}, {"lora", "trainable_tokens"}),
    "tokens by name": (
        {"target_modules": QV, "trainable_token_indices": {"model.embed_tokens": [5], "lm_head": [5]}},
        {"lora", "trainable_tokens"},
    ),
    "tokens that differ": (
        {"target_modules": QV, "trainable_token_indices": {"embed_tokens": [5], "lm_head": [3, 1]}},
        {"lora", "trainable_tokens"},
    ),
    "tokens of the head": (
        {"target_modules": QV, "trainable_token_indices": {"lm_head": [7, 5]}, "ensure_weight_tying": True},
        {"lora", "trainable_tokens"},
    ),
    "tokens and head": (
        {"target_modules": [*QV, "lm_head"], "trainable_token_indices": [5, 3]},
        {"lora", "trainable_tokens", "lm_head"},
    ),
    "blocks": (
        {"target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"], "use_bdlora": BLOCKS},
        {"lora", "block_diagonal"},
    ),
    "some blocks, lora_bias": (
        {"target_modules": ["q_proj", "o_proj", "v_proj"], "use_bdlora": LOOSE, "lora_bias": True},
        {"lora", "block_diagonal", "lora_bias"},
    ),
    "activated": (
        dict(target_modules=[*QV, "lm_head"], lora_bias=True, **ALORA),
        {"lora", "activated", "lora_bias", "lm_head"},
    ),
    "velora": ({"target_modules": QV, "velora_config": VeloraConfig(num_groups=4)}, {"lora"}),
    "mica": ({"target_modules": [*QV, "embed_tokens"], "init_lora_weights": "mica"}, {"lora", "embedding"}),
    "qalora on plain linears": ({"target_modules": QV, "use_qalora": True, "qalora_group_size": 4}, {"lora"}),
}


def family_of(case):
    """Qwen2 has biases and Qwen3 has norms of queries and keys; the other cases take turns."""
    if "bias" in case or "norms" in case:
        return "qwen2" if "bias" in case else "qwen3"
    return tuple(FAMILIES)[tuple(CASES).index(case) % len(FAMILIES)]


@pytest.fixture(scope="module")
def base_model(tmp_path_factory):
    """Makes a random base model that PEFT knows by its folder, as it does real ones: the same one each time."""
    made = {}

    def make(family, tied):
        if (family, tied) not in made:
            model_class, config_class = FAMILIES[family]
            torch.manual_seed(0)
            model = model_class(config_class(**RAW_MODEL, head_dim=4, tie_word_embeddings=tied))
            for name, parameter in model.named_parameters():
                parameter.data.normal_(1 if "norm" in name or "bias" in name else 0, 0.3)
            folder = tmp_path_factory.mktemp("base")
            model.save_pretrained(folder)
            made[family, tied] = model_class.from_pretrained(folder)
        return copy.deepcopy(made[family, tied])

    return make


def trained(model, keys):
    peft_model = get_peft_model(model, LoraConfig(**{"r": 4, **keys}))
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3)
    return peft_model


def bound_by_us(folder, model):
    raw = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    return plan(
        parse_adapter_config((folder / "adapter_config.json").read_bytes()),
        read_header_of(folder / "adapter_model.safetensors"),
        parse_config(raw),
    )


def assert_same_as_peft(folder, base, resized=None):
    """PEFT's answer for the saved adapter, and that of the base model with our binding merged in."""
    bound = bound_by_us(folder, base)
    assert bound.num_tensors == len(read_header_of(folder / "adapter_model.safetensors"))
    expected = merged(base, bound, folder / "adapter_model.safetensors")
    if resized:
        base.resize_token_embeddings(resized)
    loaded = PeftModel.from_pretrained(base, folder).double().eval()
    ids = torch.cat([IDS, torch.tensor([[resized - 1, resized - 2]])], dim=1) if resized else IDS
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, expected(ids).logits, rtol=1e-9, atol=1e-9)
    return bound


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("case", "family"), [(case, family_of(case)) for case in CASES])
def test_kinds(case, family, tied, base_model, tmp_path):
    keys, kinds = CASES[case]
    if keys.get("ensure_weight_tying") and not tied:
        kinds = kinds - {"embedding"}
    trained(base_model(family, tied), keys).save_pretrained(tmp_path)
    bound = assert_same_as_peft(tmp_path, base_model(family, tied))
    assert set(bound.kinds) == kinds
    assert bound.activation == tuple(keys.get("alora_invocation_tokens", ()))


GROWN = {
    "plain": {"target_modules": QV},
    "saved": {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved embed": {"target_modules": QV, "modules_to_save": ["embed_tokens"]},
    "saved head": {"target_modules": QV, "modules_to_save": ["lm_head"]},
    "saved, tied": {"target_modules": QV, "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "tokens": {"target_modules": QV, "trainable_token_indices": [VOCAB, VOCAB + 3, 5]},
    "tokens of the head": {"target_modules": QV, "trainable_token_indices": {"lm_head": [VOCAB + 1]}},
    "embed and head": {"target_modules": [*QV, "embed_tokens", "lm_head"]},
    "dora": {"target_modules": [*QV, "embed_tokens", "lm_head"], "use_dora": True},
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("case", GROWN)
def test_grown_vocabulary(case, tied, base_model, tmp_path):
    base = base_model("qwen2", tied)
    base.resize_token_embeddings(VOCAB + 4)
    trained(base, GROWN[case]).save_pretrained(tmp_path)
    bound = assert_same_as_peft(tmp_path, base_model("qwen2", tied), resized=VOCAB + 4)
    assert bound.extra_vocab == 4
    assert "added_vocabulary" in bound.kinds


@pytest.mark.parametrize("keys", [{"target_modules": QV}, {"target_modules": QV, "modules_to_save": ["lm_head"]}])
def test_copies_that_nobody_needed(keys, base_model, tmp_path):
    trained(base_model("llama", False), keys).save_pretrained(tmp_path, save_embedding_layers=True)
    bound = assert_same_as_peft(tmp_path, base_model("llama", False))
    assert bound.embed.rows.source == "copy"


def test_a_bare_backbone(base_model, tmp_path):
    keys = {"target_modules": [*QV, "embed_tokens"], "modules_to_save": ["norm"]}
    base = base_model("qwen3", True)
    trained(AutoModel.from_pretrained(base.name_or_path), keys).save_pretrained(tmp_path)
    bound = bound_by_us(tmp_path, base)
    assert set(bound.kinds) == {"lora", "embedding", "norms"}
    expected = merged(base, bound, tmp_path / "adapter_model.safetensors")
    loaded = PeftModel.from_pretrained(AutoModel.from_pretrained(base.name_or_path), tmp_path).double().eval()
    with torch.no_grad():
        states = expected.model(IDS).last_hidden_state
        torch.testing.assert_close(loaded(IDS).last_hidden_state, states, rtol=1e-9, atol=1e-9)

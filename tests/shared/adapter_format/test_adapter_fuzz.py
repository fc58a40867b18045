"""Configs and headers of every kind, damaged at random: they bind or they are refused, and nothing else is raised."""

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.adapter_format.binding import plan
from shared.adapter_format.config import parse_adapter_config
from shared.adapter_format.fields import FIELDS
from shared.adapter_format.summary import summarise
from shared.errors import AdapterInvalid, UnsupportedAdapter
from tests.shared.adapter_format.adapter_samples import BIASED_MODEL, MODEL, PREFIX, TIED_MODEL, config, info, tensors

ROLES = [
    "lora_A.weight",
    "lora_B.weight",
    "lora_B.bias",
    "lora_magnitude_vector",
    "lora_embedding_A",
    "lora_embedding_B",
    "base_layer.weight",
    "base_layer.bias",
    "bias",
    "weight",
    "token_adapter.trainable_tokens_delta",
    "token_adapter.base_layer.weight",
    "modules_to_save.weight",
    "original_module.weight",
    "lora_diag",
]
SITES = [
    "model.embed_tokens",
    "lm_head",
    "model.norm",
    "model.layers.0.self_attn.q_proj",
    "model.layers.2.input_layernorm",
]
NAMES = [f"{PREFIX}{site}.{role}" for site in SITES for role in ROLES]
SHAPES = st.lists(st.sampled_from([0, 1, 4, 8, 16, 32, 36]), max_size=3)
ENTRIES = st.dictionaries(
    st.sampled_from(NAMES), st.builds(info, st.sampled_from(["F32", "BF16", "I64", "F64"]), SHAPES), max_size=6
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 40),
    st.sampled_from(["all", "lora_only", "lm_head", "embed_tokens", ".*", "norm", "mica"]),
    st.lists(st.integers(-1, 40), max_size=3),
    st.lists(st.sampled_from(["q_proj", "v_proj", "lm_head", "embed_tokens", "norm", "layers.0", ""]), max_size=4),
    st.dictionaries(
        st.sampled_from(["lm_head", "embed_tokens", "q_proj", ""]), st.lists(st.integers(0, 40), max_size=2)
    ),
    st.fixed_dictionaries({"nblocks": st.integers(0, 4), "match_strict": st.booleans()}),
)
USED = sorted(key for key, field in FIELDS.items() if field.treatment == "used" and key != "peft_type")


@settings(max_examples=400, deadline=None)
@given(
    st.dictionaries(st.sampled_from(USED), VALUES, max_size=3),
    ENTRIES,
    st.sampled_from([MODEL, TIED_MODEL, BIASED_MODEL]),
    st.booleans(),
)
def test_nothing_else_is_raised(keys, entries, model, has_plain):
    with suppress(AdapterInvalid, UnsupportedAdapter):
        parsed = parse_adapter_config(config(**keys))
        bound = plan(parsed, (tensors() if has_plain else {}) | entries, model)
        assert bound.kinds
        assert sum(line.num_tensors for line in summarise(bound, model)) >= len(bound.modules) * 2

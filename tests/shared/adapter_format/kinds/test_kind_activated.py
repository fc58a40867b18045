import pytest

from shared.errors import AdapterInvalid, UnsupportedAdapter
from tests.shared.adapter_format.adapter_samples import BIASED_MODEL, MODEL, PREFIX, bind, info, refused, tensors

HEAD, NORM = f"{PREFIX}lm_head", f"{PREFIX}model.norm"
LAYER = f"{PREFIX}model.layers"


def test_the_sequence():
    bound = bind(tensors(), alora_invocation_tokens=[7, 7, 31])
    assert bound.activation == (7, 7, 31)
    assert bound.kinds == ("lora", "activated")
    assert bind(tensors(), alora_invocation_tokens=[]).activation == ()


def test_the_head_may_be_switched_too():
    head = {f"{HEAD}.lora_A.weight": info("F32", (4, 16)), f"{HEAD}.lora_B.weight": info("F32", (32, 4))}
    bound = bind(tensors() | head, target_modules=["q_proj", "v_proj", "lm_head"], alora_invocation_tokens=[1])
    assert bound.kinds == ("lora", "lm_head", "activated")


def test_tokens_that_do_not_exist():
    assert refused(AdapterInvalid, tensors(), alora_invocation_tokens=[32]).metadata == {
        "key": "alora_invocation_tokens"
    }


@pytest.mark.parametrize(
    ("model", "entries", "keys", "key"),
    [
        (
            BIASED_MODEL,
            {
                f"{LAYER}.{layer}.self_attn.{name}.base_layer.bias": info("F32", (size,))
                for layer in range(3)
                for name, size in (("q_proj", 16), ("v_proj", 8))
            },
            {"bias": "lora_only"},
            "bias",
        ),
        (MODEL, {f"{HEAD}.weight": info("F32", (32, 16))}, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (
            MODEL,
            {f"{PREFIX}model.norm.weight": info("F32", (16,))},
            {"modules_to_save": ["model.norm"]},
            "modules_to_save",
        ),
        (
            MODEL,
            {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": info("F32", (1, 16))},
            {"trainable_token_indices": [3]},
            "trainable_token_indices",
        ),
        (
            MODEL,
            {f"{PREFIX}{name}.weight": info("F32", (33, 16)) for name in ("model.embed_tokens", "lm_head")},
            {},
            "alora_invocation_tokens",
        ),
    ],
)
def test_what_would_act_before_the_activation(model, entries, keys, key):
    error = refused(UnsupportedAdapter, tensors() | entries, model, alora_invocation_tokens=[1], **keys)
    assert error.metadata == {"key": key}


def test_what_peft_cannot_combine():
    error = refused(AdapterInvalid, tensors(), alora_invocation_tokens=[1], use_dora=True)
    assert error.metadata == {"key": "alora_invocation_tokens"}

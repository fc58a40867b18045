import pytest

from shared.errors import AdapterInvalid
from tests.shared.adapter_format.adapter_samples import BIASED_MODEL, PREFIX, bind, info, refused, tensors

SIZES = {"q_proj": 16, "k_proj": 8, "v_proj": 8}


def name(layer, module):
    return f"{PREFIX}model.layers.{layer}.self_attn.{module}"


def biases(modules, role, layers=range(3)):
    return {f"{name(layer, m)}.{role}": info("F32", (SIZES[m],)) for layer in layers for m in modules}


def test_a_bias_on_b():
    bound = bind(tensors() | biases(["q_proj", "v_proj"], "lora_B.bias"), lora_bias=True)
    assert bound.kinds == ("lora", "lora_bias")
    assert {vector.kind for vector in bound.vectors} == {"lora_bias"}
    assert len(bound.vectors) == len(bound.modules)


@pytest.mark.parametrize("role", ["base_layer.bias", "bias"])  # before PEFT 0.6 it was `bias`
def test_biases_of_adapted_linears(role):
    bound = bind(tensors() | biases(["q_proj", "v_proj"], role), BIASED_MODEL, bias="lora_only")
    assert bound.kinds == ("lora", "bias")
    assert len(bound.vectors) == 6


def test_biases_of_all_linears():
    entries = tensors() | biases(["q_proj", "v_proj"], "base_layer.bias") | biases(["k_proj"], "bias")
    bound = bind(entries, BIASED_MODEL, bias="all")
    assert [(v.layer, v.module) for v in bound.vectors] == [(layer, m) for layer in range(3) for m in range(3)]
    assert len(bound.modules) == 6


def test_a_model_without_biases_has_none_to_train():
    assert bind(tensors(), bias="all").kinds == ("lora",)


@pytest.mark.parametrize(
    ("keys", "role"), [({"lora_bias": True}, "lora_B.bias"), ({"bias": "lora_only"}, "base_layer.bias")]
)
def test_missing_ones(keys, role):
    error = refused(AdapterInvalid, tensors(), BIASED_MODEL, **keys)
    assert error.metadata == {"tensor": f"{name(0, 'q_proj')}.{role}"}


def test_one_that_lora_only_does_not_ask_for():
    entries = tensors() | biases(["q_proj", "v_proj"], "base_layer.bias") | biases(["k_proj"], "bias", [1])
    error = refused(AdapterInvalid, entries, BIASED_MODEL, bias="lora_only")
    assert error.metadata == {"tensor": f"{name(1, 'k_proj')}.bias"}


def test_one_that_the_model_does_not_have():
    entries = tensors() | biases(["q_proj"], "base_layer.bias", [0])
    assert refused(AdapterInvalid, entries, bias="all").metadata == {"tensor": f"{name(0, 'q_proj')}.base_layer.bias"}


def test_shapes():
    entries = (
        tensors()
        | biases(["q_proj", "v_proj"], "lora_B.bias")
        | {f"{name(2, 'v_proj')}.lora_B.bias": info("F32", (16,))}
    )
    error = refused(AdapterInvalid, entries, lora_bias=True)
    assert error.metadata == {"tensor": f"{name(2, 'v_proj')}.lora_B.bias"}

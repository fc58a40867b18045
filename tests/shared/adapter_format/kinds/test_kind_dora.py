import pytest

from shared.adapter_format.bound import VectorBinding
from shared.errors import AdapterInvalid
from tests.shared.adapter_format.adapter_samples import PREFIX, bind, info, refused, tensors

Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"


def magnitudes(suffix="lora_magnitude_vector"):
    return {
        f"{PREFIX}model.layers.{layer}.self_attn.{name}.{suffix}": info("F32", (size,))
        for layer in range(3)
        for name, size in (("q_proj", 16), ("v_proj", 8))
    }


@pytest.mark.parametrize("suffix", ["lora_magnitude_vector", "lora_magnitude_vector.weight"])
def test_one_magnitude_for_each_module(suffix):
    bound = bind(tensors() | magnitudes(suffix), use_dora=True)
    assert bound.kinds == ("lora", "dora")
    assert [vector[:3] for vector in bound.vectors] == [(m.layer, m.module, "magnitude") for m in bound.modules]
    assert bound.vectors[0] == VectorBinding(0, 0, "magnitude", f"{Q0}.{suffix}")


def test_a_magnitude_under_both_names():
    bound = bind(tensors() | magnitudes() | magnitudes("lora_magnitude_vector.weight"), use_dora=True)
    assert {vector.tensor for vector in bound.vectors} == set(magnitudes())
    assert set(bound.unread) == set(magnitudes("lora_magnitude_vector.weight"))


def test_a_missing_magnitude():
    entries = tensors() | magnitudes()
    del entries[f"{Q0}.lora_magnitude_vector"]
    assert refused(AdapterInvalid, entries, use_dora=True).metadata == {"tensor": f"{Q0}.lora_magnitude_vector"}


@pytest.mark.parametrize("shape", [(8,), (16, 1), ()])
def test_shapes(shape):
    entries = tensors() | magnitudes() | {f"{Q0}.lora_magnitude_vector": info("F32", shape)}
    assert refused(AdapterInvalid, entries, use_dora=True).metadata == {"tensor": f"{Q0}.lora_magnitude_vector"}


def test_peft_has_no_dora_with_a_bias_on_b():
    assert refused(AdapterInvalid, tensors(), use_dora=True, lora_bias=True).metadata == {"key": "lora_bias"}

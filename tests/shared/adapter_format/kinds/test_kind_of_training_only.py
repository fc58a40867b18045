"""Options that matter while training, and leave a plain LoRA behind: QALoRA on plain linears, VeLoRA, MiCA."""

import pytest

from shared.errors import AdapterInvalid, UnsupportedAdapter
from tests.shared.adapter_format.adapter_samples import PREFIX, bind, info, refused, tensors

Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"


def test_qalora_on_plain_linears_is_plain():
    assert bind(tensors(), use_qalora=True, qalora_group_size=4).kinds == ("lora",)


def test_qalora_on_quantised_ones_is_not_served():
    grouped = {f"{Q0}.lora_A.weight": info("F32", (4, 4))}
    error = refused(UnsupportedAdapter, tensors() | grouped, use_qalora=True, qalora_group_size=4)
    assert error.metadata == {"tensor": f"{Q0}.lora_A.weight", "key": "use_qalora"}
    assert refused(AdapterInvalid, tensors() | grouped, use_qalora=True, qalora_group_size=8)
    assert refused(AdapterInvalid, tensors() | grouped, use_qalora=False, qalora_group_size=4)


def test_a_buffer_of_velora_is_not_read():
    buffer = {f"{Q0}.lora_velora_embed": info("F32", (4,))}
    assert bind(tensors() | buffer, velora_config={"num_groups": 4}).unread == tuple(buffer)
    assert refused(AdapterInvalid, tensors() | buffer).metadata == {"tensor": f"{Q0}.lora_velora_embed"}


@pytest.mark.parametrize("keys", [{"velora_config": {"num_groups": 4}}, {"init_lora_weights": "mica"}])
@pytest.mark.parametrize("other", [{"use_dora": True}, {"alora_invocation_tokens": [3]}])
def test_peft_has_no_other_variant_with_them(keys, other):
    assert "cannot be used with" in refused(AdapterInvalid, tensors(), **keys, **other).message

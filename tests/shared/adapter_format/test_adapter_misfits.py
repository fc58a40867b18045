"""What does not fit is told why: the advice to take another base model is for tensors that speak of another one."""

import pytest

from shared.errors import AdapterInvalid
from tests.shared.adapter_format.adapter_samples import PREFIX, bind, info, refused, tensors

Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"
A, B = f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"
EMBED, HEAD = f"{PREFIX}model.embed_tokens", f"{PREFIX}lm_head"
OTHER_BASE = "register it for the base model that it was trained on"


def shaped(a, b, **keys):
    return refused(AdapterInvalid, tensors() | {A: info("F32", a), B: info("F32", b)}, **keys)


@pytest.mark.parametrize(
    ("a", "b", "tensor", "said"),
    [
        ((12, 16), (16, 13), B, "has shape [16, 13], not [16, 12]: its lora_A has rank 12; take both from the same"),
        ((16, 4), (4, 16), A, "is transposed: PEFT saves it as [r, 16]; transpose it, and save it again"),
        ((16, 12), (12, 16), A, "is transposed: PEFT saves it as [r, 16]; transpose it, and save it again"),
        ((16, 4), (16, 4), A, "is transposed: PEFT saves it as [r, 16]; transpose it, and save it again"),
        ((4, 16), (4, 16), B, "is transposed: PEFT saves it as [16, r]; transpose it, and save it again"),
        ((4, 24), (24, 4), A, f"has shape [4, 24], not [r, 16] as the base model takes; {OTHER_BASE}"),
        ((4, 16), (24, 4), B, f"has shape [24, 4], not [16, 4] as the base model takes; {OTHER_BASE}"),
        ((4, 16), (24, 5), B, f"has shape [24, 5], not [16, 4] as the base model takes; {OTHER_BASE}"),
    ],
)
def test_halves_that_do_not_fit(a, b, tensor, said):
    error = shaped(a, b)
    assert error.metadata == {"tensor": tensor}
    assert said in error.message


def test_a_rank_as_large_as_the_linear_is_not_taken_for_transposed():
    entries = tensors() | {A: info("F32", (16, 24)), B: info("F32", (24, 16))}
    said = refused(AdapterInvalid, entries, rank_pattern={r".*\.0\..*q_proj": 16}).message
    assert OTHER_BASE in said
    square = tensors() | {A: info("F32", (16, 16)), B: info("F32", (16, 16))}
    assert bind(square, rank_pattern={r".*\.0\..*q_proj": 16}).rank == 16


def test_embeddings_that_are_transposed():
    entries = {f"{EMBED}.lora_embedding_A": info("F32", (32, 4)), f"{EMBED}.lora_embedding_B": info("F32", (4, 16))}
    error = refused(AdapterInvalid, tensors() | entries, target_modules=["q_proj", "v_proj", "embed_tokens"])
    assert "is transposed: PEFT saves it as [r, 32]" in error.message


def test_blocks_that_do_not_fit_are_a_matter_of_nblocks():
    blocks = {"use_bdlora": {"target_modules_bd_b": ["q_proj", "v_proj"], "nblocks": 2}}
    error = shaped((4, 16), (16, 4), **blocks)
    assert error.message.endswith("has shape [16, 4], not [16, 2]: its lora_A has rank 4; set nblocks as in training")


def test_a_vector_of_the_right_size_in_another_shape():
    magnitudes = {name.replace("lora_A.weight", "lora_magnitude_vector"): info("F32", (1, 16)) for name in (A,)}
    error = refused(
        AdapterInvalid, tensors(["q_proj"], [0]) | magnitudes, use_dora=True, target_modules=r".*\.0\..*q_proj"
    )
    assert error.message.endswith("; load the adapter with PEFT on its base model and save it again")


def test_fewer_rows_than_trained_tokens():
    delta = f"{EMBED}.token_adapter.trainable_tokens_delta"
    error = refused(AdapterInvalid, tensors() | {delta: info("F32", (3, 16))}, trainable_token_indices=[1, 2])
    assert error.metadata == {"tensor": delta}
    assert "has 3 rows; trainable_token_indices names 2 tokens; set trainable_token_indices as in" in error.message


KOHYA, DIFFUSERS = "as kohya's scripts write it, for a part of an image model", "as diffusers and kohya's scripts"


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight", KOHYA),
        ("lora_te_text_model_encoder_layers_0_self_attn_q_proj.lora_up.weight", KOHYA),
        ("lora_te2_text_model_encoder_layers_0_self_attn_q_proj.alpha", KOHYA),
        (f"{Q0}.lora_down.weight", DIFFUSERS),
        ("model.layers.0.self_attn.q_proj.lora_up.weight", DIFFUSERS),
        ("unet.down_blocks.0.attn1.processor.to_q_lora.down.weight", DIFFUSERS),
        ("transformer.blocks.0.attn.to_q.lora_linear_layer.up.weight", DIFFUSERS),
        ("text_encoder.layers.0.q_proj.lora.up.weight", DIFFUSERS),
    ],
)
def test_names_of_other_tools(name, tool):
    for entries in ({name: info("F32", (4, 16))}, tensors() | {name: info("F32", (4, 16))}):
        error = refused(AdapterInvalid, entries)
        assert error.metadata == {"tensor": name}
        assert tool in error.message
        assert "convert it to PEFT's format" in error.message.rpartition("; ")[2]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (f"{Q0}.lora_C.weight", "lora_C"),
        (f"{Q0}.lora_E2", "lora_E2"),
        (f"{Q0}.alpha", "alpha"),
        (f"{Q0}.lora_A.scale.weight.x", "lora_A.scale.weight.x"),
        (f"{HEAD}.lora_magnitude", "lora_magnitude"),
    ],
)
def test_parts_that_no_lora_has(name, part):
    error = refused(AdapterInvalid, tensors() | {name: info("F32", (4, 16))})
    assert error.metadata == {"tensor": name}
    assert f"{part} is no part of a LoRA as PEFT saves it; remove the tensor" in error.message


def test_what_velora_leaves_without_velora():
    error = refused(AdapterInvalid, tensors() | {f"{Q0}.lora_velora_embed": info("F32", (16,))})
    assert "velora_config of adapter_config.json does not ask for it" in error.message

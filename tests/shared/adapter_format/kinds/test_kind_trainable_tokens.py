import pytest

from shared.adapter_format.bound import RowsBinding
from shared.errors import AdapterInvalid, UnsupportedAdapter
from tests.shared.adapter_format.adapter_samples import MODEL, PREFIX, TIED_MODEL, bind, info, refused, tensors

ROWS = "token_adapter.trainable_tokens_delta"
EMBED, HEAD = f"{PREFIX}model.embed_tokens", f"{PREFIX}lm_head"


def rows(name=EMBED, count=2):
    return {f"{name}.{ROWS}": info("F32", (count, 16))}


@pytest.mark.parametrize("indices", [[9, 3], {"embed_tokens": [9, 3]}, {"model.embed_tokens": [9, 3]}])
def test_rows_in_the_order_of_the_config(indices):
    bound = bind(tensors() | rows(), trainable_token_indices=indices)
    assert bound.kinds == ("lora", "trainable_tokens")
    assert bound.embed.rows == RowsBinding(f"{EMBED}.{ROWS}", (9, 3), "trainable_tokens")
    assert bound.head is None


def test_a_tied_head_sees_them():
    for indices in ([9, 3], {"embed_tokens": [9, 3], "lm_head": [9, 3]}):
        bound = bind(tensors() | rows(), TIED_MODEL, trainable_token_indices=indices)
        assert bound.head.rows == bound.embed.rows


def test_different_tokens_of_a_tied_model():
    entries = tensors() | rows() | rows(HEAD, 1)
    indices = {"embed_tokens": [9, 3], "lm_head": [4]}
    bound = bind(entries, TIED_MODEL, trainable_token_indices=indices)
    assert (bound.embed.rows.ids, bound.head.rows.ids) == ((9, 3), (4,))
    error = refused(AdapterInvalid, entries, TIED_MODEL, trainable_token_indices=indices, ensure_weight_tying=True)
    assert error.metadata == {"key": "trainable_token_indices"}


def test_the_head_alone():
    for model in (MODEL, TIED_MODEL):
        bound = bind(tensors() | rows(HEAD), model, trainable_token_indices={"lm_head": [9, 3]})
        assert bound.embed is None


@pytest.mark.parametrize(
    ("entries", "indices"),
    [
        ({}, [1, 2]),
        (rows(count=3), [1, 2]),
        ({f"{EMBED}.{ROWS}": info("F32", (2, 8))}, [1, 2]),
        (rows() | rows(HEAD), [1, 2]),
    ],
)
def test_tensors_that_do_not_fit(entries, indices):
    error = refused(AdapterInvalid, tensors() | entries, trainable_token_indices=indices)
    assert ROWS in error.metadata["tensor"]


@pytest.mark.parametrize("name", ["wte", "q_proj", "layers.0"])
def test_other_modules(name):
    error = refused(AdapterInvalid, tensors() | rows(), trainable_token_indices={name: [1, 2]})
    assert error.metadata == {"key": "trainable_token_indices"}


def test_what_peft_cannot_combine():
    saved = {f"{EMBED}.weight": info("F32", (32, 16))}
    error = refused(
        AdapterInvalid, tensors() | rows() | saved, trainable_token_indices=[1, 2], modules_to_save=["embed_tokens"]
    )
    assert error.metadata == {"key": "modules_to_save"}
    lora = {
        f"{EMBED}.lora_embedding_A": info("F32", (4, 32)),
        f"{EMBED}.lora_embedding_B": info("F32", (16, 4)),
    }
    error = refused(AdapterInvalid, rows() | lora, trainable_token_indices=[1, 2], target_modules=["embed_tokens"])
    assert error.metadata == {"key": "trainable_token_indices"}
    dora = {
        f"{HEAD}.lora_A.weight": info("F32", (4, 16)),
        f"{HEAD}.lora_B.weight": info("F32", (32, 4)),
        f"{HEAD}.lora_magnitude_vector": info("F32", (32,)),
    }
    keys = {"trainable_token_indices": [1, 2], "target_modules": ["lm_head"], "use_dora": True}
    assert refused(AdapterInvalid, rows() | dora, TIED_MODEL, **keys).metadata == {"key": "trainable_token_indices"}
    assert bind(rows() | dora, MODEL, **keys).kinds == ("dora", "lm_head", "trainable_tokens")


def test_a_saved_head_over_tied_tokens():
    entries = tensors() | rows() | {f"{HEAD}.weight": info("F32", (32, 16))}
    error = refused(
        UnsupportedAdapter, entries, TIED_MODEL, trainable_token_indices=[1, 2], modules_to_save=["lm_head"]
    )
    assert error.metadata == {"key": "trainable_token_indices"}

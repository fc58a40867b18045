import pytest

from shared.adapter_format.bound import RowsBinding
from shared.errors import AdapterInvalid
from tests.shared.adapter_format.adapter_samples import MODEL, PREFIX, TIED_MODEL, bind, info, refused, tensors

EMBED, HEAD = f"{PREFIX}model.embed_tokens", f"{PREFIX}lm_head"
ROWS = "token_adapter.trainable_tokens_delta"
BENEATH = "token_adapter.base_layer.weight"


def matrix(name, vocab=36):
    return {f"{name}.weight": info("F32", (vocab, 16))}


@pytest.mark.parametrize("keys", [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}])
def test_whole_matrices(keys):
    bound = bind(tensors() | matrix(EMBED) | matrix(HEAD), **keys)
    assert bound.extra_vocab == 4
    assert "added_vocabulary" in bound.kinds
    source = "modules_to_save" if keys else "added"
    assert bound.head.rows == RowsBinding(f"{HEAD}.weight", None, source)


def test_trained_tokens_over_a_whole_matrix():
    entries = tensors() | matrix(HEAD)
    entries |= {f"{EMBED}.{ROWS}": info("F32", (1, 16)), f"{EMBED}.{BENEATH}": info("F32", (36, 16))}
    bound = bind(entries, trainable_token_indices=[34])
    assert bound.embed.rows.ids == (34,)
    assert bound.embed.grown == RowsBinding(f"{EMBED}.{BENEATH}", None, "added")
    assert bound.extra_vocab == 4


@pytest.mark.parametrize(("ids", "extra"), [([32], 1), ([33, 32, 4], 2)])
def test_trained_tokens_that_are_all_the_new_ones(ids, extra):
    entries = tensors() | {f"{EMBED}.{ROWS}": info("F32", (len(ids), 16))}
    assert bind(entries, TIED_MODEL, trainable_token_indices=ids).extra_vocab == extra
    error = refused(AdapterInvalid, entries, MODEL, trainable_token_indices=ids)
    assert error.metadata == {"tensor": f"{HEAD}.weight"}


def test_new_tokens_without_a_row():
    entries = tensors() | {f"{EMBED}.{ROWS}": info("F32", (1, 16))}
    error = refused(AdapterInvalid, entries, TIED_MODEL, trainable_token_indices=[33])
    assert "token 32 has no row" in error.message
    assert error.metadata == {"tensor": f"{EMBED}.weight"}


def test_a_side_that_peft_does_not_save():
    entries = {
        f"{HEAD}.lora_A.weight": info("F32", (4, 16)),
        f"{HEAD}.lora_B.weight": info("F32", (34, 4)),
        f"{HEAD}.base_layer.weight": info("F32", (34, 16)),
    }
    error = refused(AdapterInvalid, entries, target_modules=["lm_head"])
    assert error.metadata == {"tensor": f"{EMBED}.weight"}
    assert "train with it in modules_to_save" in error.message


@pytest.mark.parametrize("entries", [matrix(EMBED), matrix(HEAD), matrix(EMBED) | matrix(HEAD, 35)])
def test_one_side_only(entries):
    assert "tensor" in refused(AdapterInvalid, tensors() | entries).metadata


def test_one_side_is_both_of_a_tied_model():
    bound = bind(tensors() | matrix(EMBED), TIED_MODEL)
    assert bound.head.rows == bound.embed.rows


def test_a_smaller_vocabulary_does_not_fit():
    error = refused(AdapterInvalid, tensors() | matrix(EMBED, 30) | matrix(HEAD, 30))
    assert error.metadata == {"tensor": f"{EMBED}.weight"}
    assert "[32, 16]" in error.message

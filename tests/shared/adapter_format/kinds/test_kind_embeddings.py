import pytest

from shared.adapter_format.bound import RowsBinding
from shared.errors import AdapterInvalid
from tests.shared.adapter_format.adapter_samples import MODEL, PREFIX, TIED_MODEL, bind, info, refused, tensors

EMBED, HEAD = f"{PREFIX}model.embed_tokens", f"{PREFIX}lm_head"
BOTH = ["q_proj", "v_proj", "embed_tokens", "lm_head"]


def sides(rank=4, vocab=32, copies=True):
    found = {
        f"{EMBED}.lora_embedding_A": info("F32", (rank, vocab)),
        f"{EMBED}.lora_embedding_B": info("F32", (16, rank)),
        f"{HEAD}.lora_A.weight": info("F32", (rank, 16)),
        f"{HEAD}.lora_B.weight": info("F32", (vocab, rank)),
    }
    copy = {f"{name}.base_layer.weight": info("F32", (vocab, 16)) for name in (EMBED, HEAD)}
    return found | (copy if copies else {})


def only(entries, name):
    return {tensor: found for tensor, found in entries.items() if tensor.startswith(name)}


def test_both_sides():
    bound = bind(tensors() | sides(), target_modules=BOTH)
    assert bound.kinds == ("lora", "embedding", "lm_head")
    assert (bound.embed.a, bound.embed.rank, bound.embed.scale) == (f"{EMBED}.lora_embedding_A", 4, 2.0)
    assert (bound.head.b, bound.head.rank, bound.head.scale) == (f"{HEAD}.lora_B.weight", 4, 2.0)
    assert bound.embed.rows == RowsBinding(f"{EMBED}.base_layer.weight", None, "copy")
    assert bound.extra_vocab == 0


def test_patterns_and_rslora():
    entries = tensors() | sides(copies=False) | only(sides(rank=9), f"{HEAD}.lora")
    keys = {"rank_pattern": {"lm_head": 9}, "alpha_pattern": {"model.embed_tokens": 6}, "use_rslora": True}
    bound = bind(entries, target_modules=BOTH, **keys)
    assert (bound.embed.scale, bound.head.scale) == (6 / 2, 8 / 3)
    assert bound.warnings == ()


def test_the_copy_of_one_side_is_both_sides_of_a_tied_model():
    entries = only(sides(), EMBED)
    assert bind(entries, MODEL, target_modules=["embed_tokens"]).head is None
    bound = bind(entries, TIED_MODEL, target_modules=["embed_tokens"])
    assert bound.head.rows == bound.embed.rows
    assert bound.head.a is None


def test_a_tied_heads_factors_are_the_embeddings_and_its_scale_its_own():
    """PEFT puts the embedding's A and B into the head, and divides the head's alpha by the head's r."""
    keys = {"rank_pattern": {"embed_tokens": 4, "lm_head": 2}, "alpha_pattern": {"lm_head": 6}}
    bound = bind(sides(), TIED_MODEL, target_modules=["model.embed_tokens"], ensure_weight_tying=True, **keys)
    assert (bound.embed.rank, bound.embed.scale) == (4, 2.0)
    assert (bound.head.rank, bound.head.scale) == (4, 3.0)
    error = refused(AdapterInvalid, sides(), MODEL, target_modules=["embed_tokens", "lm_head"], **keys)
    assert error.metadata == {"tensor": f"{HEAD}.lora_A.weight"}


def test_tying_needs_both_sides():
    error = refused(
        AdapterInvalid, only(sides(), EMBED), TIED_MODEL, target_modules=["lm_head"], ensure_weight_tying=True
    )
    assert error.metadata == {"tensor": f"{HEAD}.lora_A.weight"}


@pytest.mark.parametrize("model", [MODEL, TIED_MODEL])
@pytest.mark.parametrize("missing", list(sides(copies=False)))
def test_a_missing_half(model, missing):
    entries = tensors() | sides()
    del entries[missing]
    assert "missing" in refused(AdapterInvalid, entries, model, target_modules=BOTH).message


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{EMBED}.lora_embedding_A", (4, 31)),
        (f"{EMBED}.lora_embedding_A", (32, 4)),
        (f"{EMBED}.lora_embedding_B", (4, 16)),
        (f"{EMBED}.base_layer.weight", (31, 16)),
        (f"{EMBED}.base_layer.weight", (32, 8)),
        (f"{HEAD}.lora_B.weight", (31, 4)),
        (f"{HEAD}.lora_A.weight", (4, 32)),
        (f"{HEAD}.base_layer.weight", (30, 16)),
    ],
)
def test_shapes(name, shape):
    entries = tensors() | sides() | {name: info("F32", shape)}
    assert "tensor" in refused(AdapterInvalid, entries, target_modules=BOTH).metadata


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"lora_bias": True}, "lora_bias"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"velora_config": {"num_groups": 4}}, "velora_config"),
        ({"use_bdlora": {"nblocks": 2, "match_strict": False}}, "use_bdlora"),
    ],
)
def test_what_peft_cannot_combine(keys, key):
    error = refused(AdapterInvalid, only(sides(), EMBED), target_modules=["embed_tokens"], **keys)
    assert error.metadata == {"key": key}

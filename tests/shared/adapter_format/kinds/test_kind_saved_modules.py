import pytest

from shared.adapter_format.bound import FINAL_NORM, NormBinding, RowsBinding
from shared.errors import AdapterInvalid, UnsupportedAdapter
from tests.shared.adapter_format.adapter_samples import PREFIX, TIED_MODEL, bind, info, refused, tensors

EMBED, HEAD = f"{PREFIX}model.embed_tokens.weight", f"{PREFIX}lm_head.weight"
MATRICES = {EMBED: info("BF16", (32, 16)), HEAD: info("BF16", (32, 16))}
NORM = f"{PREFIX}model.norm.weight"


def test_matrices():
    bound = bind(tensors() | MATRICES, modules_to_save=["embed_tokens", "lm_head"])
    assert bound.kinds == ("lora", "modules_to_save")
    assert bound.embed.rows == RowsBinding(EMBED, None, "modules_to_save")
    assert bound.head.rows == RowsBinding(HEAD, None, "modules_to_save")


def test_one_side_of_a_tied_model_leaves_the_other_alone():
    bound = bind(tensors() | {HEAD: MATRICES[HEAD]}, TIED_MODEL, modules_to_save=["lm_head"])
    assert bound.embed is None
    error = refused(
        AdapterInvalid,
        tensors() | {HEAD: MATRICES[HEAD]},
        TIED_MODEL,
        modules_to_save=["lm_head"],
        ensure_weight_tying=True,
    )
    assert error.metadata == {"tensor": EMBED}


def test_what_peft_writes_beside_them_is_not_read():
    beside = {
        name.replace(".weight", f".{role}.weight"): entry
        for name, entry in MATRICES.items()
        for role in ("modules_to_save", "original_module")
    }
    bound = bind(tensors() | MATRICES | beside, modules_to_save=["embed_tokens", "lm_head"])
    assert set(bound.unread) == set(beside)
    assert bound.num_tensors == 12 + 6


def test_norms():
    entries = tensors() | {NORM: info("F32", (16,))}
    names = ("input_layernorm", "post_attention_layernorm")
    entries |= {f"{PREFIX}model.layers.{i}.{name}.weight": info("F32", (16,)) for i in range(3) for name in names}
    bound = bind(entries, modules_to_save=["norm"])  # PEFT takes it as the end of a name
    assert bound.kinds == ("lora", "norms")
    assert len(bound.norms) == 7
    assert NormBinding(FINAL_NORM, "norm", NORM) in bound.norms
    assert [
        norm.name for norm in bind(tensors() | {NORM: info("F32", (16,))}, modules_to_save=["model.norm"]).norms
    ] == ["norm"]


@pytest.mark.parametrize("modules", [["lm_head"], ["model.norm"], ["1.input_layernorm"]])
def test_missing_ones(modules):
    assert "is missing" in refused(AdapterInvalid, tensors(), modules_to_save=modules).message


@pytest.mark.parametrize(("name", "shape"), [(HEAD, (31, 16)), (HEAD, (32,)), (NORM, (8,)), (NORM, (16, 1))])
def test_shapes(name, shape):
    entries = tensors() | {HEAD: MATRICES[HEAD], NORM: info("F32", (16,)), name: info("F32", shape)}
    error = refused(AdapterInvalid, entries, modules_to_save=["lm_head", "model.norm"])
    assert error.metadata == {"tensor": name}


@pytest.mark.parametrize("modules", [["k_proj"], ["self_attn.k_proj"], ["mlp"]])
def test_whole_linears_are_not_served(modules):
    """Nor are files that lack what modules_to_save promises."""
    name = f"{PREFIX}model.layers.0.{'mlp.gate_proj' if modules == ['mlp'] else 'self_attn.k_proj'}.weight"
    for entries in (tensors() | {name: info("F32", (8, 16))}, tensors()):
        error = refused(UnsupportedAdapter, entries, modules_to_save=modules)
        assert error.metadata == {"tensor": name, "key": "modules_to_save"}


def test_names_of_other_tasks_are_warned_of_by_their_tensors_only():
    assert bind(tensors(), modules_to_save=["score", "classifier"]).kinds == ("lora",)

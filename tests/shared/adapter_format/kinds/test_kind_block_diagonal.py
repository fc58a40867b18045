import pytest

from shared.errors import AdapterInvalid
from tests.shared.adapter_format.adapter_samples import PREFIX, bind, info, refused, tensors

Q0, V0 = (f"{PREFIX}model.layers.0.self_attn.{name}" for name in ("q_proj", "v_proj"))


def blocks(a=("v_proj",), b=("q_proj",), n=2, strict=True):
    return {"target_modules_bd_a": list(a), "target_modules_bd_b": list(b), "nblocks": n, "match_strict": strict}


def entries():
    """v in blocks of A, q in blocks of B."""
    found = tensors()
    for layer in range(3):
        path = f"{PREFIX}model.layers.{layer}.self_attn"
        found[f"{path}.v_proj.lora_A.weight"] = info("F32", (4, 8))
        found[f"{path}.q_proj.lora_B.weight"] = info("F32", (16, 2))
    return found


def test_blocks_of_a_and_of_b():
    bound = bind(entries(), use_bdlora=blocks())
    assert bound.kinds == ("lora", "block_diagonal")
    assert [(module.module, module.blocks, module.rank, module.scale) for module in bound.modules[:2]] == [
        (0, (1, 2), 4, 2.0),
        (2, (2, 1), 4, 2.0),
    ]


def test_one_block_is_dense():
    assert bind(tensors(), use_bdlora=blocks(n=1)).kinds == ("lora",)


@pytest.mark.parametrize(
    ("found", "value"),
    [
        (tensors(), blocks()),
        (entries(), blocks(n=4)),
        (entries(), blocks(n=3)),
        (entries(), blocks(b=(), strict=False)),
    ],
)
def test_tensors_that_do_not_fit(found, value):
    assert "tensor" in refused(AdapterInvalid, found, use_bdlora=value).metadata


@pytest.mark.parametrize("value", [blocks(a=["_proj"]), blocks(a=[], strict=True)])
def test_modules_on_both_sides_or_on_none(value):
    assert refused(AdapterInvalid, entries(), use_bdlora=value).metadata == {"key": "use_bdlora"}


@pytest.mark.parametrize(
    "keys", [{"use_dora": True}, {"alora_invocation_tokens": [1]}, {"velora_config": {"num_groups": 2}}]
)
def test_what_peft_cannot_combine(keys):
    error = refused(AdapterInvalid, entries(), use_bdlora=blocks(), **keys)
    assert error.metadata["key"] in {"use_bdlora", *keys}
    assert "cannot be used with" in error.message


def test_a_head_in_blocks():
    head = {
        f"{PREFIX}lm_head.lora_A.weight": info("F32", (4, 16)),
        f"{PREFIX}lm_head.lora_B.weight": info("F32", (32, 2)),
    }
    keys = {"target_modules": ["q_proj", "v_proj", "lm_head"], "use_bdlora": blocks(b=["q_proj", "lm_head"])}
    bound = bind(entries() | head, **keys)
    assert (bound.head.blocks, "block_diagonal" in bound.kinds) == ((1, 2), True)
    head[f"{PREFIX}lm_head.lora_B.weight"] = info("F32", (32, 4))
    assert refused(AdapterInvalid, entries() | head, **keys).metadata == {"tensor": f"{PREFIX}lm_head.lora_B.weight"}


def test_rows_that_the_blocks_do_not_divide():
    head = {
        f"{PREFIX}lm_head.lora_A.weight": info("F32", (3, 16)),
        f"{PREFIX}lm_head.lora_B.weight": info("F32", (32, 1)),
    }
    value = blocks(b=["lm_head"]) | {"nblocks": 3}
    error = refused(AdapterInvalid, head, target_modules=["lm_head"], r=3, use_bdlora=value)
    assert error.metadata == {"tensor": f"{PREFIX}lm_head.lora_B.weight"}

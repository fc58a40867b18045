"""What is larger than a tier is refused with every setting that is too small, and never what would fit."""

from types import SimpleNamespace

import pytest

from inference_service.adapters.config import Dtype
from inference_service.adapters.layout import plan_layout
from inference_service.adapters.sizes import Capacity, PackedSize, packed_size, together
from shared.adapter_format.summary import summarise
from shared.base_model import MODULES
from shared.errors import AdapterMemory
from tests.shared.adapter_format.adapter_samples import BIASED_MODEL, MODEL, PREFIX, bind, info, tensors

DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")


def told(binding: object, model: object = MODEL) -> PackedSize:
    return packed_size(SimpleNamespace(modules=summarise(binding, model)))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_lora_on_linears_the_size_is_known(dtype: Dtype) -> None:
    entries = tensors(MODULES, rank=8)
    binding = bind(entries, r=8, target_modules=list(MODULES))
    assert told(binding).at_least(dtype) == plan_layout(binding, MODEL, dtype).nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_said_is_never_too_much(dtype: Dtype) -> None:
    entries = tensors(["q_proj"])
    for layer in range(3):
        entries[f"{PREFIX}model.layers.{layer}.self_attn.q_proj.lora_magnitude_vector"] = info("F32", (16,))
    dora = bind(entries, BIASED_MODEL, target_modules=["q_proj"], use_dora=True)
    assert 0 < told(dora, BIASED_MODEL).at_least(dtype) <= plan_layout(dora, BIASED_MODEL, dtype).nbytes
    rows = tensors(["q_proj"]) | {f"{PREFIX}lm_head.weight": info("F32", (MODEL.vocab_size, MODEL.hidden_size))}
    saved = bind(rows, target_modules=["q_proj"], modules_to_save=["lm_head"])
    assert 0 < told(saved).at_least(dtype) <= plan_layout(saved, MODEL, dtype).nbytes, "none of the rows is kept"


def test_a_blend_has_all_factors_and_the_sum_of_offsets() -> None:
    assert together([PackedSize(10, 4), PackedSize(20, 6)]) == PackedSize(30, 6)
    assert together([PackedSize(10, 4)]) == PackedSize(10, 4)


@pytest.mark.parametrize(
    ("files", "blob", "tiers"),
    [
        (100, 200, ""),
        (101, 200, "disk"),
        (100, 201, "host"),
        (100, 301, "host,device"),
        (101, 301, "disk,host,device"),
    ],
)
def test_every_setting_that_is_too_small_is_named(files: int, blob: int, tiers: str) -> None:
    capacity = Capacity(disk=100, host=200, device=300)
    if not tiers:
        capacity.check(["a"], files, blob)
        return
    with pytest.raises(AdapterMemory) as caught:
        capacity.check(["adapters/a/versions/1"], files, blob)
    error = caught.value
    assert error.metadata == {"version": "adapters/a/versions/1", "tier": tiers}
    assert error.retry_after is None
    assert error.message.startswith("adapters/a/versions/1 is larger")
    flags = {"disk": "--disk-bytes", "host": "--host-memory", "device": "--adapter-memory"}
    assert [flag in error.message for flag in flags.values()] == [tier in tiers.split(",") for tier in flags]
    Capacity(1000, 1000).check(["a"], files, blob)


def test_a_registry_that_does_not_tell_says_nothing() -> None:
    assert packed_size(SimpleNamespace(modules=())) == PackedSize()

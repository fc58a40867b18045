"""The memory budget: whatever the device and the settings, it adds up, or the setting to change is named."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inference_service.engine.memory import Device, Wanted, describe, divide, divide_host, graph_reserve
from inference_service.types import MemoryBudget
from shared.errors import InvalidArgument

GIB = 1 << 30
H200 = Device(total=141 * GIB, free=121 * GIB, weights=16 * GIB, activations=3 * GIB)
BLOCK = 2 << 20
RESERVE = graph_reserve(256, 128256, GIB // 4)

sizes = st.integers(0, 200 * GIB)


@st.composite
def devices(draw: st.DrawFn) -> Device:
    total = draw(st.integers(GIB, 200 * GIB))
    weights = draw(st.integers(0, total))
    activations = draw(st.integers(0, total - weights))
    return Device(total, draw(st.integers(0, total - weights - activations)), weights, activations)


wishes = st.builds(Wanted, st.floats(0.05, 1.0), st.none() | sizes, st.none() | sizes)


def test_an_8b_model_on_an_h200() -> None:
    budget = divide(H200, Wanted(0.9, None, None), BLOCK, RESERVE, GIB)
    assert budget.adapter_arena == 8 * GIB
    assert 95 * GIB < budget.kv_cache < 100 * GIB
    assert budget.kv_cache == (budget.num_blocks + 1) * BLOCK
    assert budget.unused >= 14 * GIB
    assert budget.other == GIB


@example(Device(GIB, 0, 0, 0), Wanted(1.0, None, 0), 1, 0)
@given(devices(), wishes, st.integers(1, 64 << 20), st.integers(0, 4 * GIB))
@example(Device(GIB, 0, 0, 0), Wanted(1.0, None, 0), 1, 0)
def test_a_budget_fits_or_names_a_setting(device: Device, wanted: Wanted, block: int, reserve: int) -> None:
    try:
        budget = divide(device, wanted, block, reserve, 0)
    except InvalidArgument as error:
        (violation,) = error.violations
        assert violation.field in ("kv_cache_memory", "adapter_memory", "memory_fraction")
        assert violation.field != "kv_cache_memory" or wanted.kv_cache is not None
        assert violation.field != "adapter_memory" or wanted.adapters is not None
        return
    parts = (budget.other, budget.weights, budget.activations, budget.reserve, budget.adapter_arena, budget.kv_cache)
    assert all(part >= 0 for part in parts)
    assert sum(parts) + budget.unused == device.total
    assert budget.kv_cache == (budget.num_blocks + 1) * block
    assert budget.num_blocks >= 1
    if wanted.kv_cache is not None:
        assert budget.num_blocks == wanted.kv_cache // block
    if wanted.adapters is not None:
        assert budget.adapter_arena == wanted.adapters
    if wanted.kv_cache is None:
        assert sum(parts) <= device.total * wanted.fraction


@given(st.integers(0, 60 * GIB), st.floats(0.5, 0.95), st.integers(1, 64 << 20))
def test_a_larger_share_never_gives_less(taken: int, fraction: float, block: int) -> None:
    device = Device(141 * GIB, 141 * GIB - taken, taken, 0)
    smaller, larger = (divide(device, Wanted(f, None, None), block, 0, 0) for f in (fraction, fraction + 0.05))
    assert larger.num_blocks >= smaller.num_blocks
    assert larger.adapter_arena >= smaller.adapter_arena


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (Wanted(0.9, 200 * GIB, None), "kv_cache_memory"),
        (Wanted(0.9, 100 * GIB, 30 * GIB), "kv_cache_memory"),
        (Wanted(0.9, 1000, None), "kv_cache_memory"),
        (Wanted(0.9, None, 130 * GIB), "adapter_memory"),
        (Wanted(0.9, 1 * GIB, 130 * GIB), "adapter_memory"),
        (Wanted(0.1, None, None), "memory_fraction"),
        (Wanted(0.1, None, 4 * GIB), "memory_fraction"),
    ],
)
def test_what_does_not_fit_is_named(wanted: Wanted, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        divide(H200, wanted, BLOCK, RESERVE, 0)
    assert caught.value.violations[0].field == field


def test_explicit_sizes_win_over_the_share() -> None:
    budget = divide(H200, Wanted(0.2, 100 * GIB, 10 * GIB), BLOCK, RESERVE, 0)
    assert (budget.num_blocks, budget.adapter_arena) == (100 * GIB // BLOCK, 10 * GIB)


def test_on_a_cpu_only_what_is_set_is_known() -> None:
    budget = divide_host(500, Wanted(0.9, None, None), 1000, 7)
    assert (budget.total, budget.unused, budget.weights, budget.host_arena) == (0, 0, 500, 7)
    assert budget.num_blocks == (512 << 20) // 1000
    assert divide_host(0, Wanted(0.9, 2500, 64), 1000, 0) == MemoryBudget(adapter_arena=64, kv_cache=3000, num_blocks=2)
    with pytest.raises(InvalidArgument, match="kv_cache_memory"):
        divide_host(0, Wanted(0.9, 999, None), 1000, 0)


def test_the_log_line_states_every_part() -> None:
    line = describe(divide(H200, Wanted(0.9, None, None), BLOCK, RESERVE, GIB))
    assert line.startswith("device memory in MiB: weights 16,384, activations 3,072, ")
    assert line.endswith("of 144,384; host memory for adapters 1,024")

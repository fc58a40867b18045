"""The soak's line through memory: what counts as growth, and what is noise."""

import random

import pytest

from tests.bench.soak import fit

MINUTE, MIB = 60.0, float(1 << 20)


def memory(growth: float, noise: float, minutes: int = 15) -> tuple[list[float], list[float]]:
    """A sample a second: 300 MiB, `growth` MiB an hour, and noise that lasts for some samples."""
    chance, offset = random.Random(7), 0.0
    seconds, nbytes = [], []
    for second in range(int(minutes * MINUTE)):
        offset = 0.9 * offset + chance.gauss(0.0, noise)
        seconds.append(float(second))
        nbytes.append(MIB * (300 + growth * second / 3600 + offset))
    return seconds, nbytes


@pytest.mark.parametrize(("growth", "is_growth"), [(0.0, False), (20.0, False), (60.0, True), (-60.0, False)])
def test_growth_is_told_from_noise(growth: float, is_growth: bool) -> None:
    line = fit(*memory(growth, noise=0.3))
    assert line.slope / MIB == pytest.approx(growth, abs=15)
    assert line.exceeds(32 * MIB) == is_growth


def test_what_is_not_certain_is_not_growth() -> None:
    line = fit(*memory(60.0, noise=20.0, minutes=2))
    assert line.error > 32 * MIB
    assert not line.exceeds(32 * MIB)


def test_too_few_samples() -> None:
    with pytest.raises(ValueError, match="cannot be divided"):
        fit([0.0, 1.0], [1.0, 1.0])

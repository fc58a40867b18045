"""The soak's line through memory: what counts as growth, and what is noise."""

import random

import pytest

from tests.bench.soak import LEAST_MINUTES, Outcome, Sample, fit, sample_pause
from tests.bench.streams import Ask, Seen

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
    assert line.is_within(32 * MIB) != is_growth


def test_what_is_not_certain_is_neither_growth_nor_none() -> None:
    line = fit(*memory(60.0, noise=20.0, minutes=2))
    assert line.error > 32 * MIB
    assert not line.exceeds(32 * MIB)
    assert not line.is_within(32 * MIB)
    assert line.verdict(32 * MIB).startswith("may grow, a longer run tells: by ")


def test_too_few_samples() -> None:
    with pytest.raises(ValueError, match="cannot be divided"):
        fit([0.0, 1.0], [1.0, 1.0])


def request(error: str = "", tokens: int = 2) -> Seen:
    return Seen(Ask("", prompt=1, output=2, seed=0), 0.0, tuple(float(at) for at in range(tokens)), error)


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        ([request(), request("QUEUE_FULL", 0)], []),
        ([request()] * 9 + [request("QUEUE_FULL", 0)], ["it was no overload: 1 of 10 requests were refused"]),
        ([request(tokens=1), request("QUEUE_FULL", 0)], ["1 answers were cut"]),
        ([request("INTERNAL", 1), request("QUEUE_FULL", 0)], ["1 × INTERNAL"]),
    ],
)
def test_what_fails_a_soak(seen: list[Seen], found: list[str]) -> None:
    assert Outcome(600.0, 1.0, {}, seen).failures(bound=0.0) == found


@pytest.mark.parametrize(
    ("seconds", "found"), [(60 * LEAST_MINUTES, []), (900.0, ["engine grows by +3600.0 ± 0.0 MiB an hour"])]
)
def test_a_short_run_has_samples_for_every_part_and_proves_nothing(seconds: float, found: list[str]) -> None:
    times = [number * sample_pause(seconds) for number in range(int(seconds / sample_pause(seconds)))]
    samples = {"engine": [Sample(at, int(300 * MIB + at * MIB), 9) for at in times]}
    outcome = Outcome(seconds, 1.0, samples, [request("QUEUE_FULL", 0)])
    assert outcome.fits()["engine"].slope / MIB == pytest.approx(3600)
    assert outcome.failures(bound=32 * MIB) == found

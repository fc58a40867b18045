"""PEFT's options in random combinations: whatever PEFT can load computes the same here, or is refused for a reason."""

import copy
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from shared.errors import AdapterInvalid, UnsupportedAdapter
from tests.kinds.bases import BASES, build
from tests.kinds.cases import Case
from tests.kinds.drawn import draw
from tests.kinds.in_process import Asked, prompt_logprobs
from tests.kinds.packed import Packed, empty, pack
from tests.kinds.peft_answers import PeftAnswers, save_trained
from tests.kinds.world import one_thread, prompt_of

TOLERANCE = 1e-4
AT_ONCE = 40
# What is refused, and nothing else: the first three for what acts too early or cannot be told, the others because
# PEFT itself cannot run them.
REASONS = (
    "would act before its activation", "would act before the activation", "has no row here",
    "with trainable_token_indices; train with one", "DoRA of lm_head on a base model that ties",
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of most of what is tried here


class Drawn(NamedTuple):
    """One that PEFT could make and load, and that was packed."""

    name: str
    case: Case
    peft: PeftAnswers
    digest: str


@pytest.mark.parametrize("base", BASES)
def test_some_combinations(base: str, tmp_path: Path) -> None:
    one_thread(lambda: check(base, range(6), tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("base", BASES)
def test_many_combinations(base: str, tmp_path: Path) -> None:
    one_thread(lambda: check(base, range(1000, 1250), tmp_path))


def check(base: str, seeds: range, folder: Path) -> None:
    build(base, folder / "base")
    packed = empty(folder / "base")
    drawn = [found for seed in seeds if (found := _made(base, seed, packed, folder)) is not None]
    assert len(drawn) > len(seeds) // 3, "hardly anything was compared"
    for start in range(0, len(drawn), AT_ONCE):
        _compare(packed, drawn[start : start + AT_ONCE])


def _made(base: str, seed: int, packed: Packed, folder: Path) -> Drawn | None:
    name, case, saved = f"{base} {seed}", draw(seed, base), folder / f"{seed}"
    try:
        save_trained(name, case, packed.folder, saved, strength=0.15)
        peft = PeftAnswers.load(packed.folder, saved, case)
    except (ValueError, TypeError):  # PEFT has no such adapter, as it says in many ways
        return None
    except RuntimeError:  # it saved what it cannot load: patterns that mean something else once they are sorted
        with pytest.raises(AdapterInvalid, match=r"has rank|has shape"):
            pack(packed, saved)
        return None
    try:
        digest = pack(packed, case.moved(shutil.copytree(saved, folder / f"{seed}-moved")))
    except (AdapterInvalid, UnsupportedAdapter) as error:
        if not any(reason in error.message for reason in REASONS):
            pytest.fail(f"{name}: {error.message}")
        return None
    if packed.acquired[digest].layout.extra_vocab < case.extra_vocab:
        return None  # PEFT saved nothing of the tokens that were added
    return Drawn(name, case, peft, digest)


def _compare(packed: Packed, drawn: list[Drawn]) -> None:
    """All of `drawn` in one batch, each with both prompts."""
    prompts = [(one, prompt_of(one.case, number)) for one in drawn for number in (0, 1)]
    answers = prompt_logprobs(packed, [Asked(one.digest, prompt) for one, prompt in prompts])
    for (one, prompt), answer in zip(prompts, answers, strict=True):
        found, expected = torch.tensor(answer), one.peft.prompt_logprobs(prompt)
        assert found.shape == expected.shape, one.name
        if (found - expected).abs().max() >= TOLERANCE:  # which may be PEFT's own rounding where numbers are large
            exact = PeftAnswers(copy.deepcopy(one.peft.model).double(), packed.folder).prompt_logprobs(prompt)
            slack = TOLERANCE + 4 * (exact - expected).abs().max()
            assert (found - exact).abs().max() < slack, f"{one.name}: {one.case.lora}"

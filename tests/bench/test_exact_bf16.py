"""The measurement of exactness and of step time runs, on a CPU and in small."""

import json
from pathlib import Path

import pytest

from tests.bench import bf16_world, exact_bf16
from tests.kinds.bases import BASES
from tests.kinds.cases import CASES

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of what these adapters are made of


def test_in_small(tmp_path: Path) -> None:
    world, out = tmp_path / "world", tmp_path / "out"
    made = ["--make", str(world), "--cases", "dora", "pissa", "activated", "added tokens, saved"]
    assert exact_bf16.main(["--device", "cpu", *made]) == {}
    small = ["--prompts", "2", "--rounds", "1", "--requests", "2", "--tokens", "12"]
    report = exact_bf16.main(["--device", "cpu", "--world", str(world), "--json", str(out), *small])
    assert json.loads(out.read_text()) == report
    paths = {entry["case"]: entry["path"] for entry in report["exact"]}
    known = dict.fromkeys(("plain", "dora", "pissa", "activated"), "kernels")
    assert paths == known | {"added tokens, saved": "plain"}
    for entry in report["exact"]:
        assert 1e-3 < entry["merged"] < 1e-1  # what bfloat16 costs
        assert entry["ratio"] == entry["engine"] / entry["merged"] < 1.5  # of few prompts
    assert [step["load"] for step in report["steps"]] == ["base", "plain LoRA"]
    assert all(len(step["alone"]) == len(step["beside"]) == 1 for step in report["steps"])


def test_every_kind_is_measured() -> None:
    assert set(bf16_world.BASES) == set(BASES)
    kinds = {CASES[name].kind for base in ("qwen2", "qwen2-tied") for name in bf16_world.cases_of(base)}
    assert kinds == {case.kind for case in CASES.values()} - bf16_world.LEFT_OUT

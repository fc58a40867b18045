"""The measurement of exactness and of step time runs, on a CPU and in small."""

import json
from pathlib import Path

import pytest

from tests.bench import exact_bf16
from tests.kinds.cases import CASES

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns of what these adapters are made of


def test_in_small(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--rounds", "1", "--cases", "dora", "saved norms", "--json", str(tmp_path / "out")]
    report = exact_bf16.main([*arguments, "--prompts", "2", "--requests", "2", "--tokens", "12"])
    assert json.loads((tmp_path / "out").read_text()) == report
    assert [entry["case"] for entry in report["exact"]] == ["plain", "dora", "saved norms"]
    for entry in report["exact"]:
        assert 1e-3 < entry["merged"] < 1e-1  # what bfloat16 costs
        assert entry["engine"] < 1.5 * entry["merged"]
    assert [step["load"] for step in report["steps"]] == ["base", "plain LoRA"]
    assert all(len(step["alone"]) == len(step["beside"]) == 1 for step in report["steps"])


def test_every_kind_that_can_be_merged_is_measured() -> None:
    kinds = {CASES[name].kind for base in ("qwen2", "qwen2-tied") for name in exact_bf16.cases_of(base)}
    assert kinds == {case.kind for case in CASES.values()} - exact_bf16.LEFT_OUT

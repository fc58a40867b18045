"""The benchmarks: every op has a line, and a peer's kernels stand beside ours, where they compute the same."""

import json
from pathlib import Path

import pytest

from kernels.bench import ops, timing
from kernels.bench.__main__ import main
from kernels.bench.timing import ROTATED_BYTES

ARGUMENTS = ["--device", "cpu", "--model", "smollm2-135m", "--rows", "3", "--rank", "8", "--workload", "distinct"]


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROTATED_BYTES, "cpu", 1 << 20)


def test_a_peer_is_timed_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "build" / "out.json"
    main([*ARGUMENTS, "--peer", "tests.kernels.plain_peer:PlainPeer", "--json", str(out)])
    lines = json.loads(out.read_text())["linears"]
    assert [line["group"] for line in lines] == ["qkv", "o", "gate_up", "down"]
    assert all(line[time] > 0 for line in lines for time in ("micros", "peer", "floor"))
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(lines)


def test_a_peer_that_is_wrong_is_not_timed() -> None:
    with pytest.raises(ValueError, match="WrongPeer is wrong by"):
        main([*ARGUMENTS, "--peer", "tests.kernels.plain_peer:WrongPeer"])


def test_every_op_is_timed_beside_its_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "REPLAYS", 2)
    out, arguments = tmp_path / "build" / "out.json", ["--device", "cpu", "--model", "smollm2-135m", "--rows", "3"]
    ops.main([*arguments, "--context", "40", "--json", str(out)])
    lines = json.loads(out.read_text())["ops"]
    assert [line["op"] for line in lines] == list(ops.OPS)
    assert all(line["micros"] > 0 and line["ratio"] == line["micros"] / line["floor"] for line in lines)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(lines)

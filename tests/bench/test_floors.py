"""The floors that the engine's benchmark prints, against the sizes of Llama-3.1-8B as they are known."""

import pytest

from shared.base_model import parse_config
from tests.bench.engine import layout_of, line
from tests.bench.floors import floors
from tests.bench.shapes import SHAPES

MODEL = parse_config(SHAPES["llama-3.1-8b"])
ADAPTER = layout_of(MODEL, 16).nbytes
H200 = floors(MODEL, ADAPTER, 4.258e12)


def test_a_step_of_8b_reads_its_weights_once_and_each_adapter_in_use() -> None:
    base = H200.decode(1, 0, 0)
    assert 1e3 * base == pytest.approx(3.5, abs=0.05)
    assert 1e3 * (H200.decode(32, 0, 8) - base) == pytest.approx(8 * 0.020, abs=0.01)
    assert H200.decode(4, 0, 8) - base == pytest.approx(4 * ADAPTER / 4.258e12)
    assert H200.decode(32, 100, 0) - base == pytest.approx(32 * 100 * 2 * 32 * 1024 * 2 / 4.258e12)


def test_a_load_is_its_prompts_products_and_its_steps() -> None:
    seven_billion = 8.03e9 - 2 * 128256 * 4096
    assert H200.prefill(1000) == pytest.approx(2 * 1000 * seven_billion / 790e12, rel=0.01)
    assert H200.load(2, 10, 5, 1) == H200.prefill(20) + 4 * H200.decode(2, 12.5, 1)


def test_a_tied_head_is_the_embedding_and_is_read() -> None:
    tied = floors(parse_config({**SHAPES["llama-3.1-8b"], "tie_word_embeddings": True}), ADAPTER, 1.0)
    assert tied.weights == H200.weights


def test_the_table_has_a_line_for_each_load() -> None:
    row = {"load": "D", "adapters": 8, "rank": 16, "N": 32, "ms": [5.394, 5.4], "floor": 3.96, "ratio": [1.362, 1.364]}
    assert " ".join(line({**row, "peer": 9.61}).split()) == "D 8 16 32 3.96 1.36, 1.36 9.61 ms [5.39, 5.4]"
    assert " – " in line({**row, "peer": None})

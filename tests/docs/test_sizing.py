"""What docs/operate.md says about bytes per adapter is what the packer takes."""

from pathlib import Path

import pytest

from shared.base_model import MODULES, linear_shape, parse_config
from tests.docs.sizing import MODELS, TARGETS, adapter_bytes, table

PAGE = Path(__file__).parents[2] / "docs" / "operate.md"


def test_the_table_is_true() -> None:
    assert "\n".join(table()) in PAGE.read_text(), "run python -m tests.docs.sizing"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rank", [1, 8, 16, 64])
def test_the_formula_is_true(name: str, rank: int) -> None:
    """2 · rank · Σ (in + out): padding is none at these sizes."""
    model = parse_config(MODELS[name])
    for targets in TARGETS.values():
        shapes = [linear_shape(model, MODULES.index(target)) for target in targets]
        assert adapter_bytes(model, rank, targets) == 2 * rank * model.num_layers * sum(map(sum, shapes))

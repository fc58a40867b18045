"""What an adapter of a large model takes: the bytes of its own ranks and modules."""

from itertools import product
from math import prod

import pytest

from inference_service.adapters.layout import plan_layout
from shared.adapter_format.binding import plan
from shared.adapter_format.config import parse_adapter_config
from shared.adapter_format.header import TensorInfo
from shared.base_model import MODULES, linear_shape, module_path, parse_config
from tests.bench.shapes import SHAPES

LLAMA_8B = parse_config(SHAPES["llama-3.1-8b"])
QV = ("q_proj", "v_proj")


def nbytes(ranks: dict[str, int]) -> int:
    """Of the blob of an adapter in bfloat16 with these ranks, by module, in every layer of the 8B shape."""
    tensors, end = dict[str, TensorInfo](), 0
    for layer, (name, rank) in product(range(LLAMA_8B.num_layers), ranks.items()):
        out, columns = linear_shape(LLAMA_8B, MODULES.index(name))
        for part, shape in (("lora_A", (rank, columns)), ("lora_B", (out, rank))):
            begin, end = end, end + 2 * prod(shape)
            path = f"base_model.model.{module_path(layer, MODULES.index(name))}.{part}.weight"
            tensors[path] = TensorInfo("BF16", shape, begin, end)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(ranks), "rank_pattern": ranks}
    return plan_layout(plan(parse_adapter_config(config), tensors, LLAMA_8B), LLAMA_8B, "bfloat16").nbytes


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (dict.fromkeys(QV, 8), 6_815_744),
        (dict.fromkeys(MODULES, 16), 83_886_080),
        (dict.fromkeys(MODULES, 1), 5_242_880),
        ({"q_proj": 512, "v_proj": 1}, 2 * 32 * (512 * 8192 + 1 * 5120)),
    ],
)
def test_no_module_takes_more_than_its_own_rank(ranks: dict[str, int], expected: int) -> None:
    assert nbytes(ranks) == expected

"""The base model of the demo against transformers, in float32."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from inference_service.model.loader import load_config, load_model
from tests.inference_service.model.paged import PagedRun

MODEL = Path(__file__).parents[3] / "models" / "SmolLM2-135M-Instruct"


def difference(run: PagedRun, expected: Tensor, name: str, tokens: list[int], sizes: list[int]) -> float:
    """Largest difference of logits when `tokens` come in chunks of `sizes`."""
    chunks = torch.tensor(tokens).split(sizes)
    logits = torch.cat([run.step({name: chunk.tolist()})[name] for chunk in chunks])
    return float((logits - expected).abs().max())


@pytest.mark.model
def test_logits_are_those_of_transformers() -> None:
    oracle = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    decoder = load_model(MODEL, load_config(MODEL)[1], "cpu", torch.float32)
    tokens = torch.randint(3, 49000, (90,), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = oracle(tokens[None]).logits[0]
    run = PagedRun(decoder, block_size=16, num_blocks=32)
    ids = tokens.tolist()
    assert difference(run, expected, "whole", ids, [90]) < 1e-3
    assert difference(run, expected, "chunks", ids, [17, 40, 33]) < 1e-3
    assert difference(run, expected, "decodes", ids, [80] + [1] * 10) < 1e-3

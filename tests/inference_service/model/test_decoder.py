"""The decoder against transformers, family by family, over every way a prompt can be cut into steps."""

import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from inference_service.model.decoder import Decoder
from inference_service.model.loader import init_random, load_config, load_model
from tests.inference_service.model.paged import PagedRun
from tests.inference_service.model.tiny_models import FAMILIES, VOCAB, build, oracle_logits

TOLERANCE = 1e-4


@cache
def load_tiny(family: str) -> Decoder:
    """The model of `family`, loaded by our loader from what transformers saved."""
    with TemporaryDirectory() as folder:
        build(family).save_pretrained(folder)
        _, config = load_config(Path(folder))
        return load_model(Path(folder), config, "cpu", torch.float32)


@cache
def expected(family: str, tokens: tuple[int, ...]) -> Tensor:
    return oracle_logits(build(family), list(tokens))


def prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def check(family: str, tokens: list[int], logits: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(logits, expected(family, tuple(tokens)), atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_prefill_in_chunks_matches_transformers(family: str, chunk: int) -> None:
    tokens = prompt(33)
    run = PagedRun(load_tiny(family))
    parts = [run.step({"a": tokens[i : i + chunk]})["a"] for i in range(0, len(tokens), chunk)]
    check(family, tokens, torch.cat(parts))


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_match_transformers(family: str) -> None:
    """Decodes of three lengths and chunks of two sequences, with and without earlier tokens, share each step."""
    lengths = {"a": 29, "b": 12, "c": 3, "d": 25, "e": 17}
    prompts = {name: prompt(length, length) for name, length in lengths.items()}
    check_schedule(family, prompts, lambda name, _: {"a": 1, "b": 1, "c": 1, "d": 5, "e": 8}[name], warm="abd")


def check_schedule(
    family: str, prompts: Mapping[str, list[int]], size: Callable[[str, int], int], warm: str = ""
) -> None:
    """Feed every prompt in pieces of `size(name, step)` tokens, all in common steps; those in `warm` start halfway."""
    run = PagedRun(load_tiny(family))
    parts: dict[str, list[Tensor]] = {name: [] for name in prompts}
    for name in warm:
        parts[name].append(run.step({name: prompts[name][: len(prompts[name]) // 2]})[name])
    step = 0
    while work := {
        name: tokens[at : at + size(name, step)]
        for name, tokens in prompts.items()
        if (at := run.lengths.get(name, 0)) < len(tokens)
    }:
        for name, logits in run.step(work).items():
            parts[name].append(logits)
        step += 1
    for name, tokens in prompts.items():
        check(family, tokens, torch.cat(parts[name]))


@settings(max_examples=25, deadline=None)
@given(family=st.sampled_from(["llama", "mistral-window", "qwen2-window"]), seed=st.integers(0, 1000), data=st.data())
def test_any_schedule_gives_the_same_logits(family: str, seed: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=4))
    prompts = {str(i): prompt(length, seed + i) for i, length in enumerate(lengths)}
    check_schedule(family, prompts, lambda name, step: random.Random(f"{seed} {name} {step}").choice([1, 1, 2, 5, 13]))


def test_many_single_queries_of_very_different_lengths() -> None:
    """Contexts on both sides of the padding limit fall into separate calls and stay exact."""
    config = load_tiny("llama").config
    run = PagedRun(init_random(config, "cpu", torch.float32, seed=3), block_size=16, num_blocks=200)
    alone = PagedRun(run.decoder, block_size=16, num_blocks=200, seed=9)
    prompts = {"a": prompt(9), "b": prompt(511), "c": prompt(512), "d": prompt(513), "e": prompt(1100), "f": prompt(40)}
    for name, tokens in prompts.items():
        run.step({name: tokens})
        alone.step({name: tokens})
    together = run.step({name: [7] for name in prompts} | {"g": prompt(20)})
    for name in prompts:
        torch.testing.assert_close(together[name], alone.step({name: [7]})[name], atol=1e-5, rtol=0)


def test_a_shared_prefix_is_read_by_both() -> None:
    tokens = prompt(30)
    run = PagedRun(load_tiny("qwen3"))
    run.step({"a": tokens[:20]})
    run.fork("a", "b", 16)
    out = run.step({"a": tokens[20:25], "b": [*tokens[16:20], 5, 6]})
    check("qwen3", [*tokens[:20], 5, 6], torch.cat((expected("qwen3", (*tokens[:20], 5, 6))[:16], out["b"])))
    check("qwen3", tokens[:25], torch.cat((expected("qwen3", tuple(tokens[:25]))[:20], out["a"])))


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_nan_in_another_sequences_blocks_stays_there(family: str) -> None:
    run = PagedRun(load_tiny(family))
    run.step({"broken": prompt(10), "a": prompt(9, 2)})
    for block in run.blocks["broken"]:
        run.cache.k[:, block] = run.cache.v[:, block] = float("nan")
    out = run.step({"a": [3], "broken": [1], "b": prompt(6, 4)})
    assert torch.isnan(out["broken"]).all()
    check(family, [*prompt(9, 2), 3], torch.cat((expected(family, (*prompt(9, 2), 3))[:9], out["a"])))
    check(family, prompt(6, 4), out["b"])


def test_logits_only_where_asked() -> None:
    run = PagedRun(load_tiny("llama"))
    batch = run.batch({"a": prompt(6), "b": prompt(5, 2)})
    rows = torch.tensor([10, 2])
    with torch.inference_mode():
        hidden = run.decoder(type(batch)(**(vars(batch) | {"logit_rows": rows})), run.cache)
        none = run.decoder(type(batch)(**(vars(batch) | {"logit_rows": rows[:0]})), run.cache)
        logits = run.decoder.logits(hidden)
    assert none.shape == (0, hidden.shape[1])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits[0], expected("llama", tuple(prompt(5, 2)))[4], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(logits[1], expected("llama", tuple(prompt(6)))[2], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_as_close_to_float64_as_transformers(family: str, tmp_path: Path) -> None:
    tokens = prompt(40)
    build(family).to(torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    decoder = load_model(tmp_path, load_config(tmp_path)[1], "cpu", torch.bfloat16)
    theirs = oracle_logits(model, tokens).double()
    truth = oracle_logits(model.double(), tokens)
    run = PagedRun(decoder)
    ours = torch.cat([run.step({"a": tokens[:20]})["a"], *(run.step({"a": [t]})["a"] for t in tokens[20:])]).double()
    assert (ours - truth).square().mean().sqrt() <= 1.1 * (theirs - truth).square().mean().sqrt()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3"])
def test_cuda_matches_transformers(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    run = PagedRun(load_model(tmp_path, load_config(tmp_path)[1], "cuda", torch.float32))
    tokens, other = prompt(33), prompt(12, 2)
    parts = [run.step({"a": tokens[:16], "b": other[:6]}), run.step({"a": tokens[16:32], "b": other[6:7]})]
    parts.append(run.step({"a": tokens[32:], "b": other[7:]}))
    check(family, tokens, torch.cat([part["a"] for part in parts]).cpu())
    check(family, other, torch.cat([part["b"] for part in parts]).cpu())

"""How exact adapters of each kind are in bfloat16, and what the machinery for them costs batches that have none.

Exact: the RMS error of log-probabilities against float64, the engine's over that of the merged model in bfloat16 (by
transformers), which is what a server with one adapter would run. Log-probabilities are logits less what is common to
a position; of each position the token and the 20 best count. The goal is at most 1.1.

Step time: of base-only and plain-LoRA batches, in an engine that holds only plain adapters and in one that holds one of
each other kind beside them, in turns. On a CPU it is CPU time, of one thread.

    python -m tests.bench.exact_bf16 [--device cuda] [--wide] [--json build/exact-bf16.json]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from inference_service.engine.engine import Engine
from inference_service.engine.runner import ModelRunner
from inference_service.model.loader import load_config
from inference_service.types import MAX_LOGPROBS, GenerateSpec, Sampling, Stop, TokenLogprobs
from shared.adapter_format.binding import plan
from shared.adapter_format.config import parse_adapter_config
from shared.adapter_format.header import read_header_of
from tests.inference_service.engine.tiny_engine import build_engine, run
from tests.kinds.bases import BASES, VOCAB, build
from tests.kinds.cases import CASES, default_cases
from tests.kinds.in_process import Packed, empty, pack
from tests.kinds.peft_answers import save_trained
from tests.shared.adapter_format.merging import merged

WIDE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.03,
}  # fmt: skip
# aLoRA has no merged model: it is the base model up to its activation. The others say nothing of their own in bfloat16.
LEFT_OUT = {"aLoRA", "older layouts", "PiSSA, OLoRA, KaSA (converted)"}


class World(NamedTuple):
    """A base model in bfloat16, and adapters of it by case; `folder` has both."""

    folder: Path
    device: str
    packed: Packed
    digests: dict[str, str]


class Exactness(NamedTuple):
    """RMS errors against float64, of the engine and of the merged model in bfloat16."""

    case: str
    engine: float
    merged: float


class StepTimes(NamedTuple):
    """Milliseconds of a decode step, medians of rounds in turns: without other kinds in the arena, and beside them."""

    load: str
    alone: list[float]
    beside: list[float]


def cases_of(base: str) -> list[str]:
    return sorted((name for name in default_cases(base) if CASES[name].kind not in LEFT_OUT), key=list(CASES).index)


def make(folder: Path, base: str, device: str, cases: Sequence[str], sizes: dict[str, Any]) -> World:
    build(base, folder / "base", torch.bfloat16, **sizes)
    packed, digests = empty(folder / "base"), {}
    for case in cases:
        save_trained(case, CASES[case], folder / "base", folder / case, strength=0.15 if not sizes else 0.04)
        digests[case] = pack(packed, folder / case, "bfloat16")
    return World(folder, device, packed, digests)


def engine_of(world: World, num_adapters: int) -> Engine:
    runner: type[ModelRunner] = ModelRunner
    host = world.packed.host
    if world.device == "cuda":
        from inference_service.engine.cuda_runner import CudaRunner  # imports Triton

        runner, host = CudaRunner, host.pin_memory()
    engine: Engine = build_engine(
        world.packed, device=world.device, dtype="bfloat16", host=host, runner_class=runner, num_seqs=32, budget=512,
        slots=max(num_adapters, 1) + 1, adapter_bytes=host.numel(), kv_tokens=16384, prefix_caching=False,
    )  # fmt: skip
    engine.runner.warm_up()
    return engine


# ---- exactness


def measure_exactness(world: World, num_prompts: int, length: int = 24, output: int = 8) -> list[Exactness]:
    """One entry for each case, all of them in one batch."""
    generator = torch.Generator().manual_seed(1)
    specs = [
        GenerateSpec(
            f"{case}/{number}", torch.randint(3, VOCAB, (length,), generator=generator).tolist(),
            Sampling(temperature=0.0), Stop(output, ignore_eos=True), digest, logprobs=MAX_LOGPROBS,
            prompt_logprobs=MAX_LOGPROBS, extra_vocab=CASES[case].extra_vocab,
        )
        for case, digest in world.digests.items()
        for number in range(num_prompts)
    ]  # fmt: skip
    answers, scores = run(engine_of(world, len(world.digests)), specs)
    return [
        _exactness(world, case, [spec for spec in specs if spec.adapter_digest == digest], answers, scores)
        for case, digest in world.digests.items()
    ]


def _exactness(
    world: World,
    case: str,
    specs: Sequence[GenerateSpec],
    answers: dict[tuple[str, int], tuple[list[int], list[float]]],
    scores: dict[str, list[TokenLogprobs]],
) -> Exactness:
    exact = _merged(world, case).to(world.device)
    errors: dict[str, list[torch.Tensor]] = {"engine": [], "merged": []}
    expected = [_logprobs(exact, [*spec.prompt_ids, *answers[spec.request_id, 0][0]]) for spec in specs]
    rounded = exact.to(torch.bfloat16)
    for spec, reference in zip(specs, expected, strict=True):
        tokens, logprobs = answers[spec.request_id, 0]
        merged_logprobs = _logprobs(rounded, [*spec.prompt_ids, *tokens])
        places = [(row, token, logprob) for row, (token, logprob) in _rows(spec, scores[spec.request_id])]
        first = len(spec.prompt_ids) - 1
        places += [
            (first + at, token, logprob) for at, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
        ]
        rows, ids, found = (torch.tensor(column) for column in zip(*places, strict=True))
        errors["engine"].append(found.double() - reference[rows, ids])
        errors["merged"].append(merged_logprobs[rows, ids] - reference[rows, ids])
    rms = {name: float(torch.cat(parts).square().mean().sqrt()) for name, parts in errors.items()}
    return Exactness(case, rms["engine"], rms["merged"])


def _rows(spec: GenerateSpec, scores: Sequence[TokenLogprobs]) -> list[tuple[int, tuple[int, float]]]:
    """Of the prompt: row, token and log-probability, of the tokens that follow and of the best."""
    assert len(scores) == len(spec.prompt_ids) - 1
    return [(row, pair) for row, entry in enumerate(scores) for pair in ((entry.token_id, entry.logprob), *entry.top)]


def _merged(world: World, case: str) -> PreTrainedModel:
    """In float64, of the numbers in the files."""
    folder = world.folder / case
    _, config = load_config(world.packed.folder)
    weights = folder / "adapter_model.safetensors"
    bound = plan(parse_adapter_config((folder / "adapter_config.json").read_bytes()), read_header_of(weights), config)
    return merged(AutoModelForCausalLM.from_pretrained(world.packed.folder, dtype=torch.float64), bound, weights)


@torch.inference_mode()
def _logprobs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """`[len(ids), vocabulary]` float64 on the CPU."""
    logits = model(input_ids=torch.tensor([ids], device=model.device)).logits[0]
    return torch.log_softmax(logits.double(), -1).cpu()


# ---- step time


def measure_step_times(world: World, plain: str, rounds: int, num_requests: int, output: int) -> list[StepTimes]:
    """The base model's and a plain adapter's batches, in two engines in turns."""
    found = []
    for load, digest in (("base", None), ("plain LoRA", world.digests[plain])):
        engines = {"alone": engine_of(world, 1), "beside": engine_of(world, len(world.digests))}
        _fill(engines["beside"], [*world.digests.values()])
        times: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(rounds + 1):  # the first is thrown away
            for name, engine in engines.items():
                engine_time = _decode_ms(engine, digest, num_requests, output, turn, world.device)
                times[name].append(engine_time)
        found.append(StepTimes(load, times["alone"][1:], times["beside"][1:]))
    return found


def _fill(engine: Engine, digests: Sequence[str]) -> None:
    """Puts all of them into slots, by a request each."""
    run(engine, [GenerateSpec(d, [5, 6], Sampling(temperature=0.0), Stop(1), d) for d in digests])


def _decode_ms(engine: Engine, digest: str | None, num_requests: int, output: int, seed: int, device: str) -> float:
    """The median step of a batch that only decodes."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    for number in range(num_requests):
        stop = Stop(output, ignore_eos=True)
        engine.submit(b"", GenerateSpec(f"{seed}/{number}", [3 + seed, 4 + number], Sampling(seed=seed), stop, digest))
    seconds: list[float] = []
    while engine.scheduler.has_work:
        engine.answer_adapters()
        engine.scheduler.adapters.poll()
        started = clock()
        engine.step(time.monotonic())
        seconds.append(clock() - started)
    return 1e3 * statistics.median(seconds[4:-4])


# ---- report


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--base", default="qwen2", choices=BASES)
    parser.add_argument("--cases", nargs="*", help="of tests/kinds/cases.py; the first of each kind by default")
    parser.add_argument("--wide", action="store_true", help="1,024 wide and 8 layers deep instead of 64 and 3")
    parser.add_argument("--prompts", type=int, default=8, help="of each case")
    parser.add_argument("--rounds", type=int, default=5, help="of step times")
    parser.add_argument("--requests", type=int, default=16, help="that decode at once in a round")
    parser.add_argument("--tokens", type=int, default=64, help="of each of them")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    cases = list(dict.fromkeys(["plain", *(args.cases or cases_of(args.base))]))
    with tempfile.TemporaryDirectory() as folder, _threads(1 if args.device == "cpu" else torch.get_num_threads()):
        world = make(Path(folder), args.base, args.device, cases, WIDE if args.wide else {})
        exact = measure_exactness(world, args.prompts)
        steps = measure_step_times(world, "plain", args.rounds, args.requests, args.tokens)
    for entry in exact:
        print(f"{entry.case:40} {entry.engine:.2e} / {entry.merged:.2e} = {entry.engine / entry.merged:.2f}")
    for step in steps:
        alone, beside = (statistics.median(values) for values in (step.alone, step.beside))
        print(f"{step.load:40} {alone:.3f} ms alone, {beside:.3f} ms beside other kinds ({beside / alone - 1:+.1%})")
    report = {"exact": [entry._asdict() for entry in exact], "steps": [step._asdict() for step in steps]}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()

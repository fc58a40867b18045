"""How exact adapters of each kind are in bfloat16, and what the machinery for them costs batches that have none.

Exact: the RMS error of log-probabilities against float64, the engine's over that of the merged model in bfloat16 (by
transformers), which is what a server with one adapter would run. Log-probabilities are logits less what is common to
a position; of each position the token and the 20 best count. The target is at most 1.1. Kinds that a GPU's kernels know
run in batches of their own, as they are served; then the others, for which the plain form of the model runs.

Step time: of base-only and plain-LoRA batches that decode, in an engine that holds a plain adapter only and in one that
holds one of each other kind beside it, in turns. On a CPU it is CPU time, of one thread.

    python -m tests.bench.exact_bf16 [--device cuda] [--wide] [--json build/exact-bf16.json]

PEFT makes the adapters. Where there is none, `--world FOLDER` reads what `--make FOLDER` wrote elsewhere.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inference_service.engine.runner import ModelRunner
from inference_service.types import MAX_LOGPROBS, BlobLayout, GenerateSpec, Sampling, Stop, TokenLogprobs
from tests.bench import bf16_world
from tests.bench.bf16_world import BASES, PLAIN, WIDE, Adapter
from tests.bench.merged_scores import MergedModel
from tests.bench.packed_engine import PackedEngine
from tests.kinds.packed import Packed, empty, pack

TARGET = 1.1
PROMPT_TOKENS, ASKED_AT, OUTPUT_TOKENS = 24, 5, 8
ARENA_BYTES = 384 << 20


class World(NamedTuple):
    """What `bf16_world` wrote to `folder`, packed. `digests`: by case."""

    folder: Path
    device: str
    adapters: list[Adapter]
    packed: Packed
    digests: dict[str, str]

    def layout(self, adapter: Adapter) -> BlobLayout:
        return self.packed.acquired[self.digests[adapter.case]].layout


class Exactness(NamedTuple):
    """RMS errors against float64, of the engine and of the merged model in bfloat16, and the one over the other.

    `path`: "kernels" if those of a GPU know all of the adapter, "plain" if the plain form of the model runs.
    """

    case: str
    kind: str
    path: str
    engine: float
    merged: float
    ratio: float


class StepTimes(NamedTuple):
    """Milliseconds of a decode step, medians of rounds in turns: without other kinds in the arena, and beside them.

    `change` of the medians, and `noise`: how far the rounds of either lie apart; both as shares.
    """

    load: str
    alone: list[float]
    beside: list[float]
    change: float
    noise: float


def load(folder: Path, device: str) -> World:
    """Packs what lies in `folder`."""
    adapters, packed = bf16_world.read(folder), empty(folder / "base", ARENA_BYTES)
    digests = {adapter.case: pack(packed, adapter.folder(folder), "bfloat16") for adapter in adapters}
    if device == "cuda":
        packed = packed._replace(host=packed.host.pin_memory())
    return World(folder, device, adapters, packed, digests)


def engine_of(world: World) -> PackedEngine:
    """With room for all adapters, and none yet."""
    runner: type[ModelRunner] = ModelRunner
    if world.device == "cuda":
        from inference_service.engine.cuda_runner import CudaRunner  # imports Triton

        runner = CudaRunner
    return PackedEngine(world.packed, runner, world.device, "bfloat16", slots=len(world.adapters) + 1)


# ---- exactness


def measure_exactness(world: World, engine: PackedEngine, num_prompts: int) -> Iterator[Exactness]:
    """One entry for each adapter; those of one path run in one batch."""
    for path in ("kernels", "plain"):
        adapters = [adapter for adapter in world.adapters if _path(world.layout(adapter)) == path]
        specs = {adapter.case: _specs(world, adapter, num_prompts) for adapter in adapters}
        answers, scores = engine.run([spec for some in specs.values() for spec in some])
        for adapter in adapters:
            model = MergedModel(world.packed.folder, adapter.folder(world.folder), world.device)
            ids = [[*spec.prompt_ids, *answers[spec.request_id][0]] for spec in specs[adapter.case]]
            starts = [spec.adapter_start for spec in specs[adapter.case]]
            exact = [model.logprobs(*one) for one in zip(ids, starts, strict=True)]
            model.round()
            rounded = [model.logprobs(*one) for one in zip(ids, starts, strict=True)]
            errors: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
            for spec, reference, merged in zip(specs[adapter.case], exact, rounded, strict=True):
                rows, tokens, found = _found(spec, *answers[spec.request_id], scores[spec.request_id])
                errors[0].append(found - reference[rows, tokens])
                errors[1].append((merged - reference)[rows, tokens])
            rms = [float(torch.cat(parts).square().mean().sqrt()) for parts in errors]
            yield Exactness(adapter.case, adapter.kind, path, *rms, rms[0] / rms[1])


def _path(layout: BlobLayout) -> str:
    is_known = not layout.extra_vocab and {extra.name for extra in layout.extras} <= {"gain", "offset"}
    return "kernels" if is_known else "plain"


def _specs(world: World, adapter: Adapter, count: int) -> list[GenerateSpec]:
    generator = torch.Generator().manual_seed(len(adapter.case))
    specs = []
    for number in range(count):
        prompt = torch.randint(3, 250, (PROMPT_TOKENS,), generator=generator).tolist()
        prompt[ASKED_AT:ASKED_AT] = adapter.asked
        start = ASKED_AT if world.layout(adapter).activation else 0
        stop = Stop(OUTPUT_TOKENS, ignore_eos=True)
        specs.append(GenerateSpec(
            f"{adapter.case}/{number}", prompt, Sampling(temperature=0.0), stop, world.digests[adapter.case],
            logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS, adapter_start=start, extra_vocab=adapter.extra_vocab,
        ))  # fmt: skip
    return specs


def _found(
    spec: GenerateSpec, tokens: list[int], logprobs: list[float], scores: Sequence[TokenLogprobs]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, tokens and log-probabilities: of what follows each token of the prompt, of the best, of the answer."""
    assert len(scores) == len(spec.prompt_ids) - 1
    places = [
        (row, *pair) for row, entry in enumerate(scores) for pair in ((entry.token_id, entry.logprob), *entry.top)
    ]
    first = len(spec.prompt_ids) - 1
    places += [(first + at, token, logprob) for at, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))]
    rows, ids, found = zip(*places, strict=True)
    return torch.tensor(rows), torch.tensor(ids), torch.tensor(found, dtype=torch.float64)


# ---- step time


def measure_step_times(
    world: World, alone: PackedEngine, beside: PackedEngine, rounds: int, num_requests: int, output: int
) -> Iterator[StepTimes]:
    """The base model's and a plain adapter's batches, in two engines in turns."""
    beside.run([_short(digest, digest) for digest in world.digests.values()])
    clock = time.perf_counter if world.device == "cuda" else time.process_time
    for name, digest in (("base", None), ("plain LoRA", world.digests[PLAIN])):
        times: dict[PackedEngine, list[float]] = {alone: [], beside: []}
        for turn in range(rounds + 1):  # the first is thrown away
            for engine in (alone, beside)[:: -1 if turn % 2 else 1]:
                times[engine].append(_decode_ms(engine, digest, num_requests, output, turn, clock))
        first, second = times[alone][1:], times[beside][1:]
        noise = max((max(values) - min(values)) / statistics.median(values) for values in (first, second))
        yield StepTimes(name, first, second, statistics.median(second) / statistics.median(first) - 1, noise)


def _short(name: str, digest: str | None) -> GenerateSpec:
    """Puts an adapter into its slot."""
    return GenerateSpec(name, [5, 6], Sampling(temperature=0.0), Stop(1), digest)


def _decode_ms(
    engine: PackedEngine, digest: str | None, num_requests: int, output: int, seed: int, clock: Callable[[], float]
) -> float:
    """The median step of a batch that only decodes."""
    stop = Stop(output, ignore_eos=True)
    engine.submit([
        GenerateSpec(f"{seed}/{number}", [3 + seed, 4 + number], Sampling(temperature=0.0), stop, digest)
        for number in range(num_requests)
    ])  # fmt: skip
    seconds: list[float] = []
    while engine.is_busy:
        seconds.append(engine.step_seconds(clock))
    return 1e3 * statistics.median(seconds[4:-4])


# ---- report


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def report(world: World, prompts: int, rounds: int, num_requests: int, output: int) -> dict[str, Any]:
    """Measures and prints, a line as soon as it is known."""
    gpu = torch.cuda.get_device_name() if world.device == "cuda" else platform.machine()
    print(f"{gpu}, torch {torch.__version__}; RMS error of log-probabilities, engine / merged model, target {TARGET}")
    alone, beside = engine_of(world), engine_of(world)
    exact, steps = [], []
    for entry in measure_exactness(world, beside, prompts):
        exact.append(entry)
        verdict = "" if entry.ratio <= TARGET else "  OVER THE TARGET"
        errors = f"{entry.engine:.2e} / {entry.merged:.2e}"
        print(f"{entry.case:26} {entry.path:8} {errors} = {entry.ratio:.2f} of {TARGET}{verdict}", flush=True)
    print("step that decodes, ms, medians of rounds: a plain adapter alone in the arena, and beside other kinds")
    for times in measure_step_times(world, alone, beside, rounds, num_requests, output):
        steps.append(times)
        medians = f"{statistics.median(times.alone):.3f} alone, {statistics.median(times.beside):.3f} beside"
        print(f"{times.load:26} {medians}: {times.change:+.1%}; rounds lie {times.noise:.1%} apart", flush=True)
    figures = {"exact": [entry._asdict() for entry in exact], "steps": [entry._asdict() for entry in steps]}
    return {"device": gpu, "torch": torch.__version__, "target": TARGET, **figures}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--base", default="qwen2", choices=BASES)
    parser.add_argument("--cases", nargs="*", help="of tests/kinds/cases.py; the first of each kind by default")
    parser.add_argument("--wide", action="store_true", help="1,024 wide and 8 layers deep instead of 64 and 3")
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="write base model and adapters, and no more")
    parser.add_argument("--world", type=Path, metavar="FOLDER", help="measure what --make wrote")
    parser.add_argument("--prompts", type=int, default=8, help="of each case")
    parser.add_argument("--rounds", type=int, default=7, help="of step times")
    parser.add_argument("--requests", type=int, default=16, help="that decode at once in a round")
    parser.add_argument("--tokens", type=int, default=64, help="of each of them")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    threads = 1 if args.device == "cpu" else torch.get_num_threads()
    with tempfile.TemporaryDirectory() as scratch, _threads(threads):
        folder = args.world or args.make or Path(scratch)
        if not args.world:
            bf16_world.make(folder, args.base, args.cases, WIDE if args.wide else {})
        if args.make:
            return {}
        found = report(load(folder, args.device), args.prompts, args.rounds, args.requests, args.tokens)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main()

"""Before SERVING: every kernel is compiled, every graph captured, and the allocator holds what the heaviest step takes.

Which variant of a kernel a step launches follows from its kind alone (what else varies is device data), so a few layers
of every kind are run, over padding: once to compile and load side by side all there is, and once to launch it.
"""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

import logging
import os
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING

import torch

from inference_service.engine.blocks import ChainSeed
from inference_service.engine.sequence import Request, State
from inference_service.engine.step import Chunk, Schedule
from inference_service.engine.step_kinds import Kind
from inference_service.lora.residents import Handle
from inference_service.types import MAX_LOGPROBS, GenerateSpec, Sampling, Stop
from kernels.compiling import compiling
from kernels.table import MAX_RANK

if TYPE_CHECKING:
    from inference_service.engine.cuda_runner import CudaRunner

log = logging.getLogger(__name__)

LARGE_STEP = 256  # tokens between steps that are run of those too large to be captured
COMPILE_THREADS = 16
SLACK = 1.25  # of the heaviest step's peak, for the gaps that blocks of many sizes leave
SMALL_BLOCK, NUM_SMALL_BLOCKS = 1 << 20, 16  # the allocator keeps blocks up to this size apart

PLAIN = Sampling(temperature=0.0)
RANDOM = Sampling(temperature=1.0)
FILTERED = Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01)
ADJUSTED = Sampling(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1)
EVERYTHING = Sampling(
    temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1,
    frequency_penalty=0.1, logit_bias={0: 1.0},
)  # fmt: skip


def warm_up(runner: "CudaRunner") -> None:
    """Run it once, before the first request: requests find adapter slot 0, the KV cache and all tables unused."""
    runner.arena.ranks[0] = MAX_RANK  # steps with adapters use it, and find nothing there
    with _timed("kernels compiled"):
        _compile(runner)
        torch.cuda.synchronize(runner.device)
    with _timed("graphs captured"):
        torch.cuda.empty_cache()  # as capturing does
        free, _ = torch.cuda.mem_get_info(runner.device)
        runner.capture_graphs()
        torch.cuda.synchronize(runner.device)
    taken = free - torch.cuda.mem_get_info(runner.device)[0]
    log.info("%d graphs take %d of the %d MiB for them", len(runner.graphs), taken >> 20, runner.memory.reserve >> 20)
    with _timed("heaviest steps run"):
        base = torch.cuda.memory_allocated(runner.device)
        torch.cuda.reset_peak_memory_stats(runner.device)
        _run_heaviest(runner)
        torch.cuda.synchronize(runner.device)
        peak = torch.cuda.max_memory_allocated(runner.device) - base
        _reserve(runner, int(SLACK * peak))
        _run_heaviest(runner)
        torch.cuda.synchronize(runner.device)
    runner.arena.ranks[0] = 0
    log.info("the heaviest step takes %d MiB", peak >> 20)


# ---- the steps


def _compile(runner: "CudaRunner") -> None:
    runner.stage_nothing()
    threads = min(len(os.sched_getaffinity(0)), COMPILE_THREADS)
    with compiling(threads):
        _run_padding(runner)
    _run_padding(runner)


def _run_padding(runner: "CudaRunner") -> None:
    for kind in _kinds(runner):
        runner.compute(kind, runner.fused.num_kinds)
    runner.sample_padding()


def _kinds(runner: "CudaRunner") -> Iterator[Kind]:
    """Those that are captured, and those of so many tokens that they are not.

    Of the latter the libraries' products depend on the number of tokens, our kernels on the rest: so all of the rest is
    run with the fewest and the most tokens, and between them one after the other.
    """
    kinds, limits = runner.kinds, runner.limits
    yield from kinds.captured()
    largest = limits.max_batched_tokens
    sizes = (*range(kinds.most_captured(0) + 1, largest, LARGE_STEP), largest)
    rest = tuple(product((0, 1, limits.max_num_seqs), (0, MAX_RANK)))
    for number, num_tokens in enumerate(sizes):
        chosen = rest if num_tokens in (sizes[0], largest) else (rest[number % len(rest)],)
        for num_decodes, max_rank in chosen:
            yield kinds.exact(num_tokens, num_decodes, 1, max_rank)
    yield kinds.exact(largest, 0, 1, MAX_RANK, has_affine=True)


def _run_heaviest(runner: "CudaRunner") -> None:
    """Full batches with everything that a request can ask for, then each sampling kernel in each form."""
    limits = runner.limits
    seqs, tokens = limits.max_num_seqs, _most_tokens(runner)
    longest, shortest = _prompt_lengths(runner, tokens), [max(tokens // seqs, 1)] * seqs
    for lengths in (longest, shortest):
        _launch(runner, [_chunk(runner, EVERYTHING, length, True, scores=True) for length in lengths])
    for has_adapters in (False, True):
        for sampling in (PLAIN, RANDOM, FILTERED, ADJUSTED, EVERYTHING):
            for count in (1, seqs):
                _launch(runner, [_chunk(runner, sampling, 1, has_adapters) for _ in range(count)])


def _launch(runner: "CudaRunner", chunks: list[Chunk]) -> None:
    decodes, prefills = ([c for c in chunks if (c.length == 1) is single] for single in (True, False))
    runner.launch(Schedule((*decodes, *prefills), len(decodes)))
    for chunk in chunks:
        chunk.sequence.state = State.FINISHED


def _most_tokens(runner: "CudaRunner") -> int:
    limits = runner.limits
    return min(limits.max_batched_tokens, limits.max_num_seqs * limits.max_model_len)


def _prompt_lengths(runner: "CudaRunner", num_tokens: int) -> list[int]:
    """Of as few prompts as can have so many tokens together."""
    longest = min(runner.limits.max_model_len, num_tokens)
    return [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]


def _chunk(runner: "CudaRunner", sampling: Sampling, length: int, has_adapter: bool, scores: bool = False) -> Chunk:
    """A whole new sequence. It shares its blocks, whose contents nobody has asked for yet."""
    num_top = MAX_LOGPROBS if sampling is EVERYTHING else None
    stop = Stop(max_tokens=1, min_tokens=1 if sampling is EVERYTHING else 0)
    spec = GenerateSpec("warm-up", [0] * length, sampling, stop, logprobs=num_top, prompt_logprobs=num_top)
    sequence = Request(spec, b"", ChainSeed(b""), 0).sequences[0]
    sequence.num_pending, sequence.state = 1, State.RUNNING
    sequence.handle = Handle(0, 0) if has_adapter else None
    num_blocks = -(-length // runner.block_size)
    sequence.blocks = array("i", (number % runner.num_blocks for number in range(num_blocks)))
    return Chunk(sequence, 0, length, True, range(length - 1) if scores else range(0))


# ---- memory


def _reserve(runner: "CudaRunner", nbytes: int) -> None:
    """Leave the allocator one block that the heaviest step fits into, and a few small ones, and nothing else.

    Blocks of earlier steps' sizes would be cut up until, some day, a step finds none that is large enough.
    """
    torch.cuda.synchronize(runner.device)
    torch.cuda.empty_cache()
    others = NUM_SMALL_BLOCKS * SMALL_BLOCK
    free, _ = torch.cuda.mem_get_info(runner.device)
    blocks = [_block(runner, min(nbytes, free - others))]
    blocks += [_block(runner, SMALL_BLOCK) for _ in range(NUM_SMALL_BLOCKS)]


def _block(runner: "CudaRunner", nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=runner.device)


@contextmanager
def _timed(what: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    log.info("%s in %.1f s", what, time.monotonic() - started)

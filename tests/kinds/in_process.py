"""Adapters run by the engine of this process: no services, no RPC."""

from typing import NamedTuple

from inference_service.requests import activation_start
from inference_service.types import GenerateSpec, Sampling, Stop
from tests.inference_service.engine.tiny_engine import build_engine, run
from tests.kinds.packed import ARENA_BYTES, Packed


class Asked(NamedTuple):
    """A prompt for an adapter. `digest`: None for the base model."""

    digest: str | None
    prompt: list[int]


def prompt_logprobs(packed: Packed, asked: list[Asked]) -> list[list[float]]:
    """Of each prompt's tokens from the second on, and of one greedy token behind it, all in one batch."""
    engine = build_engine(
        packed, budget=1024, num_seqs=64, slots=64, adapter_bytes=ARENA_BYTES, kv_tokens=8192, prefix_caching=False
    )
    specs = [_spec(number, one, packed) for number, one in enumerate(asked)]
    answers, scores = run(engine, specs)
    return [
        [entry.logprob for entry in scores.get(spec.request_id, ())] + answers[spec.request_id, 0][1] for spec in specs
    ]


def _spec(number: int, asked: Asked, packed: Packed) -> GenerateSpec:
    layout = packed.acquired[asked.digest].layout if asked.digest else None
    start = activation_start(asked.prompt, layout.activation) if layout else 0
    return GenerateSpec(
        f"{number}", asked.prompt, Sampling(temperature=0.0), Stop(1, ignore_eos=True),
        None if start is None else asked.digest, logprobs=0, prompt_logprobs=0, adapter_start=start or 0,
        extra_vocab=layout.extra_vocab if layout else 0,
    )  # fmt: skip

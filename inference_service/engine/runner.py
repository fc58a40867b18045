"""Computes a step on the device: model, KV cache, adapters' arena, sampling."""

import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch.nn.functional import pad

from inference_service.engine.batch import gather
from inference_service.engine.blocks import ChainSeed
from inference_service.engine.config import EngineConfig, limits_for, model_len_line
from inference_service.engine.memory import Wanted, describe, divide, divide_host, graph_reserve
from inference_service.engine.sampler import Row, has_penalties, sample, token_logprobs
from inference_service.engine.sequence import Request, Sequence
from inference_service.engine.step import Chunk, Computed, DeviceLost, PendingStep, Schedule, StepResult
from inference_service.lora.arena import Arena
from inference_service.lora.batch import LoraBatch
from inference_service.lora.linear import install
from inference_service.lora.outside import install_outside
from inference_service.model.attention import KVCache
from inference_service.model.decoder import Decoder
from inference_service.model.loader import init_random, load_config, load_model
from inference_service.types import GenerateSpec, MemoryBudget, Sampling, Stop, TokenLogprobs
from shared.base_model import ModelConfig

log = logging.getLogger(__name__)

UNBOUNDED_KV_TOKENS = 1 << 62
LOGIT_BYTES = 16 << 20  # of prompt logprobs' logits at a time
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of errors after which no step can be trusted: a CUDA context is unusable; oneDNN stays broken once it got no memory.
STICKY = {
    "cuda": ("device-side assert", "illegal memory access", "unspecified launch failure", "uncorrectable"),
    "cpu": ("can't allocate memory", "could not create a primitive", "std::bad_alloc"),
}


class Placement(NamedTuple):
    """Where and in what precision the model runs."""

    device: torch.device
    dtype: torch.dtype


def placement(config: EngineConfig) -> Placement:
    """Resolve `auto`: CUDA where there is any, bfloat16 there and float32 on a CPU."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = config.dtype
    if name == "auto":
        name = "bfloat16" if device == "cuda" else "float32"
    return Placement(torch.device(device, 0) if device == "cuda" else torch.device(device), DTYPES[name])


class ModelRunner:
    """One model on one device.

    Args:
        config: The engine's.
        host: The shared host arena, a flat uint8 tensor on the CPU.
    """

    def __init__(self, config: EngineConfig, host: torch.Tensor) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.device, self.dtype = placement(config)
        _, self.model_config = load_config(Path(config.model))
        started = time.monotonic()
        self.decoder = self._load(config)
        log.info("weights loaded in %.1f s", time.monotonic() - started)
        self.memory = self._divide_memory(config, host.numel())
        log.info(describe(self.memory), extra={"memory": msgspec.structs.asdict(self.memory)})
        self.arena_bytes = self.memory.adapter_arena
        layers = self.model_config.num_layers
        self.arena = Arena(self.arena_bytes, config.max_adapters, layers, self.dtype, self.device, host)
        install(self.decoder, self.model_config, self.arena)
        install_outside(self.decoder, layers, self.arena)
        self.block_size = config.block_size
        self.num_blocks = self.memory.num_blocks
        self.kv_cache = self._build_kv_cache()
        kv_tokens = self.num_blocks * self.block_size
        self.limits = limits_for(config, self.device.type, self.model_config.max_position, kv_tokens)
        line, is_cut = model_len_line(config, self.model_config.max_position, kv_tokens)
        log.log(logging.WARNING if is_cut else logging.INFO, line)
        self.looks_ahead = False
        self.vocab_size = self.model_config.vocab_size
        self.eos_ids = self.model_config.eos_token_ids

    def _load(self, config: EngineConfig) -> Decoder:
        if config.load_format == "dummy":
            return init_random(self.model_config, self.device, self.dtype, config.seed)
        return load_model(Path(config.model), self.model_config, self.device, self.dtype)

    def launch(self, schedule: Schedule) -> PendingStep:
        """See `execute`."""
        return Computed(self.execute(schedule))

    @torch.inference_mode()
    def execute(self, schedule: Schedule) -> StepResult:
        """One forward pass over the schedule's chunks, and a token for each that samples.

        Raises:
            DeviceLost: after an error that leaves the device unusable.
        """
        with self.device_errors():
            return self._execute(schedule)

    @contextmanager
    def device_errors(self) -> Iterator[None]:
        """Tells errors that leave the device unusable from others."""
        try:
            yield
        except MemoryError as error:
            raise DeviceLost("there is no memory") from error
        except RuntimeError as error:
            if any(text in str(error) for text in STICKY[self.device.type]):
                raise DeviceLost(str(error)) from error
            raise

    def warm_up(self) -> None:
        """Run one prefill and one decode of the largest usual shapes, so that the first request finds all allocated."""
        started = time.monotonic()
        length = min(self.limits.max_batched_tokens, self.limits.max_model_len - 1, 256)
        spec = GenerateSpec("warm-up", [0] * length, Sampling(temperature=1.0, top_p=0.9), Stop(max_tokens=1))
        sequence = Request(spec, b"", ChainSeed(b""), 0).sequences[0]
        sequence.num_pending = 1
        sequence.blocks.extend(range(-(-(length + 1) // self.block_size)))
        for chunk in (Chunk(sequence, 0, length, True), Chunk(sequence, length - 1, 1, True)):
            self.execute(Schedule((chunk,), num_decodes=int(chunk.length == 1)))
        log.info("warm after %.2f s on %s", time.monotonic() - started, self.device)

    # ---- memory

    def _divide_memory(self, config: EngineConfig, host_arena: int) -> MemoryBudget:
        """Measured on a GPU, by running a step of the largest size; see `engine.memory`."""
        model, block_size = self.model_config, config.block_size
        block_bytes = kv_bytes_per_token(model, self.dtype) * block_size
        wanted = Wanted(config.memory_fraction, config.kv_cache_bytes, config.adapter_memory_bytes)
        if self.device.type == "cpu":
            weights = sum(parameter.nbytes for parameter in self.decoder.parameters())
            return divide_host(weights, wanted, block_bytes, host_arena)
        from inference_service.engine.peak import measure_peak  # these import Triton
        from inference_service.engine.step_kinds import token_buckets

        limits = limits_for(config, self.device.type, model.max_position, UNBOUNDED_KV_TOKENS)
        measured = measure_peak(self.decoder, limits, block_size)
        captured = token_buckets(limits.max_batched_tokens)[-1]
        captured_step = measured.activations * captured // limits.max_batched_tokens
        reserve = graph_reserve(limits.max_num_seqs, model.vocab_size, captured_step)
        return divide(measured, wanted, block_bytes, reserve, host_arena)

    def _build_kv_cache(self) -> KVCache:
        """One block more than the scheduler knows: scratch, for tokens that need no keys and values."""
        c = self.model_config
        size = (c.num_layers, self.num_blocks + 1, self.block_size, c.num_kv_heads, c.head_dim)
        return KVCache(*size, self.dtype, self.device)

    # ---- one step

    def _execute(self, schedule: Schedule) -> StepResult:
        scratch = self.num_blocks * self.block_size
        batch = gather(schedule, self.block_size, scratch, self.device, self.arena.extras)
        hidden = self.decoder(batch, self.kv_cache)  # [rows, hidden]
        sequences = [chunk.sequence for chunk in schedule.chunks if chunk.samples]
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        lora = batch.logit_lora
        if sequences:
            logits = self.decoder.logits(hidden[: len(sequences)], part_of(lora, 0, len(sequences)))
            token_ids, logprobs = sample(logits, [self.row_of(sequence) for sequence in sequences])
        scored = part_of(lora, len(sequences), hidden.shape[0])
        return StepResult(token_ids, logprobs, self.prompt_logprobs(schedule.chunks, hidden[len(sequences) :], scored))

    def row_of(self, sequence: Sequence) -> Row:
        """How the sequence's next token is sampled."""
        spec = sequence.request.spec
        return Row(
            spec.sampling,
            sequence.index,
            sequence.position,
            sequence.token_ids[: sequence.num_prompt] if spec.sampling.repetition_penalty != 1.0 else (),
            sequence.token_ids[sequence.num_prompt :] if has_penalties(spec.sampling) else (),
            sequence.forbidden_ids(self.eos_ids),
            spec.logprobs,
        )

    def prompt_logprobs(
        self, chunks: Items[Chunk], hidden: torch.Tensor, lora: LoraBatch | None
    ) -> list[list[TokenLogprobs]]:
        """Per chunk, of its scored positions, whose rows `hidden` `[rows, hidden]` holds in order. `lora`: of these."""
        result: list[list[TokenLogprobs]] = []
        start = 0
        for chunk in chunks:
            positions = chunk.scored_positions
            targets = chunk.sequence.token_ids[positions.start + 1 : positions.stop + 1] if positions else []
            num_top = chunk.sequence.request.spec.prompt_logprobs or 0
            end = start + len(targets)
            result.append(self._score(hidden[start:end], targets, num_top, part_of(lora, start, end)))
            start = end
        return result

    def _score(
        self, hidden: torch.Tensor, targets: list[int], num_top: int, lora: LoraBatch | None
    ) -> list[TokenLogprobs]:
        """Logprobs of `targets`, one per row, in pieces whose logits are bounded."""
        piece = max(LOGIT_BYTES // (4 * self.vocab_size), 1)
        entries: list[TokenLogprobs] = []
        for start in range(0, len(targets), piece):
            part = targets[start : start + piece]
            logits = self.decoder.logits(hidden[start : start + piece], part_of(lora, start, start + piece))
            missing = max(part) + 1 - logits.shape[1]
            if missing > 0:  # rows of the base model, before an adapter is activated by a token that it adds
                logits = pad(logits, (0, missing), value=float("-inf"))
            entries += token_logprobs(logits, part, num_top)
        return entries


def part_of(lora: object | None, start: int, end: int) -> LoraBatch | None:
    """Of rows `start` up to `end`."""
    return lora.part(start, end) if isinstance(lora, LoraBatch) else None


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize

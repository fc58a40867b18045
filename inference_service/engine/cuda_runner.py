"""Computes steps on a GPU: decode batches replay captured graphs, mixed ones launch kernel by kernel.

Sampled tokens stay on the GPU: the next step can be launched before anybody has read them, and takes them from there.
"""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

import logging
import time
from collections.abc import Sequence as Items
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from inference_service.engine.config import EngineConfig
from inference_service.engine.device_batch import (
    BatchShape,
    fill,
    fill_chunks,
    num_chunks,
    padded,
    sampling_rows,
    segments_of,
    shape_of,
)
from inference_service.engine.graphs import DecodeGraphs, buckets_up_to
from inference_service.engine.runner import ModelRunner
from inference_service.engine.sampler import Row, sample
from inference_service.engine.staging import Staging, fields
from inference_service.engine.step import Computed, PendingStep, Schedule, StepResult
from inference_service.model.batch import DeviceBatch
from inference_service.model.fused import FusedDecoder
from inference_service.types import TokenLogprobs
from kernels import sampling
from kernels.lora import rows_per_chunk
from kernels.table import Chunks

log = logging.getLogger(__name__)


class Scores(NamedTuple):
    """Logprobs on the device, of the rows of a step that want them."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    values: sampling.TopLogprobs


class Forward(NamedTuple):
    """A forward pass: its metadata, logits of the rows that sample, and hidden states of all logit rows.

    A graph gives no hidden states; it runs only where nobody needs them.
    """

    staging: Staging
    logits: Tensor
    hidden: Tensor


class LaunchedStep:
    """A step on its way. `tokens`: page-locked copy of the sampled ids, valid after `event`."""

    def __init__(self, tokens: Tensor, event: torch.cuda.Event, scores: Scores | None, num_chunks: int) -> None:
        self._tokens, self._event, self._scores, self._num_chunks = tokens, event, scores, num_chunks

    def result(self) -> StepResult:
        """Wait until the GPU is there, and read."""
        self._event.synchronize()
        ids: list[int] = self._tokens.tolist()
        return StepResult(ids, _logprobs(ids, self._scores), [[] for _ in range(self._num_chunks)])


class CudaRunner(ModelRunner):
    """`ModelRunner` with fused kernels, CUDA graphs and steps launched ahead."""

    def __init__(self, config: EngineConfig, host: Tensor) -> None:
        super().__init__(config, host)
        self.looks_ahead = True
        limits, blocks = self.limits, -(-self.limits.max_model_len // self.block_size)
        self._fused = FusedDecoder(self.decoder, limits.max_model_len)
        seqs, tokens = limits.max_num_seqs, limits.max_batched_tokens
        self._decode = Staging(fields(seqs, seqs, seqs, blocks), self.device)
        self._mixed = Staging(fields(tokens, seqs, tokens, blocks), self.device)
        self._last_tokens = torch.zeros(seqs, dtype=torch.int64, device=self.device)
        self._host_tokens = [torch.zeros(seqs, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0
        self._sampled_rows: dict[int, int] = {}  # of the last launched step: id of a sequence → row of `_last_tokens`
        self._buckets = buckets_up_to(seqs)
        self._graphs = DecodeGraphs()

    # ---- one step

    @torch.inference_mode()
    def launch(self, schedule: Schedule) -> PendingStep:
        """See `Runner.launch`."""
        with self.device_errors():
            forward = self._forward(schedule)
            rows = [self.row_of(chunk.sequence) for chunk in schedule.chunks if chunk.samples]
            if any(row.is_adjusted for row in rows) or any(chunk.scored_positions for chunk in schedule.chunks):
                return self._read_at_once(schedule, forward, rows)
            return self._sample(schedule, forward, rows)

    def _forward(self, schedule: Schedule) -> Forward:
        shape = shape_of(schedule)
        is_decode = shape.num_prefills == 0 and shape.num_sampled == shape.num_logit_rows == shape.num_seqs
        staging = self._decode if is_decode else self._mixed
        if is_decode:
            shape = padded(shape, next(bucket for bucket in self._buckets if bucket >= shape.num_seqs))
        segments = segments_of(schedule)
        arrays, scratch = staging.begin(), self.num_blocks * self.block_size
        fill(arrays, schedule, shape, self.block_size, scratch, self._sampled_rows)
        fill_chunks(arrays, segments, shape)
        staging.commit(shape.num_seqs)
        if is_decode:
            logits = self._graphs.replay(shape.num_seqs, bool(segments))
            return Forward(staging, logits[: len(schedule.chunks)], logits)
        hidden = self._fused.forward(self._batch(staging, shape, bool(segments)), self.kv_cache)
        return Forward(staging, self._fused.logits(hidden[: shape.num_sampled]), hidden)

    def _batch(self, staging: Staging, shape: BatchShape, has_adapters: bool) -> DeviceBatch:
        """Views of the staged metadata; the tokens that the last step sampled are taken from where it left them."""
        on_device, tokens, seqs = staging.device, shape.num_tokens, shape.num_seqs
        sources = on_device["sources"][:tokens]
        token_ids = torch.where(sources < 0, on_device["token_ids"][:tokens], self._last_tokens[sources.clamp(min=0)])
        is_decode = staging is self._decode
        chunks = on_device["chunks"][: num_chunks(shape)]
        return DeviceBatch(
            token_ids=token_ids,
            positions=on_device["positions"][:tokens],
            kv_slots=on_device["kv_slots"][:tokens],
            block_tables=on_device["block_tables"][:seqs],
            seq_lens=on_device["seq_lens"][:seqs],
            query_starts=on_device["query_starts"][: shape.num_prefills + 1],
            num_decodes=seqs - shape.num_prefills,
            max_len=self.limits.max_model_len,
            logit_rows=None if is_decode else on_device["logit_rows"][: shape.num_logit_rows],
            chunks=Chunks(chunks, rows_per_chunk(tokens)) if has_adapters else None,
        )

    # ---- sampling

    def _sample(self, schedule: Schedule, forward: Forward, rows: Items[Row]) -> PendingStep:
        """The fast way: nothing is read back here."""
        if not rows:
            return Computed(StepResult([], [], [[] for _ in schedule.chunks]))
        parameters = sampling_rows(forward.staging.device, len(rows))
        filtered = any(row.is_filtered for row in rows)
        tokens = sampling.sample(forward.logits, parameters, filtered=filtered, out=self._last_tokens[: len(rows)])
        scores = _scores(forward.logits, tokens, rows)
        self._remember(schedule)
        self._turn = 1 - self._turn
        host, event = self._host_tokens[self._turn][: len(rows)], self._events[self._turn]
        host.copy_(tokens, non_blocking=True)
        event.record()
        return LaunchedStep(host, event, scores, len(schedule.chunks))

    def _read_at_once(self, schedule: Schedule, forward: Forward, rows: Items[Row]) -> PendingStep:
        """With penalties, bias, forbidden tokens or prompt logprobs: the sampler of `engine.sampler`."""
        token_ids, logprobs = sample(forward.logits.float(), rows) if rows else ([], [])
        # A row whose logits are not finite has no token; the step after it may be launched before its request fails.
        self._last_tokens[: len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64).clamp(min=0)
        self._remember(schedule)
        scores = self.prompt_logprobs(schedule.chunks, forward.hidden[len(rows) :])
        return Computed(StepResult(token_ids, logprobs, scores))

    def _remember(self, schedule: Schedule) -> None:
        sampling_sequences = [chunk.sequence for chunk in schedule.chunks if chunk.samples]
        self._sampled_rows = {id(sequence): row for row, sequence in enumerate(sampling_sequences)}

    # ---- warm-up

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run every kind of step once, so that all kernels are compiled, then capture the decode graphs."""
        started = time.monotonic()
        super().warm_up()
        for bucket in reversed(self._buckets):
            for has_adapters in (False, True):
                self._graphs.capture(bucket, has_adapters, partial(self._decode_logits, bucket, has_adapters))
        torch.cuda.synchronize(self.device)
        log.info("%d graphs captured after %.1f s", len(self._graphs), time.monotonic() - started)

    def _decode_logits(self, bucket: int, has_adapters: bool) -> Tensor:
        """A decode step on the staged metadata, `[bucket, vocab]`."""
        shape = BatchShape(bucket, bucket, 0, bucket, bucket)
        batch = self._batch(self._decode, shape, has_adapters)
        return self._fused.logits(self._fused.forward(batch, self.kv_cache))


def _scores(logits: Tensor, tokens: Tensor, rows: Items[Row]) -> Scores | None:
    wanted = tuple(i for i, row in enumerate(rows) if row.logprobs is not None)
    if not wanted:
        return None
    counts = tuple(rows[i].logprobs or 0 for i in wanted)
    some = torch.tensor(wanted, device=logits.device) if len(wanted) < len(rows) else None
    chosen = (logits, tokens) if some is None else (logits[some], tokens[some])
    return Scores(wanted, counts, sampling.token_logprobs(*chosen, max(counts)))


def _logprobs(ids: list[int], scores: Scores | None) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(ids)
    if scores is None:
        return result
    values = (t.tolist() for t in scores.values)
    for row, count, chosen, top_ids, top in zip(scores.rows, scores.counts, *values, strict=True):
        result[row] = TokenLogprobs(ids[row], chosen, tuple(zip(top_ids[:count], top[:count], strict=True)))
    return result

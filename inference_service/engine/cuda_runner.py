"""Computes steps on a GPU: decode batches replay captured graphs, mixed ones launch kernel by kernel. Where adapters
have more than the A and B of linears (`Arena.extras`), the plain form of the model runs.

Sampled tokens stay on the GPU: the next step can be launched before anybody has read them, and takes them from there.
Nothing waits for the GPU but `LaunchedStep.result`, and steps with adapters that add tokens to the vocabulary.
"""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from inference_service.engine.adjusted_rows import UNADJUSTED, AdjustedRow, AdjustedRows
from inference_service.engine.config import EngineConfig
from inference_service.engine.device_batch import (
    BatchShape,
    fill,
    fill_chunks,
    num_chunks,
    padded,
    plain_batch,
    sampling_rows,
    segments_of,
    shape_of,
    targets_of,
)
from inference_service.engine.device_scores import DeviceScores, Wanted, read
from inference_service.engine.graphs import DecodeGraphs, Kind, buckets_up_to, length_classes
from inference_service.engine.runner import ModelRunner, part_of
from inference_service.engine.sampler import Row, has_penalties, is_filtered, sample
from inference_service.engine.sequence import Sequence
from inference_service.engine.staging import Staging, decode_fields, mixed_fields
from inference_service.engine.step import NOT_FINITE, Computed, PendingStep, Schedule, StepResult
from inference_service.engine.warm_up import warm_up
from inference_service.lora.batch import LoraBatch
from inference_service.model.batch import DeviceBatch
from inference_service.model.fused import FusedDecoder
from inference_service.types import TokenLogprobs
from kernels import sampling
from kernels.lora import rows_per_chunk
from kernels.table import Chunks

SCORED_LOGIT_BYTES = 64 << 20  # of prompt logprobs' logits at a time


class Forward(NamedTuple):
    """A forward pass: its metadata, logits of the rows that sample, and hidden states of the rows after those.

    A graph gives no hidden states; it runs only where nobody needs them. `scored_lora`: of those rows, where adapters
    change what comes behind the last layer.
    """

    staging: Staging
    logits: Tensor
    scored: Tensor
    scored_lora: LoraBatch | None = None


class LaunchedStep:
    """A step on its way. `tokens`, `scores`: page-locked copies, valid after `event`."""

    def __init__(
        self, tokens: Tensor, scores: sampling.TopLogprobs | None, wanted: Wanted, event: torch.cuda.Event
    ) -> None:
        self._tokens, self._scores, self._wanted, self._event = tokens, scores, wanted, event

    def result(self) -> StepResult:
        """Wait until the GPU is there, and read."""
        self._event.synchronize()
        ids: list[int] = self._tokens.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(ids)
        prompts: list[list[TokenLogprobs]] = [[] for _ in self._wanted.prompts]
        if self._scores is not None:
            targets = [(token, num_top) for tokens, num_top in self._wanted.prompts for token in tokens]
            wanted = [(ids[row], num_top) for row, num_top in self._wanted.rows] + targets
            entries = iter(read(self._scores, *zip(*wanted, strict=True)))
            for (row, _), entry in zip(self._wanted.rows, entries, strict=False):
                logprobs[row] = None if ids[row] == NOT_FINITE else entry
            prompts = [[next(entries) for _ in tokens] for tokens, _ in self._wanted.prompts]
        return StepResult(ids, logprobs, prompts)


class CudaRunner(ModelRunner):
    """`ModelRunner` with fused kernels, CUDA graphs and steps launched ahead."""

    def __init__(self, config: EngineConfig, host: Tensor) -> None:
        super().__init__(config, host)
        self.looks_ahead = True
        limits, blocks = self.limits, -(-self.limits.max_model_len // self.block_size)
        self.fused = FusedDecoder(self.decoder, limits.max_model_len)
        seqs, tokens = limits.max_num_seqs, limits.max_batched_tokens
        self._decode = Staging(decode_fields(seqs, blocks), self.device)
        self._mixed = Staging(mixed_fields(tokens, seqs, blocks), self.device)
        self._adjusted = AdjustedRows(seqs, self.vocab_size, self.eos_ids, self.device)
        self._adjusted_logits = torch.zeros((seqs, self.vocab_size), dtype=torch.float32, device=self.device)
        self._scores = DeviceScores(seqs + tokens, self.device)
        self._last_tokens = torch.zeros(seqs, dtype=torch.int64, device=self.device)
        self._host_tokens = [torch.zeros(seqs, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0
        self._sampled_rows: dict[int, int] = {}  # of the last launched step: id of a sequence → row of `_last_tokens`
        self.buckets = buckets_up_to(seqs)
        self.length_classes = length_classes(limits.max_model_len)
        self._graphs = DecodeGraphs()

    # ---- one step

    @torch.inference_mode()
    def launch(self, schedule: Schedule) -> PendingStep:
        """See `Runner.launch`."""
        with self.device_errors():
            sampled = [chunk.sequence for chunk in schedule.chunks if chunk.samples]
            adjusted = self._adjusted.place(sampled)
            if not self._has_extras(schedule):
                return self._launch_sampling(schedule, sampled, adjusted, self._forward(schedule, adjusted))
            forward = self._forward_plain(schedule, adjusted)
            if any(chunk.sequence.request.spec.extra_vocab for chunk in schedule.chunks):
                return Computed(self._sample_wide(schedule, sampled, adjusted, forward))
            return self._launch_sampling(schedule, sampled, adjusted, forward)

    def _has_extras(self, schedule: Schedule) -> bool:
        """Whether a sequence's adapter has any, acting in this step or not."""
        extras = self.arena.extras
        return bool(extras) and any(chunk.sequence.slot in extras for chunk in schedule.chunks)

    def _forward(self, schedule: Schedule, adjusted: Items[AdjustedRow]) -> Forward:
        shape = shape_of(schedule)
        is_decode = shape.num_prefills == 0 and shape.num_sampled == shape.num_logit_rows == shape.num_seqs
        staging = self._decode if is_decode else self._mixed
        if is_decode:
            shape = padded(shape, next(bucket for bucket in self.buckets if bucket >= shape.num_seqs))
        has_adapters = self._stage(staging, schedule, shape, adjusted)
        kind = Kind(shape.num_seqs, self._max_len(schedule), has_adapters)
        if is_decode:
            logits = self._graphs.replay(kind)
            return Forward(staging, logits[: len(schedule.chunks)], logits[:0])
        hidden = self.fused.forward(self._batch(staging, shape, kind), self.kv_cache)
        return Forward(staging, self.fused.logits(hidden[: shape.num_sampled]), hidden[shape.num_sampled :])

    def _forward_plain(self, schedule: Schedule, adjusted: Items[AdjustedRow]) -> Forward:
        """The model's plain form on the staged step: no graph, no padding."""
        shape = shape_of(schedule)
        self._stage(self._mixed, schedule, shape, adjusted)
        batch = plain_batch(self._mixed.device, self._token_ids(self._mixed, shape), schedule, shape, self.arena.extras)
        hidden, count = self.decoder(batch, self.kv_cache), shape.num_sampled
        logits = self.decoder.logits(hidden[:count], part_of(batch.logit_lora, 0, count))
        return Forward(self._mixed, logits, hidden[count:], part_of(batch.logit_lora, count, hidden.shape[0]))

    def _stage(self, staging: Staging, schedule: Schedule, shape: BatchShape, adjusted: Items[AdjustedRow]) -> bool:
        """Put the step's metadata on the device; whether any row has an adapter."""
        segments = segments_of(schedule)
        arrays, scratch = staging.begin(), self.num_blocks * self.block_size
        fill(arrays, schedule, shape, self.block_size, scratch, self._sampled_rows, adjusted)
        fill_chunks(arrays, segments, shape)
        staging.commit(shape.num_seqs)
        return bool(segments)

    def _max_len(self, schedule: Schedule) -> int:
        """The class of the longest sequence that decodes."""
        longest = max((chunk.end for chunk in schedule.chunks[: schedule.num_decodes]), default=0)
        return next(bound for bound in self.length_classes if bound >= longest)

    def _token_ids(self, staging: Staging, shape: BatchShape) -> Tensor:
        """`[tokens]`; those that the last step sampled are taken from where it left them."""
        ids, sources = (staging.device[name][: shape.num_tokens] for name in ("token_ids", "sources"))
        return sampling.take_sampled(ids, sources, self._last_tokens)

    def _batch(self, staging: Staging, shape: BatchShape, kind: Kind) -> DeviceBatch:
        """Views of the staged metadata."""
        on_device, tokens, seqs = staging.device, shape.num_tokens, shape.num_seqs
        is_decode = staging is self._decode
        chunks = on_device["chunks"][: num_chunks(shape)]
        return DeviceBatch(
            token_ids=self._token_ids(staging, shape),
            positions=on_device["positions"][:tokens],
            kv_slots=on_device["kv_slots"][:tokens],
            block_tables=on_device["block_tables"][:seqs],
            seq_lens=on_device["seq_lens"][:seqs],
            query_starts=on_device["query_starts"][: shape.num_prefills + 1],
            num_decodes=seqs - shape.num_prefills,
            max_len=kind.max_len,
            logit_rows=None if is_decode else on_device["logit_rows"][: shape.num_logit_rows],
            chunks=Chunks(chunks, rows_per_chunk(tokens)) if kind.has_adapters else None,
        )

    # ---- sampling

    def _launch_sampling(
        self, schedule: Schedule, sampled: Items[Sequence], adjusted: Items[AdjustedRow], forward: Forward
    ) -> PendingStep:
        wanted = _wanted(schedule, sampled)
        if not (sampled or wanted.num_entries):
            return Computed(StepResult([], [], [[] for _ in schedule.chunks]))
        tokens = self._last_tokens[: len(sampled)]
        if sampled:
            self._choose(sampled, adjusted, forward, tokens)
            self._sampled_rows = {id(sequence): row for row, sequence in enumerate(sampled)}
        scores = self._launch_scores(wanted, forward, tokens) if wanted.num_entries else None
        self._turn = 1 - self._turn
        host, event = self._host_tokens[self._turn][: len(sampled)], self._events[self._turn]
        host.copy_(tokens, non_blocking=True)
        event.record()
        return LaunchedStep(host, scores, wanted, event)

    def _choose(self, sampled: Items[Sequence], adjusted: Items[AdjustedRow], forward: Forward, tokens: Tensor) -> None:
        """Sample into `tokens`; where all is plain, this is one kernel's choice over the logits."""
        on_device, count = forward.staging.device, len(sampled)
        logits, count_rows = forward.logits, on_device["count_rows"][:count]
        if any(row != UNADJUSTED for row in adjusted):
            tables = self._adjusted
            adjustments = sampling.Adjustments(
                repetition=on_device["repetition"][:count],
                presence=on_device["presence"][:count],
                frequency=on_device["frequency"][:count],
                count_rows=count_rows,
                token_counts=tables.token_counts,
                bias_rows=on_device["bias_rows"][:count],
                bias_ids=tables.bias_ids,
                bias_values=tables.bias_values,
            )
            logits = sampling.adjust(logits, adjustments, self._adjusted_logits[:count])
        filtered = any(is_filtered(sequence.request.spec.sampling) for sequence in sampled)
        sampling.sample(logits, sampling_rows(on_device, count), filtered=filtered, out=tokens)
        if any(row.count_row >= 0 for row in adjusted):
            sampling.count_tokens(self._adjusted.token_counts, count_rows, tokens)

    def _launch_scores(self, wanted: Wanted, forward: Forward, tokens: Tensor) -> sampling.TopLogprobs:
        """Logprobs of sampled tokens, and of prompt tokens in pieces whose logits are bounded."""
        num_rows, num_top = len(wanted.rows), wanted.num_top
        if num_rows:
            logits, chosen = forward.logits, tokens
            if num_rows < tokens.shape[0]:
                rows = forward.staging.device["scored_rows"][:num_rows]
                logits, chosen = logits.index_select(0, rows), tokens.index_select(0, rows)
            self._scores.compute(0, logits, chosen, num_top)
        piece = max(SCORED_LOGIT_BYTES // (self.vocab_size * self.dtype.itemsize), 1)
        for start in range(0, forward.scored.shape[0], piece):
            hidden = forward.scored[start : start + piece]
            targets = forward.staging.device["targets"][start : start + hidden.shape[0]]
            self._scores.compute(num_rows + start, self._scored_logits(forward, start, hidden), targets, num_top)
        return self._scores.copy_out(wanted.num_entries, num_top)

    def _scored_logits(self, forward: Forward, start: int, hidden: Tensor) -> Tensor:
        """Of `hidden`, the scored rows from `start` on."""
        lora = part_of(forward.scored_lora, start, start + hidden.shape[0])
        return self.fused.logits(hidden) if lora is None else self.decoder.logits(hidden, lora)

    def _sample_wide(
        self, schedule: Schedule, sampled: Items[Sequence], adjusted: Items[AdjustedRow], forward: Forward
    ) -> StepResult:
        """A step with adapters that add tokens: sampled by the plain sampler, since the tables of counts and biases are
        as wide as the base model's vocabulary. Waits for the step before, whose tokens it reads."""
        unread, count = self._last_tokens.tolist(), len(sampled)
        ids, logprobs = (
            sample(forward.logits, [self._row_with(unread, each) for each in sampled]) if sampled else ([], [])
        )
        if sampled:
            tokens = self._last_tokens[:count]
            tokens.copy_(torch.tensor(ids, dtype=torch.int64))
            if any(row.count_row >= 0 for row in adjusted):
                count_rows = forward.staging.device["count_rows"][:count]
                sampling.count_tokens(self._adjusted.token_counts, count_rows, tokens)
            self._sampled_rows = {id(sequence): row for row, sequence in enumerate(sampled)}
        return StepResult(ids, logprobs, self.prompt_logprobs(schedule.chunks, forward.scored, forward.scored_lora))

    def _row_with(self, unread: list[int], sequence: Sequence) -> Row:
        """As `row_of`, with the token that the last step sampled and nobody has read yet."""
        row = self.row_of(sequence)
        if sequence.num_output == sequence.position or not has_penalties(row.sampling):
            return row
        return replace(row, output_ids=[*row.output_ids, unread[self._sampled_rows[id(sequence)]]])

    # ---- warm-up

    @torch.inference_mode()
    def warm_up(self) -> None:
        """See `engine.warm_up`."""
        warm_up(self)

    def run_layers(self, schedule: Schedule, num_layers: int) -> None:
        """The first layers of a step that samples nothing, kernel by kernel."""
        shape = shape_of(schedule)
        has_adapters = self._stage(self._mixed, schedule, shape, [])
        kind = Kind(shape.num_seqs, self._max_len(schedule), has_adapters)
        self.fused.forward(self._batch(self._mixed, shape, kind), self.kv_cache, num_layers)

    def capture_graphs(self) -> int:
        """Capture a graph of every kind; how many."""
        for kind in map(Kind._make, product(reversed(self.buckets), self.length_classes, (False, True))):
            self._graphs.capture(kind, partial(self.decode_logits, kind))
        return len(self._graphs)

    def decode_logits(self, kind: Kind) -> Tensor:
        """A decode step on the staged metadata, `[bucket, vocab]`: what a graph of its kind replays."""
        shape = BatchShape(kind.bucket, kind.bucket, 0, kind.bucket, kind.bucket)
        return self.fused.logits(self.fused.forward(self._batch(self._decode, shape, kind), self.kv_cache))


def _wanted(schedule: Schedule, sampled: Items[Sequence]) -> Wanted:
    specs = [sequence.request.spec for sequence in sampled]
    rows = tuple((row, spec.logprobs) for row, spec in enumerate(specs) if spec.logprobs is not None)
    prompts = tuple((targets_of(chunk), chunk.sequence.request.spec.prompt_logprobs or 0) for chunk in schedule.chunks)
    return Wanted(rows, prompts)

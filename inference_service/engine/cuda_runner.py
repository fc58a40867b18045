"""Computes steps on a GPU: they replay captured graphs, but for large ones and those of many prompts or with gains and
offsets beside prefill (`step_kinds`), which launch kernel by kernel. Where adapters have more than A and B, gains and
offsets of linears (`Arena.extras`), the plain form of the model runs.

Sampled tokens stay on the GPU: the next step can be launched before anybody has read them, and takes them from there.
Nothing waits for the GPU but `LaunchedStep.result`, and steps with adapters that add tokens to the vocabulary.
"""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

from collections.abc import Mapping
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
    fill_nothing,
    num_chunks,
    plain_batch,
    sampling_rows,
    segments_of,
    shape_of,
    targets_of,
)
from inference_service.engine.device_scores import DeviceScores, Wanted
from inference_service.engine.graphs import StepGraphs
from inference_service.engine.launched_step import LaunchedStep
from inference_service.engine.runner import ModelRunner, part_of
from inference_service.engine.sampler import Row, has_penalties, is_filtered, sample
from inference_service.engine.sequence import Sequence
from inference_service.engine.staging import Staging, decode_fields, mixed_fields
from inference_service.engine.step import Computed, PendingStep, Schedule, StepResult
from inference_service.engine.step_kinds import Kind, StepKinds
from inference_service.engine.warm_up import warm_up
from inference_service.lora.batch import LoraBatch
from inference_service.model.batch import DeviceBatch
from inference_service.model.fused import FusedDecoder
from inference_service.types import MAX_LOGPROBS
from kernels import sampling
from kernels.lora import rows_per_chunk
from kernels.table import Chunks, Segment

SCORED_LOGIT_BYTES = 64 << 20  # of prompt logprobs' logits at a time


class Forward(NamedTuple):
    """A forward pass: its metadata, logits of the rows that sample, and hidden states of the rows after those.

    `scored_lora`: of those rows, where adapters change what comes behind the last layer.
    """

    staging: Staging
    logits: Tensor
    scored: Tensor
    scored_lora: LoraBatch | None = None


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
        self._token_ids = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        self._last_tokens = torch.zeros(seqs, dtype=torch.int64, device=self.device)
        self._host_tokens = [torch.zeros(seqs, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0
        self._sampled_rows: dict[int, int] = {}  # of the last launched step: id of a sequence → row of `_last_tokens`
        self.kinds = StepKinds(seqs, tokens, limits.max_model_len)
        self.graphs = StepGraphs()
        # Where captured steps leave what they give.
        hidden = self.model_config.hidden_size
        self._logits = torch.zeros((seqs, self.vocab_size), dtype=self.dtype, device=self.device)
        self._hidden = torch.zeros((self.kinds.most_captured(), hidden), dtype=self.dtype, device=self.device)

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
        """Whether a sequence's adapter has any that the kernels do not know, acting in this step or not."""
        extras = self.arena.extras
        slots = {chunk.sequence.slot for chunk in schedule.chunks} if extras else set()
        return any(slot in extras and not extras[slot].is_affine for slot in slots)

    def _forward(self, schedule: Schedule, adjusted: Items[AdjustedRow]) -> Forward:
        shape, runs = shape_of(schedule), segments_of(schedule)
        kind = self._kind_of(schedule, shape, runs)
        staging = self._stage(schedule, kind, runs, adjusted)
        out = self.graphs.replay(kind) if kind in self.graphs else self.compute(kind)
        if kind.is_decode:
            return Forward(staging, out[: shape.num_sampled], out[:0])
        hidden = out.index_select(0, staging.device["logit_rows"][: shape.num_logit_rows])
        return Forward(staging, self.fused.logits(hidden[: shape.num_sampled]), hidden[shape.num_sampled :])

    def _forward_plain(self, schedule: Schedule, adjusted: Items[AdjustedRow]) -> Forward:
        """The model's plain form on the staged step: no graph, no padding."""
        shape = shape_of(schedule)
        kind = self.kinds.exact(shape.num_tokens, schedule.num_decodes, shape.num_prefills, 0)
        staging = self._stage(schedule, kind, segments_of(schedule), adjusted)
        token_ids = self._take_tokens(staging, shape.num_tokens)
        batch = plain_batch(staging.device, token_ids, schedule, shape, self.arena.extras)
        hidden, count = self.decoder(batch, self.kv_cache), shape.num_sampled
        logits = self.decoder.logits(hidden[:count], part_of(batch.logit_lora, 0, count))
        return Forward(staging, logits, hidden[count:], part_of(batch.logit_lora, count, hidden.shape[0]))

    def _kind_of(self, schedule: Schedule, shape: BatchShape, runs: Items[Segment]) -> Kind:
        max_rank = max((self.arena.ranks[run.slot] for run in runs), default=0)
        has_affine = any(run.slot in self.arena.extras for run in runs)
        if shape.num_prefills == 0 and shape.num_sampled == shape.num_logit_rows == shape.num_seqs:
            longest = max(chunk.end for chunk in schedule.chunks)
            return self.kinds.decode(shape.num_seqs, longest, max_rank, has_affine)
        return self.kinds.mixed(shape.num_tokens, schedule.num_decodes, shape.num_prefills, max_rank, has_affine)

    def _stage(self, schedule: Schedule, kind: Kind, runs: Items[Segment], adjusted: Items[AdjustedRow]) -> Staging:
        """Put the step's metadata on the device."""
        staging = self._staging(kind)
        arrays, scratch = staging.begin(), self.num_blocks * self.block_size
        fill(arrays, schedule, kind, self.block_size, scratch, self._sampled_rows, adjusted)
        if kind.max_rank:
            fill_chunks(arrays, runs, kind)
        staging.commit(len(schedule.chunks))
        return staging

    def _staging(self, kind: Kind) -> Staging:
        return self._decode if kind.is_decode else self._mixed

    def _take_tokens(self, staging: Staging, num_tokens: int) -> Tensor:
        """`[tokens]`; those that the last step sampled are taken from where it left them."""
        ids, sources = (staging.device[name][:num_tokens] for name in ("token_ids", "sources"))
        return sampling.take_sampled(ids, sources, self._last_tokens, self._token_ids[:num_tokens])

    def compute(self, kind: Kind, num_layers: int | None = None) -> Tensor:
        """A step on the staged metadata: logits `[rows, vocab]` where all rows decode, else hidden states
        `[rows, hidden]`. They hold until the next step.

        `num_layers`: only the first ones, to warm up.
        """
        batch = self._batch(kind)
        if kind.is_decode:
            hidden = self.fused.forward(batch, self.kv_cache, num_layers)
            return self.fused.logits(hidden, self._logits[: kind.num_tokens])
        out = self._hidden[: kind.num_tokens] if kind.num_tokens <= self._hidden.shape[0] else None
        return self.fused.forward(batch, self.kv_cache, num_layers, out)

    def _batch(self, kind: Kind) -> DeviceBatch:
        """Views of the staged metadata."""
        staging, tokens = self._staging(kind), kind.num_tokens
        on_device = staging.device
        chunks = on_device["chunks"][: num_chunks(kind)]
        return DeviceBatch(
            token_ids=self._take_tokens(staging, tokens),
            positions=on_device["positions"][:tokens],
            kv_slots=on_device["kv_slots"][:tokens],
            block_tables=on_device["block_tables"],
            seq_lens=on_device["seq_lens"],
            decode_lens=on_device["decode_lens"][: kind.max_decodes],
            query_starts=None if kind.is_decode else on_device["query_starts"][: kind.max_prefills + 1],
            max_len=kind.max_len,
            chunks=Chunks(chunks, rows_per_chunk(tokens), kind.max_rank, kind.has_affine) if kind.max_rank else None,
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
        on_device, count, logits = forward.staging.device, len(sampled), forward.logits
        adjustments = self._adjustments(on_device, count)
        if any(row != UNADJUSTED for row in adjusted):
            logits = sampling.adjust(logits, adjustments, self._adjusted_logits[:count])
        filtered = any(is_filtered(sequence.request.spec.sampling) for sequence in sampled)
        sampling.sample(logits, sampling_rows(on_device, count), filtered=filtered, out=tokens)
        if any(row.count_row >= 0 for row in adjusted):
            sampling.count_tokens(adjustments.token_counts, adjustments.count_rows, tokens)

    def _adjustments(self, on_device: Mapping[str, Tensor], count: int) -> sampling.Adjustments:
        """Of the first `count` staged rows."""
        tables = self._adjusted
        return sampling.Adjustments(
            repetition=on_device["repetition"][:count],
            presence=on_device["presence"][:count],
            frequency=on_device["frequency"][:count],
            count_rows=on_device["count_rows"][:count],
            token_counts=tables.token_counts,
            bias_rows=on_device["bias_rows"][:count],
            bias_ids=tables.bias_ids,
            bias_values=tables.bias_values,
        )

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

    def stage_nothing(self) -> None:
        """Steps of any kind compute only padding until the next one is staged."""
        for staging in (self._decode, self._mixed):
            fill_nothing(staging.begin())
            staging.commit()

    def sample_padding(self) -> None:
        """Launch every kernel of sampling in every form, over rows that nobody reads."""
        on_device, count = self._decode.device, self._last_tokens.shape[0]
        rows, adjustments = sampling_rows(on_device, count), self._adjustments(on_device, count)
        adjusted = sampling.adjust(self._logits, adjustments, self._adjusted_logits)
        for logits, filtered in product((self._logits, adjusted), (False, True)):
            sampling.sample(logits, rows, filtered=filtered, out=self._last_tokens)
        sampling.count_tokens(adjustments.token_counts, adjustments.count_rows, self._last_tokens)
        self._scores.compute(0, self._logits, self._last_tokens, MAX_LOGPROBS)

    def capture_graphs(self) -> None:
        """Capture a graph of every kind there is one for. Their kernels are compiled."""
        for kind in self.kinds.captured():
            self.graphs.capture(kind, partial(self.compute, kind))


def _wanted(schedule: Schedule, sampled: Items[Sequence]) -> Wanted:
    specs = [sequence.request.spec for sequence in sampled]
    rows = tuple((row, spec.logprobs) for row, spec in enumerate(specs) if spec.logprobs is not None)
    prompts = tuple((targets_of(chunk), chunk.sequence.request.spec.prompt_logprobs or 0) for chunk in schedule.chunks)
    return Wanted(rows, prompts)

"""From a schedule to the staged arrays of one step, with numpy."""

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inference_service.engine.adjusted_rows import AdjustedRow
from inference_service.engine.batch import logit_lora, logit_rows
from inference_service.engine.sampler import GREEDY_BELOW
from inference_service.engine.step import Chunk, Schedule, adapter_runs
from inference_service.engine.step_kinds import Kind
from inference_service.lora.batch import LoraBatch, segments
from inference_service.model.batch import ForwardBatch
from kernels.lora import rows_per_chunk
from kernels.sampling import SamplingRows
from kernels.table import Segment, chunk_list, max_chunks

SIGNED = 1 << 63


class BatchShape(NamedTuple):
    """Sizes of one step's batch, without padding."""

    num_tokens: int
    num_seqs: int
    num_prefills: int
    num_sampled: int
    num_logit_rows: int


def shape_of(schedule: Schedule) -> BatchShape:
    """Of what is to be computed."""
    chunks = schedule.chunks
    sampled = sum(chunk.samples for chunk in chunks)
    scored = sum(len(chunk.scored_positions) for chunk in chunks)
    tokens = sum(chunk.length for chunk in chunks)
    return BatchShape(tokens, len(chunks), len(chunks) - schedule.num_decodes, sampled, sampled + scored)


def segments_of(schedule: Schedule) -> tuple[Segment, ...]:
    """Runs of rows of one adapter."""
    return segments(*adapter_runs(schedule.chunks))


def fill(
    arrays: Mapping[str, npt.NDArray[Any]],
    schedule: Schedule,
    kind: Kind,
    block_size: int,
    scratch_slot: int,
    sampled_rows: Mapping[int, int],
    adjusted: Sequence[AdjustedRow],
) -> None:
    """Write one step into `arrays` (`staging.fields`), padded to its kind.

    Args:
        arrays: The host's arrays.
        schedule: What to compute.
        kind: Of the batch on the device.
        block_size: Tokens of a KV block.
        scratch_slot: Where a recomputed cached token writes its keys and values.
        sampled_rows: Rows of the last step's samples, by id of the sequence: tokens that nobody has read yet.
        adjusted: For every chunk that samples, in order.
    """
    chunks = schedule.chunks
    lengths = np.fromiter((chunk.length for chunk in chunks), np.int64, len(chunks))
    starts = np.concatenate(([0], np.cumsum(lengths)))
    _fill_tokens(arrays, chunks, sampled_rows)
    positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
    num_tokens = positions.size
    arrays["positions"][:num_tokens] = positions
    tables = arrays["block_tables"]
    for row, chunk in zip(tables, chunks, strict=False):
        row[: len(chunk.sequence.blocks)] = chunk.sequence.blocks
    sequence_of = np.repeat(np.arange(len(chunks)), lengths)
    slots = tables[sequence_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
    slots[positions < np.repeat([chunk.sequence.num_cached for chunk in chunks], lengths)] = scratch_slot
    arrays["kv_slots"][:num_tokens] = slots
    arrays["seq_lens"][: len(chunks)] = [chunk.end for chunk in chunks]
    decodes = schedule.num_decodes
    arrays["decode_lens"][:decodes] = arrays["seq_lens"][:decodes]
    arrays["decode_lens"][decodes : kind.max_decodes] = -1
    prefill_starts = starts[decodes:]
    arrays["query_starts"][: prefill_starts.size] = prefill_starts
    arrays["query_starts"][prefill_starts.size : kind.max_prefills + 1] = num_tokens
    rows = logit_rows(chunks, starts)
    arrays["logit_rows"][: rows.size] = rows
    targets = [token for chunk in chunks for token in targets_of(chunk)]
    if targets:
        arrays["targets"][: len(targets)] = targets
    sampled = [chunk for chunk in chunks if chunk.samples]
    _fill_sampling(arrays, sampled)
    _fill_adjustments(arrays, sampled, adjusted)
    _pad(arrays, num_tokens, kind)


def fill_nothing(arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write a step in which all is padding, whatever its kind."""
    for array in arrays.values():
        array.fill(0)
    for name in ("sources", "kv_slots", "decode_lens", "count_rows", "bias_rows"):
        arrays[name].fill(-1)
    arrays["chunks"][:, 0] = -1


def fill_chunks(arrays: Mapping[str, npt.NDArray[Any]], runs: Sequence[Segment], kind: Kind) -> None:
    """Write the adapters' work list: which rows each takes."""
    bound = num_chunks(kind)
    arrays["chunks"][:bound] = chunk_list(runs, rows_per_chunk(kind.num_tokens), bound, kind.num_tokens)


def num_chunks(kind: Kind) -> int:
    """Length of the adapters' work list. A chunk of a prompt has two runs of rows where its adapter starts to act."""
    return max_chunks(kind.num_tokens, kind.max_decodes + 2 * kind.max_prefills, rows_per_chunk(kind.num_tokens))


def plain_batch(
    on_device: Mapping[str, Tensor], token_ids: Tensor, schedule: Schedule, shape: BatchShape, extras: Container[int]
) -> ForwardBatch:
    """The staged step, without padding, for the plain form of the model: as `batch.gather` makes it.

    Args:
        on_device: What `fill` wrote.
        token_ids: `[tokens]`, those that the last step sampled included.
        schedule: What to compute.
        shape: Of the schedule.
        extras: Slots of adapters with more than the A and B of linears.
    """
    chunks, tokens, seqs = schedule.chunks, shape.num_tokens, shape.num_seqs
    starts = np.concatenate(([0], np.cumsum([chunk.length for chunk in chunks])))
    rows = logit_rows(chunks, starts)
    cpu = torch.device("cpu")  # no work list: such a step runs PyTorch's products
    lora = LoraBatch.build(*adapter_runs(chunks), cpu, extras)
    longest = max(len(chunk.sequence.blocks) for chunk in chunks)
    return ForwardBatch(
        token_ids=token_ids,
        positions=on_device["positions"][:tokens].long(),
        kv_slots=on_device["kv_slots"][:tokens],
        query_starts=tuple(starts.tolist()),
        context_lens=tuple(chunk.end for chunk in chunks),
        block_tables=on_device["block_tables"][:seqs, :longest],
        num_decodes=schedule.num_decodes,
        logit_rows=on_device["logit_rows"][: shape.num_logit_rows],
        lora=lora,
        logit_lora=logit_lora(lora, rows, tokens, extras),
    )


def targets_of(chunk: Chunk) -> list[int]:
    """The prompt tokens that the chunk's scored positions predict."""
    scored = chunk.scored_positions
    return chunk.sequence.token_ids[scored.start + 1 : scored.stop + 1] if scored else []


def sampling_rows(on_device: Mapping[str, Tensor], count: int) -> SamplingRows:
    """The first `count` rows' sampling parameters on the device."""
    return SamplingRows(*(on_device[name][:count] for name in SamplingRows._fields))


def _fill_tokens(
    arrays: Mapping[str, npt.NDArray[Any]], chunks: Sequence[Chunk], sampled_rows: Mapping[int, int]
) -> None:
    """Token ids; where the last token has not been read yet, the row that holds it."""
    token_ids, sources = arrays["token_ids"], arrays["sources"]
    row = 0
    for chunk in chunks:
        sequence, end = chunk.sequence, row + chunk.length
        known = sequence.token_ids[chunk.start : chunk.end]
        token_ids[row : row + len(known)] = known
        sources[row:end] = -1
        if len(known) < chunk.length:
            token_ids[end - 1] = 0
            sources[end - 1] = sampled_rows[id(sequence)]
        row = end


def _fill_sampling(arrays: Mapping[str, npt.NDArray[Any]], chunks: Sequence[Chunk]) -> None:
    for row, chunk in enumerate(chunks):
        s = chunk.sequence.request.spec.sampling
        arrays["temperature"][row] = s.temperature if s.temperature >= GREEDY_BELOW else 0.0
        arrays["top_k"][row], arrays["top_p"][row], arrays["min_p"][row] = s.top_k, s.top_p, s.min_p
        arrays["seed"][row] = (s.seed + SIGNED) % (1 << 64) - SIGNED
        arrays["sample_index"][row], arrays["position"][row] = chunk.sequence.index, chunk.sequence.position


def _fill_adjustments(
    arrays: Mapping[str, npt.NDArray[Any]], chunks: Sequence[Chunk], adjusted: Sequence[AdjustedRow]
) -> None:
    scored = [row for row, chunk in enumerate(chunks) if chunk.sequence.request.spec.logprobs is not None]
    arrays["scored_rows"][: len(scored)] = scored
    for row, (chunk, (count_row, bias_row)) in enumerate(zip(chunks, adjusted, strict=True)):
        s = chunk.sequence.request.spec.sampling
        arrays["repetition"][row], arrays["presence"][row] = s.repetition_penalty, s.presence_penalty
        arrays["frequency"][row] = s.frequency_penalty
        arrays["count_rows"][row], arrays["bias_rows"][row] = count_row, bias_row


def _pad(arrays: Mapping[str, npt.NDArray[Any]], num_tokens: int, kind: Kind) -> None:
    """Rows behind the batch compute nothing that anyone reads, and store nothing."""
    padding = slice(num_tokens, kind.num_tokens)
    arrays["token_ids"][padding], arrays["sources"][padding] = 0, -1
    arrays["kv_slots"][padding], arrays["positions"][padding] = -1, 0

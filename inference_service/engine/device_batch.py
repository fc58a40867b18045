"""From a schedule to the staged arrays of one step, with numpy."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from inference_service.engine.batch import logit_rows
from inference_service.engine.sampler import GREEDY_BELOW
from inference_service.engine.step import Chunk, Schedule
from inference_service.lora.batch import segments
from kernels.lora import rows_per_chunk
from kernels.sampling import SamplingRows
from kernels.table import Segment, chunk_list, max_chunks

SIGNED = 1 << 63


class BatchShape(NamedTuple):
    """Sizes of one step's batch, padding included."""

    num_tokens: int
    num_seqs: int
    num_prefills: int
    num_sampled: int
    num_logit_rows: int


def shape_of(schedule: Schedule) -> BatchShape:
    """Without padding."""
    chunks = schedule.chunks
    sampled = sum(chunk.samples for chunk in chunks)
    scored = sum(len(chunk.scored_positions) for chunk in chunks)
    tokens = sum(chunk.length for chunk in chunks)
    return BatchShape(tokens, len(chunks), len(chunks) - schedule.num_decodes, sampled, sampled + scored)


def padded(shape: BatchShape, bucket: int) -> BatchShape:
    """A batch of decodes with rows that compute nothing, up to a captured size."""
    return shape._replace(num_tokens=bucket, num_seqs=bucket)


def segments_of(schedule: Schedule) -> tuple[Segment, ...]:
    """Runs of rows of one adapter."""
    chunks = schedule.chunks
    return segments([chunk.sequence.slot for chunk in chunks], [chunk.length for chunk in chunks])


def fill(
    arrays: Mapping[str, npt.NDArray[Any]],
    schedule: Schedule,
    shape: BatchShape,
    block_size: int,
    scratch_slot: int,
    sampled_rows: Mapping[int, int],
) -> None:
    """Write one step into `arrays` (`staging.fields`). Decode batches are padded to `shape`.

    Args:
        arrays: The host's arrays.
        schedule: What to compute.
        shape: Of the batch on the device.
        block_size: Tokens of a KV block.
        scratch_slot: Where a recomputed cached token writes its keys and values.
        sampled_rows: Rows of the last step's samples, by id of the sequence: tokens that nobody has read yet.
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
    arrays["query_starts"][: len(chunks) - decodes + 1] = starts[decodes:] - starts[decodes]
    rows = logit_rows(chunks, starts)
    arrays["logit_rows"][: rows.size] = rows
    _fill_sampling(arrays, [chunk for chunk in chunks if chunk.samples])
    _pad(arrays, num_tokens, shape)


def fill_chunks(arrays: Mapping[str, npt.NDArray[Any]], runs: Sequence[Segment], shape: BatchShape) -> None:
    """Write the adapters' work list: which rows each takes."""
    size = rows_per_chunk(shape.num_tokens)
    bound = num_chunks(shape)
    arrays["chunks"][:bound] = chunk_list(runs, size, bound, shape.num_tokens)


def num_chunks(shape: BatchShape) -> int:
    """Length of the adapters' work list, which depends on the batch's sizes alone."""
    return max_chunks(shape.num_tokens, shape.num_seqs, rows_per_chunk(shape.num_tokens))


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


def _pad(arrays: Mapping[str, npt.NDArray[Any]], num_tokens: int, shape: BatchShape) -> None:
    """Rows behind the batch compute nothing that anyone reads, and store nothing."""
    padding = slice(num_tokens, shape.num_tokens)
    arrays["token_ids"][padding], arrays["sources"][padding] = 0, -1
    arrays["kv_slots"][padding], arrays["positions"][padding] = -1, 0
    if shape.num_prefills == 0:
        arrays["seq_lens"][padding] = 0

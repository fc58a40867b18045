"""One step's tensors, gathered fresh from the sequences."""

from collections.abc import Container
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch

from inference_service.engine.step import Chunk, Schedule, adapter_runs
from inference_service.lora.batch import LoraBatch
from inference_service.model.batch import ForwardBatch


def gather(
    schedule: Schedule, block_size: int, scratch_slot: int, device: torch.device, extras: Container[int] = ()
) -> ForwardBatch:
    """The forward pass of `schedule`, in the order of its chunks. Shapes and dtypes are `ForwardBatch`'s.

    `extras`: slots of adapters with more than the A and B of linears.

    Cached blocks are others' too: a token that is recomputed only for its logits writes to `scratch_slot` instead.

    `logit_rows`: first the last row of every chunk that samples, then the rows of the chunks' `scored_positions`.
    """
    chunks = schedule.chunks
    lengths = [chunk.length for chunk in chunks]
    starts = np.concatenate(([0], np.cumsum(lengths))) if chunks else np.zeros(1, np.int64)
    positions = np.concatenate([np.arange(c.start, c.start + c.length) for c in chunks])
    tables = block_tables(chunks)
    sequence_of = np.repeat(np.arange(len(chunks)), lengths)
    kv_slots = tables[sequence_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
    num_cached = np.repeat([chunk.sequence.num_cached for chunk in chunks], lengths)
    kv_slots[positions < num_cached] = scratch_slot
    tokens = [t for c in chunks for t in c.sequence.token_ids[c.start : c.start + c.length]]
    rows = logit_rows(chunks, starts)
    lora = LoraBatch.build(*adapter_runs(chunks), device, extras)
    return ForwardBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int64).to(device, non_blocking=True),
        positions=torch.from_numpy(positions).to(device, non_blocking=True),
        kv_slots=torch.from_numpy(kv_slots).to(device, non_blocking=True),
        query_starts=tuple(starts.tolist()),
        context_lens=tuple(chunk.start + chunk.length for chunk in chunks),
        block_tables=torch.from_numpy(tables).to(device, non_blocking=True),
        num_decodes=schedule.num_decodes,
        logit_rows=torch.from_numpy(rows).to(device, non_blocking=True),
        lora=lora,
        logit_lora=logit_lora(lora, rows, positions.size, extras),
    )


def block_tables(chunks: Items[Chunk]) -> npt.NDArray[np.int32]:
    """`[chunks, longest]` int32, padded with 0; each row only as far as this step reaches."""
    tables = np.zeros((len(chunks), max(len(chunk.sequence.blocks) for chunk in chunks)), np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.sequence.blocks)] = chunk.sequence.blocks
    return tables


def logit_lora(
    lora: LoraBatch | None, rows: npt.NDArray[np.int64], num_tokens: int, extras: Container[int]
) -> LoraBatch | None:
    """`lora`, of `num_tokens` token rows, for the token rows `rows`; None where none of its adapters has extras."""
    if lora is None or not lora.rich:
        return None
    slots = np.full(num_tokens, -1, np.int64)
    for slot, start, end in lora.segments:
        slots[start:end] = slot
    return LoraBatch.build(slots[rows].tolist(), [1] * rows.size, torch.device("cpu"), extras)


def logit_rows(chunks: Items[Chunk], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Token rows that need logits, int64: those that sample, then those of prompt logprobs."""
    sampling = [int(starts[i + 1]) - 1 for i, chunk in enumerate(chunks) if chunk.samples]
    scoring = [
        int(starts[i]) + position - chunk.start for i, chunk in enumerate(chunks) for position in chunk.scored_positions
    ]
    return np.array(sampling + scoring, np.int64)

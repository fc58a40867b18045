"""A step's metadata on its way to the GPU: filled in page-locked memory, copied in one piece, read through views.

The device buffer never moves, so that captured graphs can read it. Host buffers take turns: one is written again only
after the copy out of it has ended.
"""

# torch.cuda is untyped in torch.
# mypy: disable-error-code="no-untyped-call"

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 16
NUM_HOST_BUFFERS = 3


class Field(NamedTuple):
    """One array of the metadata."""

    name: str
    dtype: type[np.generic]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


def decode_fields(num_seqs: int, max_blocks: int) -> tuple[Field, ...]:
    """All arrays for batches of single tokens up to this size."""
    return _fields(num_seqs, num_seqs, num_seqs, max_blocks)


def mixed_fields(num_tokens: int, num_seqs: int, max_blocks: int) -> tuple[Field, ...]:
    """All arrays for batches up to these sizes, with the prompt's next tokens where their logprobs are wanted."""
    targets = Field("targets", np.int64, (num_tokens,))
    return (targets, *_fields(num_tokens, num_seqs, num_tokens, max_blocks))


def _fields(num_tokens: int, num_seqs: int, num_chunks: int, max_blocks: int) -> tuple[Field, ...]:
    """Block tables come last: only the rows in use are copied."""
    return (
        Field("token_ids", np.int64, (num_tokens,)),
        Field("sources", np.int64, (num_tokens,)),  # row of the last step's samples that holds the token, or -1
        Field("kv_slots", np.int64, (num_tokens,)),
        Field("positions", np.int32, (num_tokens,)),
        Field("seq_lens", np.int32, (num_seqs,)),
        Field("decode_lens", np.int32, (num_seqs,)),
        Field("query_starts", np.int32, (num_seqs + 1,)),
        Field("logit_rows", np.int64, (num_tokens,)),
        Field("chunks", np.int32, (num_chunks, 4)),
        Field("temperature", np.float32, (num_seqs,)),
        Field("top_k", np.int32, (num_seqs,)),
        Field("top_p", np.float32, (num_seqs,)),
        Field("min_p", np.float32, (num_seqs,)),
        Field("seed", np.int64, (num_seqs,)),
        Field("sample_index", np.int64, (num_seqs,)),
        Field("position", np.int64, (num_seqs,)),
        Field("scored_rows", np.int64, (num_seqs,)),  # of the sampled rows, those whose logprobs are wanted
        Field("repetition", np.float32, (num_seqs,)),
        Field("presence", np.float32, (num_seqs,)),
        Field("frequency", np.float32, (num_seqs,)),
        Field("count_rows", np.int32, (num_seqs,)),
        Field("bias_rows", np.int32, (num_seqs,)),
        Field("block_tables", np.int32, (num_seqs, max_blocks)),
    )


class Staging:
    """Metadata of one kind of batch.

    Args:
        layout: The arrays, in order.
        device: The GPU.

    Attributes:
        device: Every array on the GPU, by name.
    """

    def __init__(self, layout: tuple[Field, ...], device: torch.device) -> None:
        self._layout = layout
        nbytes = sum(field.nbytes for field in layout)
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._host = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_HOST_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(NUM_HOST_BUFFERS)]
        self._arrays = [self._views(buffer.numpy()) for buffer in self._host]
        self._turn = 0
        self.device: dict[str, Tensor] = {}
        offset = 0
        for field in layout:
            dtype = torch.from_numpy(np.empty(0, field.dtype)).dtype
            size = int(np.prod(field.shape)) * dtype.itemsize
            self.device[field.name] = self._buffer[offset : offset + size].view(dtype).view(field.shape)
            offset += field.nbytes

    def begin(self) -> dict[str, npt.NDArray[Any]]:
        """The host's arrays for the next step, to be filled before `commit`."""
        self._turn = (self._turn + 1) % NUM_HOST_BUFFERS
        self._copied[self._turn].synchronize()
        return self._arrays[self._turn]

    def commit(self, num_rows: int | None = None) -> None:
        """Copy everything, but of the last array the first `num_rows` rows, on the current stream."""
        last = self._layout[-1]
        used = sum(field.nbytes for field in self._layout[:-1])
        rows = last.shape[0] if num_rows is None else num_rows
        used += rows * int(np.prod(last.shape[1:])) * np.dtype(last.dtype).itemsize
        self._buffer[:used].copy_(self._host[self._turn][:used], non_blocking=True)
        self._copied[self._turn].record()

    def _views(self, buffer: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        views: dict[str, npt.NDArray[Any]] = {}
        offset = 0
        for field in self._layout:
            size = int(np.prod(field.shape)) * np.dtype(field.dtype).itemsize
            views[field.name] = buffer[offset : offset + size].view(field.dtype).reshape(field.shape)
            offset += field.nbytes
        return views

"""Engine process ↔ adapter process: blobs in the host arena, and how they are laid out."""

from typing import NamedTuple

import msgspec

from shared.errors import ErrorRecord


class ModuleLayout(NamedTuple):
    """Where one module of one layer lies in an adapter's chunk for that layer.

    A is `[rank, in]` row-major; B is stored rank-major, `[rank, out]`. Offsets are bytes from the start of the
    chunk, multiples of 16. `module` indexes `shared.base_model.MODULES`. `scale` is α/r (or α/√r).
    """

    module: int
    rank: int
    scale: float
    a_offset: int
    b_offset: int


class ChunkLayout(NamedTuple):
    """One layer's part of an adapter's blob: `nbytes` from `offset` in the blob. Both are multiples of 16."""

    layer: int
    offset: int
    nbytes: int
    modules: tuple[ModuleLayout, ...]


class ExtraLayout(NamedTuple):
    """Where one tensor lies that an adapter has beside the A and B of its linears. Row-major, 16 bytes aligned.

    `gain`, `offset` [out] float32 of the linear `module` in `layer`: y = gain ⊙ (W x + b + scale · B(A x)) + offset.
    `input_layernorm` …, in place of that norm's weight in `layer`; `norm`: of the last one.
    `embed.a` [vocab + extra, rank], `embed.b` [rank, hidden], `embed.gain` [hidden];
    `head.a` [rank, hidden], `head.b` [rank, vocab + extra], `head.gain`, `head.offset` [vocab + extra];
    `embed.ids`, `head.ids` [n] int64, ascending, and `embed.rows`, `head.rows` [n, hidden]: in place of the base's.

    `layer`: OUTSIDE_LAYERS for what belongs to none. `module`: −1 except for gain and offset. `offset`: bytes from the
    start of the blob, within the chunk of `layer`; two tensors may be one. `scale`: of `embed.a` and `head.a`.
    """

    name: str
    layer: int
    module: int
    offset: int
    shape: tuple[int, ...]
    dtype: str
    scale: float = 0.0


OUTSIDE_LAYERS = -1


class BlobLayout(msgspec.Struct, frozen=True):
    """An adapter as it lies in the host arena and on the device. Layers that it does not change have no chunk; what it
    changes outside the layers is in a chunk of the layer OUTSIDE_LAYERS, the first.

    `extra_vocab`: token ids that it adds behind the base model's. `activation`: the tokens from whose last occurrence
    in the prompt on it acts; empty: everywhere.
    """

    nbytes: int
    rank: int
    dtype: str
    chunks: tuple[ChunkLayout, ...]
    extras: tuple[ExtraLayout, ...] = ()
    extra_vocab: int = 0
    activation: tuple[int, ...] = ()


class EngineStarted(msgspec.Struct, tag=True, frozen=True):
    """First message of an engine, and again when it learns that the adapter process was replaced: it holds no blob."""


class Acquire(msgspec.Struct, tag=True, frozen=True):
    """The engine wants the blob of `digest`; the adapter process holds it in the host arena until `Release`.

    `session`: what the engine calls the time since its last `EngineStarted`. The answer repeats it: one from before
    speaks of a blob that nobody holds any more.
    """

    digest: str
    session: str = ""


class Release(msgspec.Struct, tag=True, frozen=True):
    digest: str


class Acquired(msgspec.Struct, tag=True, frozen=True):
    """`host_offset`: bytes from the start of the host arena, a multiple of 16."""

    digest: str
    host_offset: int
    layout: BlobLayout
    session: str = ""


class AcquireFailed(msgspec.Struct, tag=True, frozen=True):
    digest: str
    error: ErrorRecord
    session: str = ""

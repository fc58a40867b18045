"""The one door to the LoRA kernels: picks the ops by device and by shape."""

from importlib.util import find_spec

from torch import Tensor

from kernels import reference
from kernels.table import SMALL_RANK, AdapterTable, Chunks, Group, LoraRows

HAS_TRITON = find_spec("triton") is not None

ROWS_PER_CHUNK = ((64, 1), (512, 16))  # (rows of the batch, rows of a chunk)
MOST_ROWS_PER_CHUNK = 64


def rows_per_chunk(num_rows: int) -> int:
    """How long the chunks of a batch (or bucket) of `num_rows` rows should be."""
    return next((chunk for most, chunk in ROWS_PER_CHUNK if num_rows <= most), MOST_ROWS_PER_CHUNK)


def add_lora(y: Tensor, x: Tensor, table: AdapterTable, layer: int, group: Group, rows: LoraRows) -> None:
    """Add to the packed output of a group's base linears what each row's adapter contributes, in place.

    Semantics: y[t, c] += scale · (x[t] · Aᵀ) · B for every row t with an adapter, for each adapted module of the group
    and its columns c; A, B and scale are those of the row's slot. Float32 accumulation, one rounding. A row's result
    depends on no other row. Rows of the base model and columns of unadapted modules keep their bits.

    Args:
        y: `[rows, columns[-1]]` in the arena's dtype, base output, changed in place.
        x: `[rows, in]` in the arena's dtype, last dimension contiguous.
        table: The adapters in their slots.
        layer: Layer of the base model.
        group: The modules that `y` packs.
        rows: Which adapter each row uses.
    """
    if not rows.segments:
        return
    if rows.chunks is None or not (x.is_cuda and HAS_TRITON):
        reference.add_lora(y, x, table, layer, group, rows.segments)
        return
    add_chunks(y, x, table, layer, group, rows.chunks)


def add_chunks(y: Tensor, x: Tensor, table: AdapterTable, layer: int, group: Group, chunks: Chunks) -> None:
    """`add_lora` on a GPU, given the work list alone, which covers all rows."""
    from kernels import bgmv, sgmv, tall

    if chunks.rows_per_chunk > 1:
        sgmv.sgmv_expand(y, sgmv.sgmv_shrink(x, table, layer, group, chunks), table, layer, group, chunks)
        return
    bgmv.bgmv_expand(y, bgmv.bgmv_shrink(x, table, layer, group, chunks), table, layer, group, chunks)
    if chunks.max_rank > SMALL_RANK:
        tall.tall_expand(y, tall.tall_shrink(x, table, layer, group, chunks), table, layer, group, chunks)


def small_delta(
    out: Tensor, x: Tensor, table: AdapterTable, layer: int, group: Group, chunks: Chunks, v: Tensor | None = None
) -> None:
    """What `add_chunks` would add, in float32, on a GPU and for chunks of one row; `tall_delta` writes the other part.

    Args:
        out: `[rows, columns[-1]]` float32. Written here: rows of the base model and of adapters whose modules in the
            group have ranks up to SMALL_RANK. What adds nothing is −0, which changes no bit of what it is added to.
        x, table, layer, group, chunks: As above.
        v: Room from `kernels.bgmv.shrunk`, or None to allocate.
    """
    from kernels import bgmv

    v = bgmv.bgmv_shrink(x, table, layer, group, chunks, v)
    bgmv.bgmv_expand(out, v, table, layer, group, chunks, add=False)


def tall_delta(
    out: Tensor, x: Tensor, table: AdapterTable, layer: int, group: Group, chunks: Chunks, v: Tensor | None = None
) -> None:
    """As `small_delta`, for the rows that it leaves: none where `chunks.max_rank` is no more than SMALL_RANK.

    `v`: room from `kernels.tall.shrunk`, or None.
    """
    from kernels import tall

    v = tall.tall_shrink(x, table, layer, group, chunks, v)
    tall.tall_expand(out, v, table, layer, group, chunks, add=False)

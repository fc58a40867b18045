"""The one door to the LoRA kernels: picks the op by device and by shape."""

from importlib.util import find_spec

from torch import Tensor

from kernels import reference
from kernels.table import AdapterTable, Chunks, Group, LoraRows
from kernels.table import Addend as Addend

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    from kernels import bgmv, sgmv

ROWS_PER_CHUNK = ((64, 1), (512, 16))  # (rows of the batch, rows of a chunk)
MOST_ROWS_PER_CHUNK = 64


def rows_per_chunk(num_rows: int) -> int:
    """How long the chunks of a batch (or bucket) of `num_rows` rows should be."""
    return next((chunk for most, chunk in ROWS_PER_CHUNK if num_rows <= most), MOST_ROWS_PER_CHUNK)


def shrink(
    x: Tensor, table: AdapterTable, layer: int, group: Group, chunks: Chunks, out: Tensor | None = None
) -> Tensor:
    """Project every row that has an adapter down to its rank, on a GPU.

    Semantics: those of `kernels.reference.bgmv_shrink`, the row's slot being its chunk's.

    Args:
        x: `[rows, in]` in the arena's dtype, last dimension contiguous.
        table: The adapters in their slots.
        layer: Layer of the base model.
        group: Modules that read `x`.
        chunks: Cover the rows of `x`.
        out: What an earlier call of the same shapes returned, to write to; None allocates.

    Returns:
        v: `[splits, rows, modules, table.max_rank]` float32.
    """
    op = bgmv.bgmv_shrink if chunks.rows_per_chunk == 1 else sgmv.sgmv_shrink
    return op(x, table, layer, group, chunks, out)


def expand(y: Tensor, v: Tensor, table: AdapterTable, layer: int, group: Group, chunks: Chunks) -> None:
    """Project `v` up and add it to `y` `[rows, columns[-1]]`, in place.

    Semantics: those of `kernels.reference.bgmv_expand`, the row's slot being its chunk's.
    """
    op = bgmv.bgmv_expand if chunks.rows_per_chunk == 1 else sgmv.sgmv_expand
    op(y, v, table, layer, group, chunks)


def add(y: Tensor, addend: Addend) -> None:
    """Add to a projection's output what it lacks, in place."""
    expand(y, *addend)


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
    expand(y, shrink(x, table, layer, group, rows.chunks), table, layer, group, rows.chunks)

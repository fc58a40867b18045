"""The one door to the LoRA kernels: picks the op by device and by shape."""

from importlib.util import find_spec

from torch import Tensor

from kernels import reference
from kernels.table import AdapterTable, Group, LoraRows

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    from kernels import bgmv, sgmv


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
    if rows.row_slots is None or not (x.is_cuda and HAS_TRITON):
        reference.add_lora(y, x, table, layer, group, rows.segments)
        return
    decodes = rows.num_decodes
    if rows.segments[0].start < decodes:
        slots = rows.row_slots[:decodes]
        v = bgmv.bgmv_shrink(x[:decodes], table, layer, group, slots)
        bgmv.bgmv_expand(y[:decodes], v, table, layer, group, slots)
    if rows.segments[-1].end > decodes:
        slots = rows.row_slots[decodes:]
        v = sgmv.sgmv_shrink(x[decodes:], table, layer, group, slots)
        sgmv.sgmv_expand(y[decodes:], v, table, layer, group, slots)

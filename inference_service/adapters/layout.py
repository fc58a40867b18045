"""Where everything of an adapter lies in its blob: one chunk per layer, every module at its true rank.

chunk   for each of qkv, o, gate_up, down: the A [rank, in] of its modules, then their B, rank-major [rank, out];
        then the layer's extras (extras.py)
blob    the chunk of what lies outside the layers, then those of the layers that the adapter changes, in order
"""

from collections import defaultdict

import numpy as np

from inference_service.adapters.conversion import STORAGE
from inference_service.adapters.extras import extra_bytes, plan_extras
from inference_service.adapters.saved_rows import SavedRows
from inference_service.types import BlobLayout, ChunkLayout, ExtraLayout, ModuleLayout
from shared.adapter_format.binding import BindingPlan, ModuleBinding
from shared.base_model import ModelConfig, linear_shape

GROUPS = ((0, 1, 2), (3,), (4, 5), (6,))  # qkv, o, gate_up, down: modules that share their input
NO_ROWS = SavedRows()
_ALIGNMENT = 16


def plan_layout(binding: BindingPlan, model: ModelConfig, dtype: str, rows: SavedRows = NO_ROWS) -> BlobLayout:
    """Where everything of `binding` goes in a blob of `dtype`; reads no data. `rows`: of embedding and head."""
    modules: defaultdict[int, list[ModuleBinding]] = defaultdict(list)
    for module in binding.modules:
        modules[module.layer].append(module)
    unplaced: defaultdict[int, list[ExtraLayout]] = defaultdict(list)
    for extra in plan_extras(binding, model, dtype, rows):
        unplaced[extra.layer].append(extra)
    chunks: list[ChunkLayout] = []
    extras: list[ExtraLayout] = []
    offset = 0
    for layer in sorted(modules.keys() | unplaced.keys()):
        chunk = _chunk(layer, offset, modules[layer], model, np.dtype(STORAGE[dtype]).itemsize)
        placed, offset = _placed(unplaced[layer], offset + chunk.nbytes, rows)
        chunks.append(chunk._replace(nbytes=offset - chunk.offset))
        extras += placed
    return BlobLayout(
        offset, binding.rank, dtype, tuple(chunks), tuple(extras), binding.extra_vocab, binding.activation
    )


def _placed(extras: list[ExtraLayout], end: int, rows: SavedRows) -> tuple[list[ExtraLayout], int]:
    """One behind the other from `end` on, and where they end. A head that sees the embedding's rows has no others."""
    placed: list[ExtraLayout] = []
    for extra in extras:
        if extra.name in ("head.ids", "head.rows") and rows.head is rows.embed:
            name = extra.name.replace("head", "embed")
            placed.append(extra._replace(offset=next(other.offset for other in placed if other.name == name)))
            continue
        placed.append(extra._replace(offset=end))
        end += aligned(extra_bytes(extra))
    return placed, end


def _chunk(layer: int, offset: int, modules: list[ModuleBinding], model: ModelConfig, item: int) -> ChunkLayout:
    by_index = {module.module: module for module in modules}
    layouts: list[ModuleLayout] = []
    end = 0
    for group in GROUPS:
        present = [by_index[index] for index in group if index in by_index]
        a_offsets: list[int] = []
        b_offsets: list[int] = []
        for offsets, dimension in ((a_offsets, 1), (b_offsets, 0)):
            for module in present:
                offsets.append(end)
                end += aligned(module.rank * linear_shape(model, module.module)[dimension] * item)
        for module, a, b in zip(present, a_offsets, b_offsets, strict=True):
            layouts.append(ModuleLayout(module.module, module.rank, module.scale, a, b))
    return ChunkLayout(layer, offset, end, tuple(layouts))


def aligned(nbytes: int) -> int:
    """As many bytes with the padding behind them."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

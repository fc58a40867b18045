"""Rows of embedding and head that an adapter brings: of whole matrices only those that differ from the base's."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_service.adapters.base_tensors import EMBED, BaseTensors
from inference_service.adapters.conversion import STORAGE, convert, widened_file
from shared.adapter_format.bound import BindingPlan, RowsBinding
from shared.adapter_format.header import ITEM_SIZES, TensorInfo
from shared.adapter_format.reasons import tensor_unsupported

_PIECE_BYTES = 4 << 20

Ids = NDArray[np.int64]


class RowsPart(NamedTuple):
    """Rows `sources` [n], ascending, of a tensor of the file go to the places `targets` [n]."""

    tensor: str
    sources: Ids
    targets: Ids


class KeptRows(NamedTuple):
    """The token ids [n], ascending, whose rows are kept, and where in the file these are."""

    ids: Ids
    parts: tuple[RowsPart, ...]


class SavedRows(NamedTuple):
    """What is kept for the embedding and for the head; one object where both are the same."""

    embed: KeptRows | None = None
    head: KeptRows | None = None


def saved_rows(
    binding: BindingPlan,
    tensors: dict[str, TensorInfo],
    read: Callable[[memoryview, int], None],
    base: Callable[[], BaseTensors],
) -> SavedRows:
    """Find the rows that `binding` keeps. Reads whole matrices and the base model's, where there are such.

    Args:
        binding: Of the adapter.
        tensors: Of its file.
        read: Fills a buffer from an offset of the file on.
        base: The base model's weights; called only where they are needed.

    Raises:
        BaseModelMismatch: the base model's weights are needed, and cannot be read.
        AdapterInvalid: a number is beyond the range of the served dtype (metadata `tensor`).
        UnsupportedAdapter: an activated LoRA brings rows, which would act before its activation (metadata `tensor`).
    """

    def differing(tensor: str, name: str) -> Ids:
        return _differing(tensor, tensors[tensor], read, base(), name)

    rows = _saved(binding, differing, base)
    if binding.activation and (kept := rows.head or rows.embed):
        advice = "is no copy of the base model's, and would act before the activation; save without embedding layers"
        raise tensor_unsupported(kept.parts[0].tensor, "alora_invocation_tokens", advice)
    return rows


def _saved(binding: BindingPlan, differing: Callable[[str, str], Ids], base: Callable[[], BaseTensors]) -> SavedRows:
    embed, head = binding.embed, binding.head
    kept = _kept(embed.rows, embed.grown, lambda tensor: differing(tensor, EMBED)) if embed else None
    if head is None:
        return SavedRows(kept)
    if embed and (head.rows, head.grown) == (embed.rows, embed.grown) and _is_tied(head.rows, head.grown, base):
        return SavedRows(kept, kept)
    return SavedRows(kept, _kept(head.rows, head.grown, lambda tensor: differing(tensor, base().head)))


def _is_tied(rows: RowsBinding | None, grown: RowsBinding | None, base: Callable[[], BaseTensors]) -> bool:
    """Whether what differs from the embedding differs from the head."""
    is_whole = any(each is not None and each.ids is None for each in (rows, grown))
    return not is_whole or base().head == EMBED


def _kept(rows: RowsBinding | None, grown: RowsBinding | None, differing: Callable[[str], Ids]) -> KeptRows | None:
    """`rows` count where `grown`, which lies beneath, has them too."""
    found: dict[str, tuple[Ids, Ids]] = {}  # by tensor: its rows, and the tokens they are for
    taken = np.empty(0, np.int64)
    for part in (rows, grown):
        if part is None:
            continue
        if part.ids is None:
            sources = tokens = differing(part.tensor)
        else:
            tokens = np.array(part.ids, np.int64)
            sources = np.arange(tokens.size)
        is_free = ~np.isin(tokens, taken)
        found[part.tensor] = sources[is_free], tokens[is_free]
        taken = np.concatenate((taken, tokens[is_free]))
    if not taken.size:
        return None
    ids = np.sort(taken)
    parts = [RowsPart(name, sources, np.searchsorted(ids, tokens)) for name, (sources, tokens) in found.items()]
    return KeptRows(ids, tuple(part for part in parts if part.sources.size))


def _differing(
    tensor: str, info: TensorInfo, read: Callable[[memoryview, int], None], base: BaseTensors, name: str
) -> Ids:
    """Rows of a matrix that are not the base model's as they are served, those behind the base's last included."""
    num_rows, columns = info.shape
    row_bytes = columns * ITEM_SIZES[info.dtype]
    step = max(_PIECE_BYTES // row_bytes, 1)
    num_base = base.num_rows(name)
    found: list[Ids] = []
    for begin in range(0, num_base, step):
        end = min(begin + step, num_base)
        data = memoryview(bytearray((end - begin) * row_bytes))
        read(data, info.begin + begin * row_bytes)
        served = np.empty((end - begin, columns), STORAGE[base.dtype])
        dtype, data = widened_file(info.dtype, data)
        convert(tensor, data, dtype, base.dtype, served)
        found.append(begin + np.flatnonzero((served != base.rows(name, begin, end)).any(axis=1)))
    return np.concatenate((*found, np.arange(num_base, num_rows)))

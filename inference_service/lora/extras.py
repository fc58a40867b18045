"""What an adapter in a slot has beside the A and B of its linears, as views of the arena's bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from inference_service.types import BlobLayout, ExtraLayout


class Affine(NamedTuple):
    """y = gain ⊙ y + offset, each `[out]` float32 or None."""

    gain: Tensor | None
    offset: Tensor | None

    def apply(self, y: Tensor) -> None:
        """To `y` `[rows, out]` float32, in place."""
        if self.gain is None:
            assert self.offset is not None
            y.add_(self.offset)
        elif self.offset is None:
            y.mul_(self.gain)
        else:
            torch.addcmul(self.offset, y, self.gain, out=y)


class Factors(NamedTuple):
    """A LoRA on the embedding (`a` `[vocab + extra, rank]`, `b` `[rank, hidden]`) or on the head (`a` `[rank, hidden]`,
    `b` `[rank, vocab + extra]`)."""

    a: Tensor
    b: Tensor
    scale: float


class Rows(NamedTuple):
    """In place of the base model's: `rows` `[n, hidden]` of the tokens `ids` `[n]` int64, ascending."""

    ids: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Outside:
    """What acts on the embedding, or on the head."""

    factors: Factors | None
    rows: Rows | None
    affine: Affine | None


@dataclass(frozen=True)
class SlotExtras:
    """Of one slot. `affine`: by layer and module. `norms`: weights by layer and name; layer −1: the last one."""

    affine: Mapping[tuple[int, int], Affine]
    norms: Mapping[tuple[int, str], Tensor]
    embed: Outside | None
    head: Outside | None
    extra_vocab: int

    @property
    def is_affine(self) -> bool:
        """Whether there is nothing but gains and offsets of linears, which the kernels know."""
        return not (self.norms or self.embed or self.head or self.extra_vocab)

    @property
    def is_outside(self) -> bool:
        """Whether rows behind the last layer are computed otherwise than the base model's."""
        return self.head is not None or (-1, "norm") in self.norms or self.extra_vocab > 0


def extras_of(layout: BlobLayout, arena: Tensor, chunk_offsets: Sequence[int]) -> SlotExtras | None:
    """Views of a blob's extras whose chunks lie at `chunk_offsets` of `arena` (flat uint8); None if it has none."""
    if not layout.extras and not layout.extra_vocab:
        return None
    shifts = {chunk.layer: at - chunk.offset for chunk, at in zip(layout.chunks, chunk_offsets, strict=True)}
    found: dict[tuple[int, int, str], Tensor] = {}
    for extra in layout.extras:
        found[extra.layer, extra.module, extra.name] = _view(extra, arena, shifts[extra.layer] + extra.offset)
    scales = {extra.name: extra.scale for extra in layout.extras}
    places = {(layer, module) for layer, module, name in found if name in ("gain", "offset")}
    affine = {place: Affine(found.get((*place, "gain")), found.get((*place, "offset"))) for place in places}
    norms = {(layer, name): tensor for (layer, _, name), tensor in found.items() if name.endswith("norm")}
    outside = {name: tensor for (_, _, name), tensor in found.items() if "." in name}
    return SlotExtras(
        affine, norms, _outside("embed", outside, scales), _outside("head", outside, scales), layout.extra_vocab
    )


def _view(extra: ExtraLayout, arena: Tensor, begin: int) -> Tensor:
    dtype: torch.dtype = getattr(torch, extra.dtype)
    nbytes = prod(extra.shape) * dtype.itemsize
    return arena[begin : begin + nbytes].view(dtype).view(extra.shape)


def _outside(name: str, tensors: Mapping[str, Tensor], scales: Mapping[str, float]) -> Outside | None:
    parts = {part: tensors.get(f"{name}.{part}") for part in ("a", "b", "ids", "rows", "gain", "offset")}
    if all(tensor is None for tensor in parts.values()):
        return None
    a, b, ids, rows, gain, offset = parts.values()
    return Outside(
        None if a is None or b is None else Factors(a, b, scales[f"{name}.a"]),
        None if ids is None or rows is None else Rows(ids, rows),
        None if gain is None and offset is None else Affine(gain, offset),
    )

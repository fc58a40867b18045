"""What an adapter's blob holds beside the A and B of linears: which tensors, and what they are computed from.

`types.ExtraLayout` names them. What the file has goes straight to its place; gains, offsets and token ids are written
once all of the file has been read.
"""

from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_service.adapters.base_tensors import EMBED, BaseTensors
from inference_service.adapters.conversion import STORAGE, widened
from inference_service.adapters.dora import Float64s, GainCache, Weights, embedding_norms, linear_norms
from inference_service.adapters.places import BlocksPlace, MatrixPlace, Place, RowsPlace, VectorPlace
from inference_service.adapters.saved_rows import KeptRows, SavedRows
from inference_service.adapters.tied_factors import check_tied
from inference_service.types import OUTSIDE_LAYERS, BlobLayout, ExtraLayout
from shared.adapter_format.bound import FINAL_NORM, BindingPlan, EmbedBinding, HeadBinding
from shared.adapter_format.reasons import OTHER_BASE, tensor_invalid
from shared.base_model import ModelConfig, linear_shape, module_path, tensor_shapes

_ITEM = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}

Key = tuple[str, int, int]  # name, layer, module


class Affine(NamedTuple):
    """What makes gain and offset of one linear, or of the head. Names are of the file's tensors.

    `name` is "" for a linear and "head." for the head.
    """

    name: str
    layer: int
    module: int
    out: int
    scale: float
    magnitude: str | None
    lora_bias: str | None
    bias: str | None
    has_base_bias: bool

    @property
    def has_offset(self) -> bool:
        """Whether anything is added."""
        return bool(self.lora_bias or self.bias or (self.magnitude and self.has_base_bias))


def extra_bytes(extra: ExtraLayout) -> int:
    """Bytes of its tensor."""
    return prod(extra.shape) * _ITEM[extra.dtype]


def needs_base(binding: BindingPlan) -> bool:
    """Whether the base model's weights on disk are needed to fill a blob."""
    return any(vector.kind in ("magnitude", "bias") for vector in binding.vectors) or any(
        place is not None and place.magnitude is not None for place in (binding.embed, binding.head)
    )


def plan_extras(binding: BindingPlan, model: ModelConfig, dtype: str, rows: SavedRows) -> Iterator[ExtraLayout]:
    """The tensors, in order of their layers; their offsets are 0 still."""
    vocab, hidden = model.vocab_size + binding.extra_vocab, model.hidden_size
    outside: list[tuple[str, tuple[int, ...], str, float]] = []
    for name, place, kept in (("embed", binding.embed, rows.embed), ("head", binding.head, rows.head)):
        if place is not None and place.a is not None:
            shapes = ((vocab, place.rank), (place.rank, hidden))
            a, b = shapes if name == "embed" else ((place.rank, hidden), (place.rank, vocab))
            outside += [(f"{name}.a", a, dtype, place.scale), (f"{name}.b", b, dtype, 0.0)]
        if kept is not None:
            outside.append((f"{name}.ids", (kept.ids.size,), "int64", 0.0))
            outside.append((f"{name}.rows", (kept.ids.size, hidden), dtype, 0.0))
    if binding.embed is not None and binding.embed.magnitude is not None:
        outside.append(("embed.gain", (hidden,), "float32", 0.0))
    for name, shape, kind, scale in outside:
        yield ExtraLayout(name, OUTSIDE_LAYERS, -1, 0, shape, kind, scale)
    for affine in affines(binding, model):
        if affine.magnitude:
            yield ExtraLayout(f"{affine.name}gain", affine.layer, affine.module, 0, (affine.out,), "float32")
        if affine.has_offset:
            yield ExtraLayout(f"{affine.name}offset", affine.layer, affine.module, 0, (affine.out,), "float32")
    for norm in binding.norms:
        size = model.head_dim if norm.name in ("q_norm", "k_norm") else hidden
        layer = OUTSIDE_LAYERS if norm.layer == FINAL_NORM else norm.layer
        yield ExtraLayout(norm.name, layer, -1, 0, (size,), dtype)


def affines(binding: BindingPlan, model: ModelConfig) -> list[Affine]:
    """One for the head, if it has vectors, and for every linear that has."""
    tensors = {(vector.layer, vector.module, vector.kind): vector.tensor for vector in binding.vectors}
    scales = {(module.layer, module.module): module.scale for module in binding.modules}
    shapes = tensor_shapes(model)
    found: list[Affine] = []
    head = binding.head
    if head is not None and (head.magnitude or head.lora_bias or head.bias):
        out = model.vocab_size + binding.extra_vocab
        vectors = head.magnitude, head.lora_bias, head.bias
        found.append(Affine("head.", OUTSIDE_LAYERS, -1, out, head.scale, *vectors, has_base_bias=False))
    for layer, module in sorted({(layer, module) for layer, module, _ in tensors}):
        magnitude, lora_bias, bias = (tensors.get((layer, module, kind)) for kind in ("magnitude", "lora_bias", "bias"))
        has_base_bias = f"{module_path(layer, module)}.bias" in shapes
        out, scale = linear_shape(model, module)[0], scales.get((layer, module), 0.0)
        found.append(Affine("", layer, module, out, scale, magnitude, lora_bias, bias, has_base_bias))
    return found


class Extras:
    """Fills the extras of one blob. `places` first, then, once the file has been read and is right, `finish`.

    Args:
        binding: What the adapter is.
        model: The base model.
        layout: Of the blob.
        rows: What is kept of the embedding and the head.
        base: The base model's weights, where `needs_base`.
        gains: Where DoRA's gains are kept.
        digest: Of the adapter.
    """

    def __init__(
        self,
        binding: BindingPlan,
        model: ModelConfig,
        layout: BlobLayout,
        rows: SavedRows,
        base: BaseTensors | None,
        gains: GainCache | None,
        digest: str,
    ) -> None:
        self._binding = binding
        self._model = model
        self._layout = layout
        self._rows = rows
        self._base = base
        self._gains = gains
        self._digest = digest
        self._held: dict[str, NDArray[np.float32]] = {}
        self._affines = {(each.layer, each.module): each for each in affines(binding, model)}
        self._at: dict[Key, ExtraLayout] = {(extra.name, extra.layer, extra.module): extra for extra in layout.extras}

    def places(self) -> Iterator[tuple[str, Place]]:
        """Where tensors of the file go, by their names. A tensor may go to several."""
        yield from self._of_embed(self._binding.embed)
        yield from self._of_head(self._binding.head)
        for norm in self._binding.norms:
            layer = OUTSIDE_LAYERS if norm.layer == FINAL_NORM else norm.layer
            extra = self._at[norm.name, layer, -1]
            yield norm.tensor, MatrixPlace(extra.offset, 1, extra.shape[0], is_b=True)
        for vector in self._binding.vectors:
            yield vector.tensor, VectorPlace(self._held)

    def finish(self, blob: memoryview, workers: Executor) -> None:
        """Write what is computed. Blocks.

        Raises:
            AdapterInvalid: DoRA scales rows that are all zero, or tied factors differ (metadata `tensor`).
            BaseModelMismatch: the base model's weights cannot be read.
        """
        check_tied(self._binding.head, lambda name: self._view(blob, self._at[name, OUTSIDE_LAYERS, -1]))
        for name, kept in (("embed.ids", self._rows.embed), ("head.ids", self._rows.head)):
            if kept is not None:
                self._view(blob, self._at[name, OUTSIDE_LAYERS, -1])[:] = kept.ids
        gains = self._compute_gains(blob, workers)
        for key, values in gains.items():
            self._view(blob, self._at[key])[:] = values
        for affine in self._affines.values():
            if affine.has_offset:
                gain = gains.get((f"{affine.name}gain", affine.layer, affine.module))
                offset = self._view(blob, self._at[f"{affine.name}offset", affine.layer, affine.module])
                offset[:] = self._offset(affine, gain)

    # ---- where tensors of the file go

    def _of_embed(self, embed: EmbedBinding | None) -> Iterator[tuple[str, Place]]:
        if embed is None:
            return
        if embed.a is not None and embed.b is not None:
            a, b = self._at["embed.a", OUTSIDE_LAYERS, -1], self._at["embed.b", OUTSIDE_LAYERS, -1]
            yield embed.a, _matrix(a, is_b=True)
            yield embed.b, _matrix(b, is_b=True)
        if embed.magnitude is not None:
            yield embed.magnitude, VectorPlace(self._held)
        yield from self._of_rows("embed.rows", self._rows.embed)

    def _of_head(self, head: HeadBinding | None) -> Iterator[tuple[str, Place]]:
        if head is None:
            return
        if head.a is not None and head.b is not None:
            a, b = self._at["head.a", OUTSIDE_LAYERS, -1], self._at["head.b", OUTSIDE_LAYERS, -1]
            for name, place, num_blocks in zip(
                (head.a, head.b), (_matrix(a, is_b=False), _matrix(b, is_b=True)), head.blocks, strict=True
            ):
                yield name, place if num_blocks == 1 else BlocksPlace(place, num_blocks)
        for vector in (head.magnitude, head.lora_bias, head.bias):
            if vector is not None:
                yield vector, VectorPlace(self._held)
        if self._rows.head is not self._rows.embed:
            yield from self._of_rows("head.rows", self._rows.head)

    def _of_rows(self, name: str, kept: KeptRows | None) -> Iterator[tuple[str, Place]]:
        if kept is not None:
            extra = self._at[name, OUTSIDE_LAYERS, -1]
            for part in kept.parts:
                yield part.tensor, RowsPlace(extra.offset, extra.shape[0], extra.shape[1], part)

    # ---- what is computed

    def _compute_gains(self, blob: memoryview, workers: Executor) -> dict[Key, NDArray[np.float32]]:
        wanted = [extra for extra in self._layout.extras if extra.name.endswith("gain")]
        if not wanted:
            return {}
        assert self._base is not None
        sizes = [extra.shape[0] for extra in wanted]
        key = (self._digest, self._base.fingerprint, self._base.dtype)
        cache = self._gains if self._base.fingerprint else None
        found = cache.find(*key, sum(sizes)) if cache else None
        if found is None:
            found = np.concatenate(list(workers.map(partial(self._gain, blob), wanted)), dtype=np.float32)
            if cache:
                cache.keep(*key, found)
        parts = np.split(found, np.cumsum(sizes)[:-1])
        return {(e.name, e.layer, e.module): part for e, part in zip(wanted, parts, strict=True)}

    def _gain(self, blob: memoryview, extra: ExtraLayout) -> NDArray[np.float32]:
        tensor, norms = self._norms(blob, extra)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            gain = (self._held[tensor] / norms).astype(np.float32)
        if not np.isfinite(gain).all():
            raise tensor_invalid(tensor, "scales rows of the weight that are zero, or nearly so", OTHER_BASE)
        return gain

    def _norms(self, blob: memoryview, extra: ExtraLayout) -> tuple[str, Float64s]:
        """The tensor with the magnitudes, and what they are divided by."""
        assert self._base is not None
        embed, head = self._binding.embed, self._binding.head
        if extra.name == "embed.gain":
            assert embed is not None
            assert embed.magnitude is not None
            weights = self._replaced(blob, EMBED, "embed", self._rows.embed)
            return embed.magnitude, embedding_norms(weights, *self._ab(blob, "embed"), embed.scale)
        if extra.name == "head.gain":
            assert head is not None
            assert head.magnitude is not None
            weights = self._replaced(blob, self._base.head, "head", self._rows.head)
            return head.magnitude, linear_norms(weights, *self._ab(blob, "head"), head.scale)
        chunk = next(chunk for chunk in self._layout.chunks if chunk.layer == extra.layer)
        module = next(module for module in chunk.modules if module.module == extra.module)
        out, columns = linear_shape(self._model, extra.module)
        a, b = (
            self._float64s(blob, chunk.offset + offset, (module.rank, size))
            for offset, size in ((module.a_offset, columns), (module.b_offset, out))
        )
        weights = partial(self._base.matrix, f"{module_path(extra.layer, extra.module)}.weight")
        magnitude = self._affines[extra.layer, extra.module].magnitude
        assert magnitude is not None
        return magnitude, linear_norms(weights, a, b, module.scale)

    def _offset(self, affine: Affine, gain: NDArray[np.float32] | None) -> Float64s:
        """bias' − gain ⊙ bias + gain ⊙ scale · lora_bias, of which bias' is the base's where there is no other."""
        base_bias = self._base.bias(affine.layer, affine.module) if self._base and affine.has_base_bias else None
        before = np.zeros(affine.out) if base_bias is None else base_bias
        factor = np.ones(affine.out) if gain is None else gain.astype(np.float64)
        after = before if affine.bias is None else self._held[affine.bias].astype(np.float64)
        added = affine.scale * self._held[affine.lora_bias].astype(np.float64) if affine.lora_bias else 0.0
        return after + factor * (added - before)

    def _replaced(self, blob: memoryview, name: str, prefix: str, kept: KeptRows | None) -> Weights:
        """The base model's matrix `name`, with the rows that the adapter has in their places."""
        base = self._base
        assert base is not None
        num_base = base.num_rows(name)
        rows = None
        if kept is not None:
            extra = self._at[f"{prefix}.rows", OUTSIDE_LAYERS, -1]
            rows = self._float64s(blob, extra.offset, extra.shape)

        def weights(begin: int, end: int) -> Float64s:
            found = np.zeros((end - begin, self._model.hidden_size))
            if begin < num_base:
                found[: num_base - begin] = base.matrix(name, begin, min(end, num_base))
            if kept is not None and rows is not None:
                span = slice(*np.searchsorted(kept.ids, (begin, end)))
                found[kept.ids[span] - begin] = rows[span]
            return found

        return weights

    def _ab(self, blob: memoryview, name: str) -> tuple[Float64s, Float64s]:
        a, b = (self._at[f"{name}.{side}", OUTSIDE_LAYERS, -1] for side in "ab")
        return self._float64s(blob, a.offset, a.shape), self._float64s(blob, b.offset, b.shape)

    def _float64s(self, blob: memoryview, offset: int, shape: tuple[int, ...]) -> Float64s:
        stored: NDArray[Any] = np.frombuffer(blob, STORAGE[self._layout.dtype], count=prod(shape), offset=offset)
        return widened(stored, self._layout.dtype).astype(np.float64).reshape(shape)

    def _view(self, blob: memoryview, extra: ExtraLayout) -> NDArray[Any]:
        dtype = STORAGE.get(extra.dtype, extra.dtype)
        return np.frombuffer(blob, dtype, count=prod(extra.shape), offset=extra.offset).reshape(extra.shape)


def _matrix(extra: ExtraLayout, *, is_b: bool) -> MatrixPlace:
    rank, columns = extra.shape
    return MatrixPlace(extra.offset, rank, columns, is_b)

"""Blends: the weighted sum of several adapters, packed as an adapter of its own.

Σ wᵢ·sᵢ·BᵢAᵢ is one product of factors that lie behind each other: A = [A₁; A₂; …] and B = [w₁s₁B₁, w₂s₂B₂, …], of the
ranks' sum and the scale 1, on linears as on the embedding and the head; biases on B add up. Nothing is averaged, so it
is exact; a module that only some parts adapt has only those.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from itertools import pairwise
from math import prod
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_service.adapters.base_tensors import BaseTensors
from inference_service.adapters.conversion import STORAGE, convert
from inference_service.adapters.fetcher import Fetched
from inference_service.adapters.layout import plan_layout
from inference_service.adapters.packer import OpenAdapter, open_adapter
from inference_service.adapters.resolution import ResolvedVersion
from inference_service.types import OUTSIDE_LAYERS, BlobLayout, ExtraLayout
from shared.adapter_format.bound import BindingPlan, EmbedBinding, HeadBinding, ModuleBinding, VectorBinding
from shared.adapter_format.config import MAX_RANK
from shared.base_model import ModelConfig, linear_shape, module_path
from shared.blend_errors import of_part
from shared.errors import AdapterInvalid, InvalidArgument, UnsupportedAdapter

_HEADER = b"loraplex-blend-v1\n"
_BLENDED = frozenset(
    {"lora", "block_diagonal", "lora_bias", "embedding", "lm_head"}
)  # kinds whose sum is of their kind
_SIDES = ("embed", "head")
_SUMMED = "blend"  # the name of a tensor that no file has


class Part(NamedTuple):
    """One adapter of a blend. `field` is how the request calls it: `blend[0]`."""

    version: ResolvedVersion
    weight: float
    field: str


class Blend(NamedTuple):
    """Parts, ordered by digest; `digest` is the blend's own."""

    digest: str
    parts: tuple[Part, ...]


def blend_of(versions: Sequence[ResolvedVersion], weights: Sequence[float]) -> Blend:
    """The blend of resolved adapters, in the request's order, which changes nothing about its digest.

    Raises:
        InvalidArgument: two parts are the same files (names `blend[i].reference`).
    """
    fields = [f"blend[{index}]" for index in range(len(versions))]
    parts = sorted(map(Part, versions, weights, fields), key=lambda part: part.version.digest)
    for one, other in pairwise(parts):
        if one.version.digest == other.version.digest:
            first, second = sorted((one, other), key=lambda part: part.field)
            problem = f"has the same content as {first.field}; add their weights up"
            raise InvalidArgument.of(f"{second.field}.reference", problem)
    lines = (f"{part.version.digest} {float(part.weight).hex()}\n".encode() for part in parts)
    return Blend(f"sha256:{hashlib.sha256(_HEADER + b''.join(lines)).hexdigest()}", tuple(parts))


class OpenBlend:
    """The files of a blend's parts, ready to be packed, as `packer.OpenAdapter`. Close it after use."""

    def __init__(self, parts: Sequence[tuple[Part, OpenAdapter]], model: ModelConfig, dtype: str) -> None:
        self._parts = parts
        self._model = model
        self.layout = _layout([opened.layout for _, opened in parts], model, dtype)
        self._extras = {(extra.name, extra.layer, extra.module): extra for extra in self.layout.extras}

    def __enter__(self) -> "OpenBlend":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for _, opened in self._parts:
            opened.__exit__(kind, error, traceback)

    def fill(self, blob: memoryview, workers: Executor, on_read: Callable[[int], None] | None = None) -> None:
        """Write the blob, one part after the other, each read in float32 and rounded once. See `OpenAdapter.fill`.

        Raises:
            InvalidArgument: a weight makes numbers that are not finite in the blob's dtype (names `blend[i].weight`).
        """
        np.frombuffer(blob, np.uint8, self.layout.nbytes)[:] = 0
        ranks = _Ranks()
        for part, opened in self._parts:
            source = memoryview(bytearray(opened.layout.nbytes))
            with of_part(part.field):
                opened.fill(source, workers, on_read)
            self._add_linears(blob, source, part, opened.layout, ranks)
            self._add_extras(blob, source, part, opened.layout, ranks)

    def _add_linears(
        self, blob: memoryview, source: memoryview, part: Part, layout: BlobLayout, ranks: "_Ranks"
    ) -> None:
        """Put one part's factors behind those of the parts before it, which end at `ranks`."""
        places = {(c.layer, m.module): (c.offset, m) for c in self.layout.chunks for m in c.modules}
        for chunk in layout.chunks:
            for module in chunk.modules:
                offset, place = places[chunk.layer, module.module]
                rows = ranks.take(chunk.layer, module.module, module.rank)
                sizes = linear_shape(self._model, module.module)[::-1]
                factors = (1.0, part.weight * module.scale)
                starts, ends = (module.a_offset, module.b_offset), (place.a_offset, place.b_offset)
                for size, factor, start, end in zip(sizes, factors, starts, ends, strict=True):
                    numbers = _view(source, chunk.offset + start, (module.rank, size), "float32")
                    target = _view(blob, offset + end, (place.rank, size), self.layout.dtype)
                    self._store(target[rows], numbers, factor, part)

    def _add_extras(
        self, blob: memoryview, source: memoryview, part: Part, layout: BlobLayout, ranks: "_Ranks"
    ) -> None:
        """Likewise what lies outside the layers, and add up the biases."""
        found = {(extra.name, extra.layer, extra.module): extra for extra in layout.extras}
        for number, side in enumerate(_SIDES):
            a, b = (found.get((f"{side}.{name}", OUTSIDE_LAYERS, -1)) for name in "ab")
            if a is None or b is None:
                continue
            rows = ranks.take(OUTSIDE_LAYERS, number, b.shape[0])
            for extra, factor in ((a, 1.0), (b, part.weight * a.scale)):
                target = self._target(blob, extra)
                is_by_token = extra.name == "embed.a"  # [vocabulary, rank]
                self._store(target[:, rows] if is_by_token else target[rows], _of(source, extra), factor, part)
        for extra in layout.extras:
            if extra.name in ("offset", "head.offset"):
                total = self._target(blob, extra)
                total += np.float32(part.weight) * _of(source, extra)
                _check_finite(total, "float32", part)

    def _target(self, blob: memoryview, extra: ExtraLayout) -> NDArray[Any]:
        """Where the parts' tensors of the name and place of `extra` are put together."""
        place = self._extras[extra.name, extra.layer, extra.module]
        return _view(blob, place.offset, place.shape, place.dtype)

    def _store(self, target: NDArray[Any], numbers: NDArray[np.float32], factor: float, part: Part) -> None:
        """Write `factor` times `numbers`, rounded once."""
        with np.errstate(over="ignore"):
            numbers = np.ascontiguousarray(numbers * np.float32(factor))
        dtype = self.layout.dtype
        _check_finite(numbers, dtype, part)
        try:
            convert("", numbers.data.cast("B"), "F32", dtype, target)
        except AdapterInvalid:
            raise _overflow(dtype, part) from None


class _Ranks:
    """How many rows of each module's factors are taken."""

    def __init__(self) -> None:
        self._taken: defaultdict[tuple[int, int], int] = defaultdict(int)

    def take(self, layer: int, module: int, rank: int) -> slice:
        """The next `rank` rows."""
        first = self._taken[layer, module]
        self._taken[layer, module] = first + rank
        return slice(first, first + rank)


def _check_finite(numbers: NDArray[Any], dtype: str, part: Part) -> None:
    if not np.isfinite(numbers).all():
        raise _overflow(dtype, part)


def _overflow(dtype: str, part: Part) -> InvalidArgument:
    return InvalidArgument.of(f"{part.field}.weight", f"makes numbers that are beyond the range of {dtype}")


def _view(blob: memoryview, offset: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    return np.frombuffer(blob, STORAGE[dtype], prod(shape), offset).reshape(shape)


def _of(source: memoryview, extra: ExtraLayout) -> NDArray[np.float32]:
    """A tensor of a part's blob, which is in float32."""
    return _view(source, extra.offset, extra.shape, "float32")


def open_blend(
    blend: Blend, fetched: Sequence[Fetched], model: ModelConfig, dtype: str, base: BaseTensors | None = None
) -> OpenBlend:
    """Open the parts of a blend, whose files were `fetched`, and plan its blob. Blocks.

    Raises:
        DigestMismatch, BaseModelMismatch: as `open_adapter`.
        UnsupportedAdapter: a part is more than LoRA and biases on B, or the ranks of a module are too many together.
    """
    with ExitStack() as stack:
        parts: list[tuple[Part, OpenAdapter]] = []
        for part, files in zip(blend.parts, fetched, strict=True):
            with of_part(part.field):
                parts.append((part, stack.enter_context(_open_part(part, files, model, base))))
        opened = OpenBlend(parts, model, dtype)
        stack.pop_all()
        return opened


def _open_part(part: Part, fetched: Fetched, model: ModelConfig, base: BaseTensors | None) -> OpenAdapter:
    def check(binding: BindingPlan) -> None:
        if others := [kind for kind in binding.kinds if kind not in _BLENDED]:
            raise _unblended(part, others)

    folder, is_verified = fetched
    opened = open_adapter(folder, part.version.files, model, "float32", base, is_verified=is_verified, check=check)
    if any(extra.name.endswith(".rows") for extra in opened.layout.extras):  # a copy of the base that is none
        opened.__exit__(None, None, None)
        raise _unblended(part, ["modules_to_save"])
    return opened


def _unblended(part: Part, others: Sequence[str]) -> UnsupportedAdapter:
    return UnsupportedAdapter(
        f"{part.field}: {part.version.name} cannot be blended: it has {', '.join(others)}; only LoRA and biases on B "
        "can, so leave it out, or name it alone",
        metadata={"field": part.field, "adapter": part.version.name, "kinds": ",".join(others)},
    )


def _layout(layouts: Sequence[BlobLayout], model: ModelConfig, dtype: str) -> BlobLayout:
    ranks: defaultdict[tuple[int, int], int] = defaultdict(int)
    sides: defaultdict[str, int] = defaultdict(int)
    offsets: set[tuple[str, int, int]] = set()
    for layout in layouts:
        for chunk in layout.chunks:
            for module in chunk.modules:
                ranks[chunk.layer, module.module] += module.rank
        for extra in layout.extras:
            if extra.name.endswith(".b"):
                sides[extra.name.removesuffix(".b")] += extra.shape[0]
            elif extra.name.endswith("offset"):
                offsets.add((extra.name, extra.layer, extra.module))
    named = {module_path(*place): rank for place, rank in ranks.items()}
    for name, rank in (named | {"embed_tokens": sides["embed"], "lm_head": sides["head"]}).items():
        if rank > MAX_RANK:
            raise UnsupportedAdapter(
                f"blend: {name} has rank {rank} in all; the limit is {MAX_RANK}",
                metadata={"field": "blend", "rank": str(rank)},
            )
    modules = tuple(
        ModuleBinding(layer, module, module_path(layer, module), rank, 1.0, "", "")
        for (layer, module), rank in sorted(ranks.items())
    )
    binding = BindingPlan(modules, max(ranks.values(), default=0), 0, ())
    linears = sorted((layer, module) for name, layer, module in offsets if name == "offset")
    binding = binding._replace(vectors=tuple(VectorBinding(*place, "lora_bias", _SUMMED) for place in linears))
    if sides["embed"]:
        binding = binding._replace(embed=EmbedBinding(_SUMMED, _SUMMED, sides["embed"], 1.0))
    if sides["head"]:
        on_b = _SUMMED if ("head.offset", OUTSIDE_LAYERS, -1) in offsets else None
        binding = binding._replace(head=HeadBinding(_SUMMED, _SUMMED, sides["head"], 1.0, lora_bias=on_b))
    return plan_layout(binding, model, dtype)

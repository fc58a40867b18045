"""Blends: the weighted sum of several adapters, packed as an adapter of its own.

Σ wᵢ·sᵢ·BᵢAᵢ is one product of factors that lie behind each other: A = [A₁; A₂; …] and B = [w₁s₁B₁, w₂s₂B₂, …], of the
ranks' sum and the scale 1. Nothing is averaged, so it is exact; a module that only some parts adapt has only those.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from itertools import pairwise
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference_service.adapters.conversion import STORAGE, convert
from inference_service.adapters.fetcher import Fetched
from inference_service.adapters.layout import plan_layout
from inference_service.adapters.packer import OpenAdapter, open_adapter
from inference_service.adapters.resolution import ResolvedVersion
from inference_service.types import BlobLayout
from shared.adapter_format.bound import BindingPlan, ModuleBinding
from shared.adapter_format.config import MAX_RANK
from shared.base_model import ModelConfig, linear_shape, module_path
from shared.errors import AdapterInvalid, InvalidArgument, UnsupportedAdapter

_HEADER = b"loraplex-blend-v1\n"
_BLENDED = frozenset({"lora", "block_diagonal"})  # kinds whose sum is of their kind


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
            problem = f"is the same adapter as {first.field}: add their weights up"
            raise InvalidArgument.of(f"{second.field}.reference", problem)
    lines = (f"{part.version.digest} {float(part.weight).hex()}\n".encode() for part in parts)
    return Blend(f"sha256:{hashlib.sha256(_HEADER + b''.join(lines)).hexdigest()}", tuple(parts))


class OpenBlend:
    """The files of a blend's parts, ready to be packed, as `packer.OpenAdapter`. Close it after use."""

    def __init__(self, parts: Sequence[tuple[Part, OpenAdapter]], model: ModelConfig, dtype: str) -> None:
        self._parts = parts
        self._model = model
        self.layout = _layout([opened.layout for _, opened in parts], model, dtype)

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
        first_rows: defaultdict[tuple[int, int], int] = defaultdict(int)
        for part, opened in self._parts:
            source = memoryview(bytearray(opened.layout.nbytes))
            opened.fill(source, workers, on_read)
            self._add(blob, source, part, opened.layout, first_rows)

    def _add(
        self,
        blob: memoryview,
        source: memoryview,
        part: Part,
        layout: BlobLayout,
        first_rows: defaultdict[tuple[int, int], int],
    ) -> None:
        """Put one part's factors behind those of the parts before it, which end at `first_rows`."""
        places = {(c.layer, m.module): (c.offset, m) for c in self.layout.chunks for m in c.modules}
        for chunk in layout.chunks:
            for module in chunk.modules:
                offset, place = places[chunk.layer, module.module]
                first = first_rows[chunk.layer, module.module]
                first_rows[chunk.layer, module.module] += module.rank
                out, columns = linear_shape(self._model, module.module)
                a = _matrix(source, chunk.offset + module.a_offset, module.rank, columns)
                b = _matrix(source, chunk.offset + module.b_offset, module.rank, out)
                with np.errstate(over="ignore"):
                    b = b * np.float32(part.weight * module.scale)
                self._store(blob, offset + place.a_offset, first, a, part)
                self._store(blob, offset + place.b_offset, first, b, part)

    def _store(self, blob: memoryview, offset: int, first: int, rows: NDArray[np.float32], part: Part) -> None:
        """Write float32 `rows` from row `first` on of a matrix that begins at `offset`."""
        dtype = self.layout.dtype
        storage = np.dtype(STORAGE[dtype])
        target = np.frombuffer(blob, storage, rows.size, offset + first * rows.shape[1] * storage.itemsize)
        try:
            if not np.isfinite(rows).all():
                raise OverflowError
            convert("", rows.data.cast("B"), "F32", dtype, target.reshape(rows.shape))
        except (OverflowError, AdapterInvalid):
            problem = f"makes numbers that are beyond the range of {dtype}"
            raise InvalidArgument.of(f"{part.field}.weight", problem) from None


def _matrix(blob: memoryview, offset: int, rows: int, columns: int) -> NDArray[np.float32]:
    return np.frombuffer(blob, np.float32, rows * columns, offset).reshape(rows, columns)


def open_blend(blend: Blend, fetched: Sequence[Fetched], model: ModelConfig, dtype: str) -> OpenBlend:
    """Open the parts of a blend, whose files were `fetched`, and plan its blob. Blocks.

    Raises:
        DigestMismatch: as `open_adapter`.
        UnsupportedAdapter: a part is more than LoRA on linears, or the ranks of a module are too many together.
    """
    with ExitStack() as stack:
        parts: list[tuple[Part, OpenAdapter]] = []
        for part, files in zip(blend.parts, fetched, strict=True):
            parts.append((part, stack.enter_context(_open_part(part, files, model))))
        opened = OpenBlend(parts, model, dtype)
        stack.pop_all()
        return opened


def _open_part(part: Part, fetched: Fetched, model: ModelConfig) -> OpenAdapter:
    def check(binding: BindingPlan) -> None:
        if others := [kind for kind in binding.kinds if kind not in _BLENDED]:
            raise UnsupportedAdapter(
                f"{part.field}: {part.version.name} cannot be blended: it has {', '.join(others)}; only LoRA on the "
                "layers' linears can",
                metadata={"field": part.field, "adapter": part.version.name, "kinds": ",".join(others)},
            )

    folder, is_verified = fetched
    return open_adapter(folder, part.version.files, model, "float32", is_verified=is_verified, check=check)


def _layout(layouts: Sequence[BlobLayout], model: ModelConfig, dtype: str) -> BlobLayout:
    ranks: defaultdict[tuple[int, int], int] = defaultdict(int)
    for layout in layouts:
        for chunk in layout.chunks:
            for module in chunk.modules:
                ranks[chunk.layer, module.module] += module.rank
    (layer, worst), rank = max(ranks.items(), key=lambda item: item[1])
    if rank > MAX_RANK:
        raise UnsupportedAdapter(
            f"blend: {module_path(layer, worst)} has rank {rank} in all; the limit is {MAX_RANK}",
            metadata={"field": "blend", "rank": str(rank)},
        )
    modules = tuple(
        ModuleBinding(layer, module, module_path(layer, module), rank, 1.0, "", "")
        for (layer, module), rank in sorted(ranks.items())
    )
    return plan_layout(BindingPlan(modules, rank, 0, ()), model, dtype)

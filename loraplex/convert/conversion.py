"""An adapter's folder and the base model → the folder of a plain LoRA that computes the same."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loraplex.convert.adapter import GIVE_BASE, TrainedAdapter, converted_config, read_adapter
from loraplex.convert.removed import REMOVED
from loraplex.convert.tensors import read_tensor, write_tensors
from shared.adapter_format.binding import ModuleBinding
from shared.adapter_format.files import CONFIG, WEIGHTS
from shared.adapter_format.header import TensorInfo, read_header_of
from shared.adapter_format.reasons import OTHER_BASE
from shared.base_model import ModelConfig, linear_shapes, parse_config
from shared.base_weights import checkpoint_files
from shared.errors import AdapterInvalid, InvalidArgument
from shared.model_folder import load_raw_config

# Files beside the weights that say how an adapter is to be used.
_COPIED = (
    "README.md", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
)  # fmt: skip


class Conversion(NamedTuple):
    """What was done. `warnings` name modules about which PEFT's own answer depends on the machine, and a base model
    that may be another than the adapter's."""

    method: str
    num_modules: int
    rank: int
    warnings: tuple[str, ...]


def convert(source: Path, base: Path, out: Path, on_module: Callable[[int, int], None]) -> Conversion:
    """Writes the folder `out`, which appears complete or not at all.

    One linear after the other: it takes about 24 bytes of memory for each weight of the largest.

    Args:
        source: Folder of the adapter.
        base: Folder of the base model that it was trained on.
        out: Where to; must not exist.
        on_module: Told the number of linears done, and of all.

    Raises:
        InvalidArgument: `out` exists, `base` holds no whole and sound model, or there is nothing to convert.
        UnsupportedAdapter, AdapterInvalid, SourceNotFound: as `read_adapter`.
    """
    if out.exists():
        raise InvalidArgument.of("out", f"{out} exists already; choose another folder")
    model = _model(base)
    try:
        adapter = read_adapter(source, model)
    except AdapterInvalid as error:
        raise _of_base(error) from None
    weights = _linears(base, linear_shapes(model))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        folder = Path(scratch) / "adapter"
        folder.mkdir()
        warnings = [*_base_warnings(adapter, base), *_write_weights(adapter, weights, folder, on_module)]
        (folder / CONFIG).write_text(json.dumps(converted_config(adapter.config), indent=2) + "\n", encoding="utf-8")
        for name in _COPIED:
            if (adapter.folder / name).is_file():
                shutil.copyfile(adapter.folder / name, folder / name)
        folder.rename(out)
    rank = 2 * max(module.rank for module in adapter.modules)
    return Conversion(adapter.method, len(adapter.modules), rank, tuple(warnings))


def _of_base(error: AdapterInvalid) -> AdapterInvalid:
    """What binding says to who registers an adapter, as who converts one must hear it."""
    return AdapterInvalid(error.message.replace(OTHER_BASE, GIVE_BASE), metadata=error.metadata)


def _model(base: Path) -> ModelConfig:
    try:
        return parse_config(load_raw_config(base))
    except InvalidArgument as error:
        problem = f"{base} must be a folder on this machine with the base model; {error.message}"
        raise InvalidArgument.of("base", problem) from None


def _linears(base: Path, shapes: dict[str, tuple[int, int]]) -> dict[str, tuple[Path, TensorInfo]]:
    """File and header entry of every linear of the layers, by module path."""
    found: dict[str, tuple[Path, TensorInfo]] = {}
    for path in checkpoint_files(base):
        try:
            header = read_header_of(path)
        except AdapterInvalid as error:  # which speaks of adapters as a rule
            raise InvalidArgument.of("base", error.message) from None
        found |= {name.removesuffix(".weight"): (path, info) for name, info in header.items()}
    for module, shape in shapes.items():
        if module not in found or found[module][1].shape != shape:
            raise InvalidArgument.of("base", f"{module}.weight is missing, or not of the shape config.json gives it")
    return found


def _base_warnings(adapter: TrainedAdapter, base: Path) -> list[str]:
    """Other weights of the same shapes make a wrong adapter, and nothing in it tells."""
    named = adapter.config.get("base_model_name_or_path")
    if not isinstance(named, str) or not named or PurePath(named).name.lower() == base.resolve().name.lower():
        return []
    return [f"the adapter says it was trained on {named:.200}; from other weights than those it computes wrongly"]


def _write_weights(
    adapter: TrainedAdapter,
    base: dict[str, tuple[Path, TensorInfo]],
    folder: Path,
    on_module: Callable[[int, int], None],
) -> list[str]:
    """Repairs one linear after the other. Returns the warnings."""
    warnings: list[str] = []
    halves = {name for module in adapter.modules for name in (module.a, module.b, adapter.diagonals.get(module.b))}
    shapes: dict[str, tuple[int, ...]] = {}
    for module in adapter.modules:
        out, columns = adapter.tensors[module.b].shape[0], adapter.tensors[module.a].shape[1]
        shapes |= {module.a: (2 * module.rank, columns), module.b: (out, 2 * module.rank)}
    others = [name for name in adapter.tensors if name not in halves]
    shapes |= {name: adapter.tensors[name].shape for name in others}

    def arrays() -> Iterator[NDArray[np.float32]]:
        for done, module in enumerate(adapter.modules, start=1):
            yield from _repaired(adapter, module, base[module.path], warnings)
            on_module(done, len(adapter.modules))
        yield from (adapter.read(name) for name in others)

    write_tensors(folder / WEIGHTS, shapes, arrays())
    return warnings


def _repaired(
    adapter: TrainedAdapter, module: ModuleBinding, base: tuple[Path, TensorInfo], warnings: list[str]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """[A; A₀] and [B, −B₀]: s·BA less what was taken out of the weight."""
    file, info = base
    weight = read_tensor(file, f"{module.path}.weight", info).astype(np.float64)
    if not np.isfinite(weight).all():
        raise InvalidArgument.of("base", f"{module.path}.weight holds NaN or Inf")
    removed = REMOVED[adapter.method](weight, module.rank, module.scale)
    if removed.is_chance:
        warnings.append(
            f"{module.path}: {adapter.method} divides nearly equal singular values here; PEFT's own answer depends on "
            "the machine"
        )
    a, b = adapter.read(module.a), adapter.read(module.b)
    if name := adapter.diagonals.get(module.b):
        b = b * adapter.read(name)
    a_repaired = np.concatenate((a, removed.a.astype(np.float32)))
    b_repaired = np.concatenate((b, -removed.b.astype(np.float32)), axis=1)
    return a_repaired, b_repaired

"""LoraConfig + tensors of the file + base model → which tensors act on which linear, at what rank and scale."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shared.adapter_format.config import MAX_RANK, LoraConfig
from shared.adapter_format.header import TensorInfo
from shared.adapter_format.names import AdapterNames, ModuleTensors, module_name, read_names
from shared.adapter_format.patterns import NamePattern, StepBudget
from shared.adapter_format.reasons import key_unsupported, tensor_invalid, tensor_unsupported
from shared.adapter_format.targets import Targets, suffixes
from shared.base_model import ModelConfig, linear_shape, linear_shapes, module_path

SERVED_DTYPES = ("F32", "F16", "BF16")
_OTHER_FLOATS = ("F64", "F8_E4M3", "F8_E5M2")


class ModuleBinding(NamedTuple):
    """One adapted linear: y += scale · B(A x). `a` [rank, in] and `b` [out, rank] are tensor names.

    `module` indexes `shared.base_model.MODULES`; `path` is the linear's name in the base checkpoint.
    """

    layer: int
    module: int
    path: str
    rank: int
    scale: float
    a: str
    b: str


class BindingPlan(NamedTuple):
    """The adapted linears in order of (layer, module). `rank` is the greatest of theirs."""

    modules: tuple[ModuleBinding, ...]
    rank: int
    num_tensors: int
    warnings: tuple[str, ...]


def plan(config: LoraConfig, tensors: Mapping[str, TensorInfo], model: ModelConfig) -> BindingPlan:
    """Bind every tensor of an adapter to the base model, or say why that cannot be done.

    The scale is PEFT's: α/r, or α/√r with use_rslora, r and α by the first pattern in file order that matches.

    Raises:
        AdapterInvalid: a tensor is left over, missing, of the wrong shape, dtype or rank (metadata `tensor`), or a
            key contradicts the tensors (metadata `key`).
        UnsupportedAdapter: something valid for PEFT that is not served.
    """
    budget = StepBudget()
    names = read_names(tensors, model)
    warnings = _check_targets(Targets(config, budget), names, model)
    ranks = _Overrides("rank_pattern", config.rank_pattern, config.r, budget)
    alphas = _Overrides("alpha_pattern", config.alpha_pattern, config.lora_alpha, budget)
    modules = []
    for entry in names.modules:
        rank, promised = _rank(entry, tensors, model), ranks.value(entry.name)
        if rank != promised:
            raise tensor_invalid(entry.a, f"has rank {rank}; adapter_config.json says {promised:g} (r or rank_pattern)")
        scale = alphas.value(entry.name) / (math.sqrt(rank) if config.use_rslora else rank)
        path = module_path(entry.layer, entry.module)
        modules.append(ModuleBinding(entry.layer, entry.module, path, rank, scale, entry.a, entry.b))
    warnings += ranks.warnings() + alphas.warnings()
    return BindingPlan(tuple(modules), max(module.rank for module in modules), len(tensors), warnings)


def _check_targets(targets: Targets, names: AdapterNames, model: ModelConfig) -> tuple[str, ...]:
    """The modules with tensors must be the modules that the config promises. Returns warnings."""
    for other in (f"{names.head}embed_tokens", "lm_head"):
        if targets.promises(other, None):
            kind = other.rpartition(".")[2]
            raise key_unsupported("target_modules", f"{kind} is not served; target the linears of the layers only")
    places = {module_name(names.head, path): path for path in linear_shapes(model)}
    promised = {name for name in places if targets.promises(name, _layer(places[name]))}
    present = {module.name: module for module in names.modules}
    for name, module in present.items():
        if name not in promised:
            raise tensor_invalid(module.a, "target_modules and the keys beside it do not name this module")
    if missing := [name for name in places if name in promised and name not in present]:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise tensor_invalid(
            f"{names.prefix}{missing[0]}.lora_A.weight", f"is missing: target_modules promises {shown}"
        )
    if isinstance(targets.names, str):
        return ()
    known = {suffix for name in places for suffix in suffixes(name)}
    unknown = sorted(set(targets.names) - known)
    return tuple(f"target_modules names {name[:100]!r}, which this base model does not have" for name in unknown[:10])


def _layer(path: str) -> int:
    return int(path.split(".")[2])


def _rank(entry: ModuleTensors, tensors: Mapping[str, TensorInfo], model: ModelConfig) -> int:
    """The rank, which is A's first dimension, once both shapes and dtypes fit."""
    a, b = tensors[entry.a], tensors[entry.b]
    for name, info in ((entry.a, a), (entry.b, b)):
        _check_matrix(name, info)
    rows, columns = linear_shape(model, entry.module)
    rank = a.shape[0]
    if a.shape[1] != columns:
        raise tensor_invalid(entry.a, f"has shape {list(a.shape)}; the base model's linear takes [r, {columns}]")
    if b.shape != (rows, rank):
        raise tensor_invalid(entry.b, f"has shape {list(b.shape)}; the base model and lora_A take [{rows}, {rank}]")
    if rank > MAX_RANK:
        raise tensor_unsupported(entry.a, "r", f"rank {rank} is above the limit of {MAX_RANK}")
    return rank


def _check_matrix(name: str, info: TensorInfo) -> None:
    if info.dtype in _OTHER_FLOATS:
        raise tensor_unsupported(name, "dtype", f"{info.dtype} is not served; save it as float32, float16 or bfloat16")
    if info.dtype not in SERVED_DTYPES:
        raise tensor_invalid(name, f"has dtype {info.dtype}; it must be one of {', '.join(SERVED_DTYPES)}")
    if len(info.shape) != 2 or 0 in info.shape:
        raise tensor_invalid(
            name, f"has shape {list(info.shape)}, not a matrix; sharded training must gather weights before saving"
        )


class _Overrides:
    """rank_pattern or alpha_pattern: the value of the first pattern in file order that matches, as PEFT takes it."""

    def __init__(self, key: str, patterns: Sequence[tuple[str, float]], default: float, budget: StepBudget) -> None:
        self._key = key
        self._entries = [
            # what PEFT's get_pattern_key builds around a pattern
            (source, NamePattern(source, key, r"(.*\.)?({})$", whole=False), value)
            for source, value in patterns
        ]
        self._default = default
        self._budget = budget
        self._used: set[str] = set()

    def value(self, name: str) -> float:
        for source, pattern, value in self._entries:
            if pattern.matches(name, self._budget):
                self._used.add(source)
                return value
        return self._default

    def warnings(self) -> tuple[str, ...]:
        unused = [source for source, _, _ in self._entries if source not in self._used]
        return tuple(f"{self._key}: {source[:100]!r} applies to no module" for source in unused[:10])

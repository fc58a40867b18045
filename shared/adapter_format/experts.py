"""LoRA on the experts of a mixture: which tensors act on which expert. Parsed, and not served until a decoder is.

Two layouts. Fused (`target_parameters`, transformers 5): one lora_A [experts · rank, in], whose row chunk e is expert
e's, and one lora_B [out, rank · experts], where the expert's index runs fastest: columns e, e + experts, … are expert
e's. Of two targets in one module PEFT nests the wrappers, and the inner one's tensors lie under `base_layer`. By expert
(transformers 4): a pair for each expert's linear, `experts.3.gate_proj` or Mixtral's `experts.3.w1`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from shared.adapter_format.draft import check_dtype
from shared.adapter_format.header import TensorInfo
from shared.adapter_format.lora_config import LoraConfig
from shared.adapter_format.overrides import Overrides
from shared.adapter_format.patterns import StepBudget
from shared.adapter_format.reasons import (
    ONE_TRAINING,
    OTHER_BASE,
    RIGHT_RANK,
    SAVE_AGAIN,
    TRAIN_WITHOUT,
    key_invalid,
    tensor_invalid,
)

ParameterName = Literal["gate_up_proj", "down_proj"]

_FUSED = re.compile(
    r"(?P<prefix>(?:base_model\.(?:model\.)?)?)(?P<path>.+\.experts)\.(?P<inner>base_layer\.)?lora_A\.weight"
)
_BY_EXPERT = re.compile(
    r"(?P<prefix>(?:base_model\.(?:model\.)?)?)(?P<path>.+\.experts)\.(?P<expert>0|[1-9][0-9]{0,4})\."
    r"(?P<linear>gate_proj|up_proj|down_proj|w1|w2|w3)\.lora_A\.weight"
)
# Which part of which parameter a linear of one expert is.
_LINEARS: dict[str, tuple[ParameterName, int]] = {
    "gate_proj": ("gate_up_proj", 0),
    "w1": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "w3": ("gate_up_proj", 1),
    "down_proj": ("down_proj", 0),
    "w2": ("down_proj", 0),
}


class Experts(NamedTuple):
    """The experts of one layer. `path`: their module in the base checkpoint (`model.layers.0.mlp.experts`).

    gate_up_proj is [experts, 2 · intermediate, hidden] and down_proj [experts, hidden, intermediate]; with
    `is_transposed` (gpt-oss) the last two are swapped.
    """

    path: str
    num_experts: int
    hidden: int
    intermediate: int
    is_transposed: bool = False

    def shape(self, name: ParameterName) -> tuple[int, int]:
        """(out, in) of one expert."""
        return (2 * self.intermediate, self.hidden) if name == "gate_up_proj" else (self.hidden, self.intermediate)


class FusedBinding(NamedTuple):
    """ΔW of every expert e: scale · B[:, e::experts] A[e·rank : (e+1)·rank], transposed where the parameter is."""

    experts: Experts
    parameter: ParameterName
    rank: int
    scale: float
    a: str
    b: str


class ExpertBinding(NamedTuple):
    """ΔW of rows [first_row, first_row + out of B) of one expert: scale · B A."""

    experts: Experts
    parameter: ParameterName
    expert: int
    first_row: int
    rank: int
    scale: float
    a: str
    b: str


class ExpertPlan(NamedTuple):
    """`others`: the tensors that are no expert's, for `binding.plan`."""

    fused: tuple[FusedBinding, ...]
    by_expert: tuple[ExpertBinding, ...]
    others: dict[str, TensorInfo]


def plan_experts(config: LoraConfig, tensors: Mapping[str, TensorInfo], layers: Sequence[Experts]) -> ExpertPlan:
    """Bind every tensor of an expert.

    Args:
        config: Of the adapter. `target_parameters` says which parameter a lone fused pair is.
        tensors: Of its file.
        layers: The experts of the base model.

    Raises:
        AdapterInvalid: a tensor does not fit, is missing or belongs to no experts of the base model (metadata
            `tensor`), or target_parameters is combined with what PEFT cannot (metadata `key`).
    """
    if config.target_parameters:
        _check_variants(config)
    budget = StepBudget()
    scales = _Scales(config, budget)
    by_path = {experts.path: experts for experts in layers}
    others = {name: info for name, info in tensors.items() if ".experts." not in name}
    fused: list[FusedBinding] = []
    by_expert: list[ExpertBinding] = []
    used: set[str] = set(others)
    for a, info in tensors.items():
        if match := _FUSED.fullmatch(a):
            fused.append(_fused(a, info, match, by_path, tensors, scales, config))
        elif match := _BY_EXPERT.fullmatch(a):
            by_expert.append(_by_expert(a, info, match, by_path, tensors, scales))
        else:
            continue
        used |= {a, _other(a)}
    for tensor in tensors:
        if tensor not in used:
            raise tensor_invalid(tensor, "belongs to no lora_A of an expert", SAVE_AGAIN)
    _check_promised(config, fused, layers)
    return ExpertPlan(tuple(fused), tuple(by_expert), others)


class _Scales:
    """Rank and scale by the name that PEFT matches patterns against."""

    def __init__(self, config: LoraConfig, budget: StepBudget) -> None:
        self._ranks = Overrides("rank_pattern", config.rank_pattern, config.r, budget)
        self._alphas = Overrides("alpha_pattern", config.alpha_pattern, config.lora_alpha, budget)
        self._use_rslora = config.use_rslora

    def scale(self, a: str, name: str, rank: int) -> float:
        promised = self._ranks.value(name)
        if rank != promised:
            problem = f"has rank {rank}; adapter_config.json says {promised:g} (r or rank_pattern)"
            raise tensor_invalid(a, problem, RIGHT_RANK)
        return self._alphas.value(name) / (math.sqrt(rank) if self._use_rslora else rank)


def _fused(
    a: str,
    info: TensorInfo,
    match: re.Match[str],
    by_path: Mapping[str, Experts],
    tensors: Mapping[str, TensorInfo],
    scales: _Scales,
    config: LoraConfig,
) -> FusedBinding:
    experts = _experts(a, match["path"], by_path)
    targets = _names(config, experts)
    if not targets:
        raise tensor_invalid(a, "target_parameters names no parameter of these experts", SAVE_AGAIN)
    # The first one in the order of definition is wrapped first, and so lies within.
    parameter = targets[0] if match["inner"] else targets[-1]
    if match["inner"] and len(targets) == 1:
        raise tensor_invalid(a, "lies under base_layer, though target_parameters names one parameter only", SAVE_AGAIN)
    rows, columns = experts.shape(parameter)
    total = info.shape[0] if len(info.shape) == 2 else 0
    if total == 0 or total % experts.num_experts:
        problem = f"has shape {list(info.shape)}; {experts.num_experts} experts take as many equal ranks"
        raise tensor_invalid(a, problem, OTHER_BASE)
    b = _check_pair(a, tensors, (total, columns), (rows, total))
    rank = total // experts.num_experts
    scale = scales.scale(a, f"{match['path']}.{parameter}", rank)
    return FusedBinding(experts, parameter, rank, scale, a, b)


def _by_expert(
    a: str,
    info: TensorInfo,
    match: re.Match[str],
    by_path: Mapping[str, Experts],
    tensors: Mapping[str, TensorInfo],
    scales: _Scales,
) -> ExpertBinding:
    # Mixtral's experts had another parent in transformers 4.
    experts = _experts(a, match["path"].replace(".block_sparse_moe.", ".mlp."), by_path)
    expert = int(match["expert"])
    if expert >= experts.num_experts:
        raise tensor_invalid(a, f"the base model has experts 0 to {experts.num_experts - 1}", OTHER_BASE)
    parameter, part = _LINEARS[match["linear"]]
    rows, columns = experts.shape(parameter)
    if parameter == "gate_up_proj":
        rows = experts.intermediate
    rank = info.shape[0] if len(info.shape) == 2 else 0
    b = _check_pair(a, tensors, (rank, columns), (rows, rank))
    scale = scales.scale(a, f"{match['path']}.{expert}.{match['linear']}", rank)
    return ExpertBinding(experts, parameter, expert, part * rows, rank, scale, a, b)


def _experts(tensor: str, path: str, by_path: Mapping[str, Experts]) -> Experts:
    if path not in by_path:
        raise tensor_invalid(tensor, "belongs to no experts of this base model", f"{OTHER_BASE}, or remove the tensor")
    return by_path[path]


def _names(config: LoraConfig, experts: Experts) -> list[ParameterName]:
    """The parameters of `experts` that are targeted, in the order of definition."""
    names: tuple[ParameterName, ...] = ("gate_up_proj", "down_proj")
    targets = config.target_parameters
    return [name for name in names if any(f".{experts.path}.{name}".endswith(f".{target}") for target in targets)]


def _other(a: str) -> str:
    return f"{a.removesuffix('lora_A.weight')}lora_B.weight"


def _check_pair(a: str, tensors: Mapping[str, TensorInfo], a_shape: tuple[int, int], b_shape: tuple[int, int]) -> str:
    """The name of B, once both are what they must be."""
    b = _other(a)
    if b not in tensors:
        raise tensor_invalid(a, "its lora_B is missing", SAVE_AGAIN)
    for name, shape in ((a, a_shape), (b, b_shape)):
        check_dtype(name, tensors[name])
        found = tensors[name].shape
        if found == shape and 0 not in shape:
            continue
        if name == b and len(found) == 2 and found[0] == shape[0]:
            problem = f"has shape {list(found)}, not {list(shape)}: its lora_A has {shape[1]} rows"
            raise tensor_invalid(name, problem, ONE_TRAINING)
        advice = SAVE_AGAIN if math.prod(found) == math.prod(shape) > 0 else OTHER_BASE
        raise tensor_invalid(name, f"has shape {list(found)}, not {list(shape)} as the base model takes", advice)
    return b


def _check_promised(config: LoraConfig, fused: Sequence[FusedBinding], layers: Sequence[Experts]) -> None:
    present = {(binding.experts.path, binding.parameter) for binding in fused}
    for experts in layers:
        for name in _names(config, experts):
            if (experts.path, name) not in present:
                raise tensor_invalid(
                    f"{experts.path}.lora_A.weight",
                    f"is missing: target_parameters promises LoRA on {name}",
                    f"{OTHER_BASE}, or save it again",
                )


def _check_variants(config: LoraConfig) -> None:
    """PEFT's wrapper of a parameter has plain LoRA only."""
    for key, is_set in {
        "use_dora": config.use_dora,
        "lora_bias": config.lora_bias,
        "velora_config": config.velora_config,
        "use_bdlora": config.use_bdlora is not None,
        "alora_invocation_tokens": bool(config.alora_invocation_tokens),
    }.items():
        if is_set:
            raise key_invalid(key, "cannot be used with target_parameters", TRAIN_WITHOUT)

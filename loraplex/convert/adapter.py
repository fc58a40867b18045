"""An adapter's folder as the conversion needs it: how it was initialised, its tensors, ranks and scales."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loraplex.convert.tensors import read_tensor
from shared.adapter_format.binding import ModuleBinding, plan
from shared.adapter_format.config import MAX_RANK, parse_adapter_config
from shared.adapter_format.files import CONFIG, adapter_files, named_folder
from shared.adapter_format.finite import check_finite
from shared.adapter_format.header import TensorInfo, read_header_of
from shared.adapter_format.kinds.initialisation import LOST
from shared.adapter_format.reasons import SAVE_AGAIN, key_unsupported, tensor_invalid, tensor_unsupported
from shared.adapter_format.strict_json import parse_object
from shared.adapter_format.texts import check_texts_are_files
from shared.base_model import ModelConfig
from shared.errors import InvalidArgument, SourceNotFound

INIT = "init_lora_weights"
GIVE_BASE = "give with --base the folder of the base model that it was trained on"
_RETRAIN = "train again with init_lora_weights true"
# Keys with which twice the rank is not the same function, or not on linears alone.
_NOT_WITH = ("alora_invocation_tokens", "use_bdlora", "use_qalora", "target_parameters", "layer_replication")


class TrainedAdapter(NamedTuple):
    """An adapter that counts from a modified base model.

    `method`: pissa, olora or kasa. `config`: adapter_config.json. `modules`: the adapted linears with rank and scale.
    `tensors`: all of the file. `diagonals`: the name of KaSA's diagonal by that of the lora_B it belongs to.
    """

    folder: Path
    weights: Path
    method: str
    config: dict[str, Any]
    modules: tuple[ModuleBinding, ...]
    tensors: Mapping[str, TensorInfo]
    diagonals: Mapping[str, str]

    def read(self, name: str) -> NDArray[np.float32]:
        """A tensor of the file. Raises AdapterInvalid if it holds NaN or Inf."""
        array = read_tensor(self.weights, name, self.tensors[name])
        check_finite(name, "F32", array.tobytes())
        return array


def read_adapter(folder: Path, model: ModelConfig) -> TrainedAdapter:
    """What lies in `folder`, or one below by the adapter's name, bound to `model`.

    Raises:
        SourceNotFound: no such folder.
        InvalidArgument: there is nothing to convert.
        UnsupportedAdapter: it cannot be converted; says what to do.
        AdapterInvalid: the files contradict themselves or the model.
    """
    if not folder.is_dir():
        raise SourceNotFound(f"{folder} is not a folder; download the adapter first", metadata={"source": str(folder)})
    names = [path.name for path in folder.iterdir() if path.is_file()]
    folders = [path.name for path in folder.iterdir() if path.is_dir()]
    if below := named_folder(names, folders):
        return read_adapter(folder / below, model)
    files = adapter_files(names, lambda: folders)
    check_texts_are_files(names, lambda: folders)
    raw = parse_object((folder / files.config).read_bytes(), CONFIG)
    method = _method(raw)
    for key in _NOT_WITH:
        if raw.get(key):
            raise key_unsupported(key, f"an adapter of this kind cannot be converted from {method}; {_RETRAIN}")
    weights = folder / files.weights
    tensors = read_header_of(weights)
    diagonals = {name.replace("lora_diag", "lora_B.weight"): name for name in tensors if name.endswith(".lora_diag")}
    plain = {name: info for name, info in tensors.items() if name not in diagonals.values()}
    binding = plan(parse_adapter_config({**raw, INIT: True, "kasa_config": None}), plain, model)
    _check_modules(binding.modules, tensors, diagonals, method)
    return TrainedAdapter(folder, weights, method, raw, binding.modules, tensors, diagonals)


def converted_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """adapter_config.json at twice the rank and the same scale: alpha is twice, with rsLoRA √2 times what it was."""
    factor = math.sqrt(2) if config.get("use_rslora") else 2
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    return {
        **config,
        "r": 2 * (config.get("r") or 8),
        "lora_alpha": factor * (config.get("lora_alpha") or 8),
        "rank_pattern": {key: 2 * value for key, value in ranks.items()},
        "alpha_pattern": {key: factor * value for key, value in alphas.items()},
        INIT: True,
        "kasa_config": None,
    }


def _method(raw: Mapping[str, Any]) -> str:
    init = raw.get(INIT)
    name = init.lower() if isinstance(init, str) else ""
    if raw.get("kasa_config"):
        if name in ("pissa", "olora"):
            raise key_unsupported(
                "kasa_config", f"KaSA on top of {init} cannot be told apart any more; train again with one of them"
            )
        _check_not_lost(name)
        return "kasa"
    if name in ("pissa", "olora"):
        return name
    _check_not_lost(name)
    raise InvalidArgument.of(
        "source", f"{INIT} is {init!r:.60}, which leaves the base model as it is: there is nothing to convert"
    )


def _check_not_lost(name: str) -> None:
    for start, advice in LOST.items():
        if name.startswith(start):
            raise key_unsupported(INIT, f"the files do not tell what {name!r:.60} took out of the base model; {advice}")


def _check_modules(
    modules: tuple[ModuleBinding, ...], tensors: Mapping[str, TensorInfo], diagonals: Mapping[str, str], method: str
) -> None:
    """Every tensor at work is one that conversion understands, and twice the rank is served."""
    for module in modules:
        largest = min(tensors[module.b].shape[0], tensors[module.a].shape[1]) - (method == "kasa")
        if module.scale == 0:
            problem = f"has alpha 0, with which {method} takes nothing out of the linear"
            raise tensor_invalid(module.a, problem, "correct lora_alpha and alpha_pattern")
        if module.rank > largest:
            raise tensor_invalid(
                module.a, f"has rank {module.rank}; {method} takes at most {largest} out of this linear", GIVE_BASE
            )
        if 2 * module.rank > MAX_RANK:
            ranks = f"rank {module.rank} becomes {2 * module.rank}"
            advice = f"{ranks}, above the limit of {MAX_RANK}; train with a smaller rank"
            raise tensor_unsupported(module.a, "r", advice)
        if method == "kasa":
            name = diagonals.get(module.b)
            if name is None or tensors[name].shape != (module.rank,):
                expected = module.b.replace("lora_B.weight", "lora_diag")
                raise tensor_invalid(expected, f"is missing or has another shape than [{module.rank}]", SAVE_AGAIN)
    halves = {name for module in modules for name in (module.a, module.b)}
    for name in diagonals.values():
        if method != "kasa" or name.replace("lora_diag", "lora_B.weight") not in halves:
            raise tensor_invalid(name, "belongs to no linear of the adapter", "remove it")
    for name in tensors:
        if name not in halves and (
            ".lora_A." in name or ".lora_embedding_" in name or name.endswith(".base_layer.weight")
        ):
            raise tensor_unsupported(
                name, "target_modules", f"only the layers' linears are converted from {method}; {_RETRAIN}"
            )

"""adapter_config.json → LoraConfig."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shared.adapter_format.fields import FIELDS
from shared.adapter_format.files import CONFIG
from shared.adapter_format.initialisation import check_initialisation
from shared.adapter_format.reasons import file_invalid, key_invalid, key_unsupported
from shared.adapter_format.strict_json import parse_object

MAX_RANK = 512
MAX_CONFIG_BYTES = 1 << 20
MAX_ENTRIES = 4096
LARGEST_ALPHA = 1e12
# What PEFT targets on Llama, Mistral, Qwen2 and Qwen3 when target_modules is null
# (TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING).
DEFAULT_TARGETS = ("q_proj", "v_proj")
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraConfig:
    """What adapter_config.json says of a LoRA that is served. Patterns keep the order of the file, which counts.

    `target_modules`, `exclude_modules`: names, or one string that is a regular expression (or "all-linear").
    `layers_to_transform`: None for every layer.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...] | str
    exclude_modules: tuple[str, ...] | str
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    base_model_name_or_path: str | None


def parse_adapter_config(raw: bytes | Mapping[str, Any]) -> LoraConfig:
    """Read an adapter_config.json, or an object already parsed from one.

    Raises:
        AdapterInvalid: malformed, or a key has a wrong value (metadata `key` or `file`).
        UnsupportedAdapter: a key asks for what is not served (metadata `key`; the message says what to do).
    """
    if isinstance(raw, bytes):
        if len(raw) > MAX_CONFIG_BYTES:
            raise file_invalid(CONFIG, f"has {len(raw)} bytes; the limit is {MAX_CONFIG_BYTES}")
        raw = parse_object(raw, CONFIG)
    _check_served(raw)
    values = {key: raw[key] if raw.get(key) is not None else field.default for key, field in FIELDS.items()}
    check_initialisation(values["init_lora_weights"])
    config = LoraConfig(
        r=_rank("r", values["r"]),
        lora_alpha=_alpha("lora_alpha", values["lora_alpha"]),
        use_rslora=_flag("use_rslora", values["use_rslora"]),
        target_modules=_target_modules(values["target_modules"]),
        exclude_modules=_names("exclude_modules", values["exclude_modules"]),
        layers_to_transform=_layers("layers_to_transform", values["layers_to_transform"]),
        layers_pattern=_layers_pattern(values["layers_pattern"]),
        rank_pattern=_pattern("rank_pattern", values["rank_pattern"], _rank),
        alpha_pattern=_pattern("alpha_pattern", values["alpha_pattern"], _alpha),
        base_model_name_or_path=_text("base_model_name_or_path", values["base_model_name_or_path"]),
    )
    _check_layers(config)
    return config


def _check_served(raw: Mapping[str, Any]) -> None:
    """Only LoRA, and no key that is refused or unknown with a value that means something."""
    if "peft_type" not in raw:
        raise key_invalid("peft_type", "is missing")
    if raw["peft_type"] != "LORA":
        raise key_unsupported("peft_type", f"{raw['peft_type']!r:.60} is not served; only LORA is")
    for key, value in raw.items():
        field = FIELDS.get(key)
        if field is None and not _is_nothing(value):
            raise key_unsupported(key, "is not a known field, and may change what the adapter computes; remove it")
        if field and field.treatment == "refused" and not _is_nothing(value) and value != field.default:
            raise key_unsupported(key, field.advice)


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _rank(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise key_invalid(key, f"must be a whole number from 1, is {value!r:.60}")
    if value > MAX_RANK:
        raise key_unsupported(key, f"rank {value} is above the limit of {MAX_RANK}; train with a smaller rank")
    return value


def _alpha(key: str, value: Any) -> float:
    """Alpha 0 is refused: the adapter would silently do nothing."""
    if type(value) not in (int, float) or value == 0 or not abs(value) < LARGEST_ALPHA:
        raise key_invalid(key, f"must be a finite number other than zero, is {value!r:.60}")
    return float(value)


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise key_invalid(key, f"must be true or false, is {value!r:.60}")
    return value


def _text(key: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise key_invalid(key, f"must be a string, is {value!r:.60}")
    return value


def _names(key: str, value: Any) -> tuple[str, ...] | str:
    if value is None:
        return ()
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) > MAX_ENTRIES or not all(isinstance(name, str) for name in value):
        raise key_invalid(key, f"must be a string or a list of at most {MAX_ENTRIES} strings")
    return tuple(value)


def _target_modules(value: Any) -> tuple[str, ...] | str:
    targets = DEFAULT_TARGETS if value is None else _names("target_modules", value)
    if not targets:
        raise key_invalid("target_modules", "is empty")
    return targets


def _layers(key: str, value: Any) -> tuple[int, ...] | None:
    layers = [value] if type(value) is int else value
    if layers is None or layers == []:
        return None
    if not isinstance(layers, list) or len(layers) > MAX_ENTRIES or not all(type(i) is int and i >= 0 for i in layers):
        raise key_invalid(key, "must be a layer index or a list of them")
    return tuple(layers)


def _layers_pattern(value: Any) -> tuple[str, ...]:
    names = _names("layers_pattern", value)
    return tuple(name for name in ((names,) if isinstance(names, str) else names) if name)


def _pattern(key: str, value: Any, read: Callable[[str, Any], Any]) -> tuple[tuple[str, Any], ...]:
    if not isinstance(value, Mapping) or len(value) > MAX_ENTRIES:
        raise key_invalid(key, f"must be an object of at most {MAX_ENTRIES} patterns")
    return tuple((pattern, read(f"{key}.{pattern}", entry)) for pattern, entry in value.items())


def _check_layers(config: LoraConfig) -> None:
    """The combinations that PEFT's own LoraConfig refuses."""
    if isinstance(config.target_modules, str) and config.layers_to_transform is not None:
        raise key_invalid("layers_to_transform", "cannot be used with a target_modules that is a string")
    if config.layers_pattern and config.layers_to_transform is None:
        raise key_invalid("layers_pattern", "needs layers_to_transform")

"""adapter_config.json → LoraConfig."""

from collections.abc import Mapping
from typing import Any

from shared.adapter_format.fields import FIELDS
from shared.adapter_format.files import CONFIG
from shared.adapter_format.kinds import KINDS
from shared.adapter_format.lora_config import ALL_LINEAR, BlockDiagonal, LoraConfig
from shared.adapter_format.peft_types import check_type
from shared.adapter_format.reasons import TRAIN_WITHOUT, file_invalid, key_invalid, key_unsupported
from shared.adapter_format.strict_json import parse_object
from shared.adapter_format.values import MAX_RANK, is_nothing

__all__ = ["ALL_LINEAR", "MAX_CONFIG_BYTES", "MAX_RANK", "BlockDiagonal", "LoraConfig", "parse_adapter_config"]

MAX_CONFIG_BYTES = 1 << 20
_VARIANTS = ("use_dora", "use_bdlora", "alora_invocation_tokens", "velora_config")


def parse_adapter_config(raw: bytes | Mapping[str, Any]) -> LoraConfig:
    """Read an adapter_config.json, or an object already parsed from one.

    Raises:
        AdapterInvalid: malformed, or a key has a wrong value (metadata `key` or `file`).
        UnsupportedAdapter: a key asks for what is not served (metadata `key`; the message says what to do).
    """
    if isinstance(raw, bytes):
        if len(raw) > MAX_CONFIG_BYTES:
            raise file_invalid(
                CONFIG,
                f"has {len(raw)} bytes, above the limit of {MAX_CONFIG_BYTES}",
                "leave out what PEFT does not read",
            )
        raw = parse_object(raw, CONFIG)
    _check_served(raw)
    values = {
        key: field.read(key, raw[key] if raw.get(key) is not None else field.default)  # null, where PEFT loads it
        for key, field in FIELDS.items()
        if field.read is not None
    }
    config = LoraConfig(**values)
    _check_layers(config)
    _check_variants(config)
    for kind in KINDS:
        kind.check(config)
    if not config.target_modules:  # last, because PEFT leaves it empty where another key names what is trained
        raise key_invalid("target_modules", "is empty", "name the modules that the tensors belong to")
    return config


def _check_served(raw: Mapping[str, Any]) -> None:
    """Only LoRA, and no key that is refused or unknown with a value that means something."""
    if "peft_type" not in raw:
        raise key_invalid("peft_type", "is missing", "only LORA is served: name it, if the adapter is one")
    check_type(raw["peft_type"])
    for key, value in raw.items():
        field = FIELDS.get(key)
        if field is None:
            if not is_nothing(value):
                raise key_unsupported(key, "is not a known field, and may change what the adapter computes; remove it")
            continue
        field.check_form(key, value)
        if field.treatment == "refused" and not field.asks_for_nothing(value):
            raise key_unsupported(key, field.advice)


def _check_variants(config: LoraConfig) -> None:
    """PEFT has one forward pass for each of these, and none for two."""
    chosen = [key for key in _VARIANTS if getattr(config, key)]
    chosen += ["init_lora_weights"] * (config.init_lora_weights == "mica")
    if len(chosen) > 1:
        raise key_invalid(chosen[1], f"cannot be used with {chosen[0]}", TRAIN_WITHOUT)


def _check_layers(config: LoraConfig) -> None:
    """The combinations that PEFT's own LoraConfig refuses."""
    if isinstance(config.target_modules, str) and config.layers_to_transform is not None:
        raise key_invalid(
            "layers_to_transform", "cannot be used with a target_modules that is a string", "list the modules by name"
        )
    if config.layers_pattern and config.layers_to_transform is None:
        raise key_invalid("layers_pattern", "needs layers_to_transform", "name the layers there, or remove the key")

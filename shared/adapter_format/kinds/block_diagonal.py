"""BD-LoRA: A or B of a module is block-diagonal, and the file holds its blocks stacked (`ModuleBinding.blocks`)."""

from collections.abc import Mapping
from typing import Any

from shared.adapter_format import values
from shared.adapter_format.draft import Draft
from shared.adapter_format.lora_config import BlockDiagonal, LoraConfig
from shared.adapter_format.reasons import key_invalid, value_invalid
from shared.adapter_format.values import Field, used

KEY = "use_bdlora"
_LOOSE = "name it in one, or set match_strict to false if its A and B are whole"
_KEYS = {"target_modules_bd_a", "target_modules_bd_b", "nblocks", "match_strict"}


def _read(key: str, value: Any) -> BlockDiagonal | None:
    if value is None:
        return None
    if not set(value) <= _KEYS:
        raise value_invalid(key, f"an object of {', '.join(sorted(_KEYS))}")
    return BlockDiagonal(
        a=values.names(f"{key}.target_modules_bd_a", value.get("target_modules_bd_a")),
        b=values.names(f"{key}.target_modules_bd_b", value.get("target_modules_bd_b")),
        nblocks=values.count(f"{key}.nblocks", value.get("nblocks", 1)),
        is_strict=values.flag(f"{key}.match_strict", value.get("match_strict", True)),
    )


FIELDS: Mapping[str, Field] = {KEY: used(None, _read, is_group=True)}


def check(config: LoraConfig) -> None:
    """The names of the modules tell, not the config alone."""


def blocks(config: LoraConfig, name: str) -> tuple[int, int]:
    """Of how many blocks A and B of the module `name` consist.

    Raises:
        AdapterInvalid: the module is named on both sides, or on neither with match_strict.
    """
    if (bd := config.use_bdlora) is None:
        return 1, 1
    is_a, is_b = (any(part in name for part in parts) for parts in (bd.a, bd.b))
    if is_a and is_b:
        raise key_invalid(KEY, f"names {name} both in target_modules_bd_a and in target_modules_bd_b", "name it in one")
    if bd.is_strict and not (is_a or is_b):
        raise key_invalid(KEY, f"names {name} neither in target_modules_bd_a nor in target_modules_bd_b", _LOOSE)
    return bd.nblocks if is_a else 1, bd.nblocks if is_b else 1


def is_block_b(config: LoraConfig, name: str) -> bool:
    """Whether B of the module `name` is block-diagonal, if only with one block."""
    return config.use_bdlora is not None and any(part in name for part in config.use_bdlora.b)


def bind(draft: Draft) -> None:
    """`linears` and `embeddings` ask `blocks`."""

"""Fields of adapter_config.json, and how the values of those that count are read."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from shared.adapter_format.reasons import key_invalid, key_unsupported, value_invalid
from shared.json_text import as_json

MAX_RANK = 512
MAX_ENTRIES = 4096
LARGEST_ALPHA = 1e12
LARGEST_TOKEN = 1 << 24
LARGEST_COUNT = 1 << 20


class Field(NamedTuple):
    """One field, its default in PEFT's LoraConfig, and how it is treated.

    used: `read(key, value)` gives what `LoraConfig` holds under the same name.
    informational: does not change what a saved adapter computes.
    refused: changes it in a way that is not served. Must be the default, or null, false or empty; else `advice`.

    What PEFT cannot load is invalid, whatever the treatment. `is_nullable`: it loads null. `is_group`: it makes a
    configuration of the object, also of an empty one, and loads nothing else but null. `check(key, value)`: raises
    AdapterInvalid for what it does not load of a field that is not read.
    """

    default: Any
    treatment: Literal["used", "informational", "refused"]
    read: Callable[[str, Any], Any] | None = None
    advice: str = ""
    is_nullable: bool = True
    is_group: bool = False
    check: Callable[[str, Any], None] | None = None

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether the field means the same as if it were left out."""
        return value == self.default or (value is None if self.is_group else is_nothing(value))

    def check_form(self, key: str, value: Any) -> None:
        """Raises AdapterInvalid for a value that PEFT cannot load."""
        if value is None and not self.is_nullable:
            default = json.dumps(self.default)
            raise key_invalid(
                key,
                "is null, which PEFT cannot load",
                f"set it as in training; without the key PEFT takes its default, {default}",
            )
        if self.is_group and value is not None and not isinstance(value, Mapping):
            raise value_invalid(key, f"an object or null, is {as_json(value):.60}")
        if self.check is not None and value is not None:
            self.check(key, value)


def used(default: Any, read: Callable[[str, Any], Any], is_nullable: bool = True, is_group: bool = False) -> Field:
    return Field(default, "used", read, is_nullable=is_nullable, is_group=is_group)


def informational(
    default: Any,
    is_nullable: bool = True,
    is_group: bool = False,
    check: Callable[[str, Any], None] | None = None,
) -> Field:
    return Field(default, "informational", is_nullable=is_nullable, is_group=is_group, check=check)


def refused(default: Any, advice: str, is_group: bool = False) -> Field:
    return Field(default, "refused", advice=advice, is_group=is_group)


def is_nothing(value: Any) -> bool:
    """Whether a key of this value asks for nothing, if nothing else is known of it."""
    return value is None or value is False or value in ("", [], {})


def rank(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise value_invalid(key, f"a whole number from 1, is {as_json(value):.60}")
    if value > MAX_RANK:
        raise key_unsupported(key, f"rank {value} is above the limit of {MAX_RANK}; train with a smaller rank")
    return value


def alpha(key: str, value: Any) -> float:
    """Alpha 0 is refused: the adapter would silently do nothing."""
    if type(value) not in (int, float) or value == 0 or not abs(value) < LARGEST_ALPHA:
        raise value_invalid(
            key,
            f"a number other than zero, above -{LARGEST_ALPHA:g} and below {LARGEST_ALPHA:g}, is {as_json(value):.60}",
        )
    return float(value)


def alpha_of_some(key: str, value: Any) -> float:
    """As `alpha`, but 0 leaves some modules as they are."""
    return 0.0 if type(value) in (int, float) and value == 0 else alpha(key, value)


def flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise value_invalid(key, f"true or false, is {as_json(value):.60}")
    return value


def count(key: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= LARGEST_COUNT:
        raise value_invalid(key, f"a whole number from 1 to {LARGEST_COUNT}, is {as_json(value):.60}")
    return value


def text(key: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise value_invalid(key, f"a string, is {as_json(value):.60}")
    return value


def names_or_pattern(key: str, value: Any) -> tuple[str, ...] | str:
    return value if isinstance(value, str) else names(key, value, "a string or a list")


def names(key: str, value: Any, rule: str = "a list") -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_ENTRIES or not all(isinstance(name, str) for name in value):
        raise value_invalid(key, f"{rule} of at most {MAX_ENTRIES} strings, is {as_json(value):.60}")
    return tuple(value)


def token_ids(key: str, value: Any) -> tuple[int, ...]:
    """Ids in the order of the file, none of them negative."""
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < LARGEST_TOKEN for i in value):
        raise value_invalid(key, f"a list of token ids from 0 to {LARGEST_TOKEN - 1}, is {as_json(value):.60}")
    return tuple(value)


def pattern(key: str, value: Any, read: Callable[[str, Any], Any]) -> tuple[tuple[str, Any], ...]:
    """An object of values by pattern, in the order of the file."""
    if not isinstance(value, Mapping) or len(value) > MAX_ENTRIES:
        raise value_invalid(key, f"an object of at most {MAX_ENTRIES} patterns")
    return tuple((source, read(f"{key}.{source}", entry)) for source, entry in value.items())

"""JSON objects from files that tenants wrote: one reading only, no surprises."""

import json
import re
from typing import Any, NoReturn

from shared.adapter_format.mistaken import mistaken
from shared.adapter_format.reasons import COPY_AGAIN, file_invalid

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(raw: bytes, file: str) -> dict[str, Any]:
    """The JSON object in `raw`, keys in file order.

    Raises:
        AdapterInvalid: naming `file`: not UTF-8, not JSON (NaN and Infinity are not), not an object, a key twice in
            one object, nested too deeply, or a string with half a surrogate pair.
    """
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
        if _SURROGATE_ESCAPE.search(raw):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise file_invalid(
            file, f"holds {half}, which is half of a character (a surrogate pair)", "write the whole character"
        ) from None
    except UnicodeDecodeError as error:
        problem = f"is not valid JSON: byte {error.start}, 0x{raw[error.start]:02x}, is no text in UTF-8"
        raise mistaken(raw[:64], file, is_json=True) or file_invalid(file, problem, COPY_AGAIN) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        wrong = mistaken(raw[:64], file, is_json=True)
        raise wrong or file_invalid(file, f"is not valid JSON: {reason:.200}", COPY_AGAIN) from None
    if not isinstance(value, dict):
        raise file_invalid(file, "is not a JSON object", COPY_AGAIN)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r:.100} occurs twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")

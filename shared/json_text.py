"""A value of somebody's JSON in a message, as it is written there."""

import json
from typing import Any


def as_json(value: Any) -> str:
    """`true`, `null`, `{"a": "b"}`: in one line, with escapes where it would not be printable."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if text.isprintable() else json.dumps(value, default=repr)

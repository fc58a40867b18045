"""Pages of a list: sizes, and opaque tokens that remember the last key shown, so that inserts move nothing."""

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from shared.errors import InvalidArgument

DEFAULT_SIZE = 50
MAX_SIZE = 1000
MAX_TOKEN_CHARS = 1024

MAX_KEY_NUMBER = 1 << 55  # microseconds from 1970 up to the year 3111

Key = list[Any]  # of str and int


class Page(NamedTuple):
    """What to show: at most `size` entries after the key `after`, which is None on the first page."""

    size: int
    after: Key | None
    query: str  # digest of the list's name and parameters

    def next_token(self, last: Key) -> str:
        """The token of the page that begins after `last`."""
        content = json.dumps([self.query, last], separators=(",", ":"))
        return base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")


def read_page(size: int, token: str, query: str, key_types: Sequence[type]) -> Page:
    """The page that a request asks for. `query` names the list and its parameters, `key_types` its sort key.

    Raises:
        InvalidArgument: on page_size, or on a page_token that is malformed or from another list.
    """
    if size < 0:
        raise InvalidArgument.of("page_size", f"must not be negative, is {size}")
    size = min(size, MAX_SIZE) or DEFAULT_SIZE
    query = hashlib.sha256(query.encode()).hexdigest()[:16]
    if not token:
        return Page(size, None, query)
    try:
        padded = token[:MAX_TOKEN_CHARS].encode("ascii") + b"=" * (-len(token) % 4)
        for_query, after = json.loads(base64.b64decode(padded, b"-_", validate=True))
    except (ValueError, TypeError, RecursionError):
        raise InvalidArgument.of("page_token", "is not a token of this service") from None
    if for_query != query or not _is_key(after, key_types):
        raise InvalidArgument.of("page_token", "belongs to a list with other parameters")
    return Page(size, after, query)


def _is_key(value: object, types: Sequence[type]) -> bool:
    """Whether `value` is a key that `next_token` may have written; tokens are not signed."""
    if not isinstance(value, list) or [type(part) for part in value] != list(types):
        return False
    return all(
        part.isascii() and part.isprintable() if isinstance(part, str) else 0 <= part < MAX_KEY_NUMBER for part in value
    )

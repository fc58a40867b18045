"""Whether the model in a tokenizer.json has the tokens that it works with: the library reads none that has not."""

from collections.abc import Mapping

import msgspec

_Merge = str | tuple[str, str]
_MERGES = msgspec.json.Decoder(list[_Merge])


def missing_of_merges(merges: bytes, ids: Mapping[str, int], prefix: str) -> str | None:
    """What the merges of a BPE model want that its vocabulary `ids` lacks; None if nothing.

    Args:
        merges: JSON: pairs, or strings with a space between two tokens, as older files have them.
        prefix: Of tokens that go on in a word; a merge's second token loses it.

    Raises:
        msgspec.DecodeError: they are no such list.
    """
    for position, merge in enumerate(_MERGES.decode(merges)):
        if isinstance(merge, str) and merge.startswith("#version"):
            continue
        pair = tuple(merge.split(" ")) if isinstance(merge, str) else merge
        if len(pair) != 2:
            return f"merge {position} is {merge[:60]!r}, which is no pair of tokens"
        for token in (*pair, _merged(*pair, len(prefix.encode()))):
            if token not in ids:
                return f"merge {position} needs the token {token[:60]!r}, which the vocabulary lacks"
    return None


def _merged(first: str, second: str, num_bytes: int) -> str:
    return first + (second.encode()[num_bytes:].decode(errors="replace") if num_bytes else second)

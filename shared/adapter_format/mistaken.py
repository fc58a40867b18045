"""What was saved in place of an adapter's file, by how it begins: a pointer to it, a server's answer, a pickle."""

import re
from typing import NamedTuple

from shared.adapter_format.reasons import file_invalid
from shared.errors import AdapterInvalid

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PICKLE_ADVICE = "load the adapter with PEFT and save it again with safe_serialization=True"
_DOWNLOAD = "download the file itself, from its `resolve` address on the Hub, or with a token if it asks for one"


class _Mistake(NamedTuple):
    """A file that begins with `start` is `problem`; `advice`: how to get the right one."""

    start: re.Pattern[bytes]
    problem: str
    advice: str


# Eight bytes must tell: no more is read of weights whose header has an absurd length. And three must count, so that the
# length of a good header, which is these eight bytes, is none of them unless it has megabytes.
_POINTER = _Mistake(
    re.compile(rb"version "), "is a Git LFS pointer, not the file that it stands for", "fetch that with `git lfs pull`"
)
_PAGE = _Mistake(re.compile(rb"<[!?]?[A-Za-z-]{2}"), "is a web page, or a server's answer in XML", _DOWNLOAD)
_MISTAKES = (
    _POINTER,
    _PAGE,
    _Mistake(re.compile(rb"PK\x03\x04"), "is a zip archive, as torch.save writes: a pickle", _PICKLE_ADVICE),
    _Mistake(re.compile(rb"\x80[\x02-\x05][\x28-\x97]"), "is a pickle", _PICKLE_ADVICE),
    _Mistake(re.compile(rb"\x1f\x8b\x08"), "is compressed with gzip", "unpack it"),
    _Mistake(
        re.compile(rb"GGUF"), "is a GGUF file, which llama.cpp reads", "take the adapter as PEFT saved it before that"
    ),
)
_JSON = _Mistake(re.compile(rb'\{\s*"\w'), "is JSON: perhaps a server's error", _DOWNLOAD)
_OF_TEXT = (
    _POINTER._replace(start=re.compile(rb"version https://git-lfs")),
    _PAGE._replace(start=re.compile(rb"(?i)<!doctype html|<html|<\?xml")),
)


def mistaken(start: bytes, file: str, *, is_json: bool = False) -> AdapterInvalid | None:
    """The error for `file`, which begins with `start` and cannot be read; None if that does not tell what it is.

    `is_json`: it should be JSON, else binary.
    """
    found = _first(_MISTAKES if is_json else (*_MISTAKES, _JSON), start, file)
    if found is None and is_json and start.startswith(_BYTE_ORDER_MARK):
        return file_invalid(file, "begins with a byte order mark, which is no part of JSON", "save it as UTF-8 without")
    return found


def mistaken_text(start: bytes, file: str) -> AdapterInvalid | None:
    """Likewise for a file in which any text could be meant."""
    return _first(_OF_TEXT, start, file)


def _first(mistakes: tuple[_Mistake, ...], start: bytes, file: str) -> AdapterInvalid | None:
    start = start.removeprefix(_BYTE_ORDER_MARK).lstrip()
    found = next((mistake for mistake in mistakes if mistake.start.match(start)), None)
    return found and file_invalid(file, found.problem, found.advice)

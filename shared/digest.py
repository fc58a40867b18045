"""The content digest that identifies an adapter version everywhere: in names, caches, slots, metrics and replies."""

import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from shared.errors import InvalidArgument

_HEX = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HEADER = b"loraplex-manifest-v1\n"


class FileEntry(NamedTuple):
    """One file of an adapter: `/`-separated path relative to its folder, bytes, sha256 as 64 lowercase hex digits."""

    path: str
    size: int
    sha256: str


def manifest_digest(files: Iterable[FileEntry]) -> str:
    """`sha256:HEX` over the sorted list of files.

    Canonical encoding: the line `loraplex-manifest-v1`, then for each file, ordered by the UTF-8 bytes of its path,
    the line `SHA256 SIZE PATH`; each line ends in one newline. The order of `files` does not matter.

    Raises:
        InvalidArgument: there is no file, a path occurs twice or cannot be encoded unambiguously, or a size or
            sha256 is malformed.
    """
    entries = sorted(files, key=lambda entry: entry.path.encode("utf-8", "surrogatepass"))
    if not entries:
        raise InvalidArgument.of("manifest.files", "must not be empty")
    for entry in entries:
        _check(entry)
    if len({entry.path for entry in entries}) != len(entries):
        raise InvalidArgument.of("manifest.files", "a path occurs twice")
    lines = (f"{entry.sha256} {entry.size} {entry.path}\n".encode() for entry in entries)
    return f"sha256:{hashlib.sha256(_HEADER + b''.join(lines)).hexdigest()}"


def _check(entry: FileEntry) -> None:
    if not entry.path.isprintable() or any(part in ("", ".", "..") for part in entry.path.split("/")):
        raise InvalidArgument.of("manifest.files.path", f"{entry.path!r:.200} is not a plain relative path")
    if not isinstance(entry.size, int) or entry.size < 0:
        raise InvalidArgument.of("manifest.files.size_bytes", f"{entry.size!r:.40} is not a size in bytes")
    if not _HEX.fullmatch(entry.sha256):
        raise InvalidArgument.of("manifest.files.sha256", f"{entry.sha256!r:.80} is not 64 lowercase hex digits")


def check_digest(text: str, field: str) -> str:
    """`text` if it is `sha256:` and 64 lowercase hex digits, else InvalidArgument naming `field`."""
    if not _DIGEST.fullmatch(text):
        raise InvalidArgument.of(field, f"{text!r:.100} is not sha256: and 64 lowercase hex digits")
    return text

"""Reads an adapter's tokenizer and chat-template files out of the disk cache."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from shared.digest import FileEntry
from shared.errors import DigestMismatch


def read_text_files(folder: Path, files: Iterable[FileEntry]) -> dict[str, bytes]:
    """Their content by name. Blocks.

    Raises:
        DigestMismatch: a file is not what was registered, or cannot be read.
    """
    return {file.path: _read(folder / file.path, file) for file in files}


def _read(path: Path, file: FileEntry) -> bytes:
    metadata = {"file": file.path, "sha256": file.sha256}
    try:
        with path.open("rb") as stream:
            data = stream.read(file.size + 1)
    except OSError as error:
        raise DigestMismatch(f"{file.path} in the cache: {error.strerror}", metadata=metadata) from None
    if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
        raise DigestMismatch(f"{file.path} in the cache is not what was registered", metadata=metadata)
    return data

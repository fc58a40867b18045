"""Reads an adapter's tokenizer and chat-template files out of the disk cache."""

from collections.abc import Iterable
from pathlib import Path

from inference_service.adapters.cached_file import read_verified
from shared.digest import FileEntry


def read_text_files(folder: Path, files: Iterable[FileEntry]) -> dict[str, bytes]:
    """Their content by name. Blocks.

    Raises:
        DigestMismatch: a file is not what was registered, or cannot be read.
    """
    return {file.path: read_verified(folder / file.path, file) for file in files}

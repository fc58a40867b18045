"""Reads the tokenizer and the chat template that an adapter brings: hashes them, and finds what can never work.

They are a tenant's code: they are run on replicas only, in processes that can be ended. Here they are parsed.
"""

import tempfile
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from typing import IO, NamedTuple

from registry_service import file_stream
from registry_service.file_stream import FileStream
from shared.adapter_format.text_checks import TextFacts, check_texts
from shared.adapter_format.texts import MAX_BYTES, SPECIAL_TOKENS, TOKENIZER, TOKENIZER_CONFIG
from shared.base_model import ModelConfig
from shared.digest import FileEntry
from shared.errors import SourceUnavailable
from shared.sources.resolver import Source

# Larger files are not looked into: what all threads keep at once fits into a GB, most of it on disk.
LOOKED_INTO_BYTES = {**MAX_BYTES, TOKENIZER: 20 << 20, TOKENIZER_CONFIG: 2 << 20, SPECIAL_TOKENS: 64 << 10}
_IN_MEMORY_BYTES = 2 << 20
_PARSING = threading.Lock()  # one adapter's at a time: parsed they take many times their bytes


class AdapterTexts(NamedTuple):
    """The text files, in the order of their names, and what is known of them."""

    files: tuple[FileEntry, ...]
    facts: TextFacts


def read_texts(source: Source, names: Iterable[str], model: ModelConfig) -> AdapterTexts:
    """Read the text files `names` of an adapter of the base model `model`.

    Raises:
        AdapterInvalid: one is too large, or can never work (metadata `file`).
        SourceUnavailable: one cannot be read, or changed while it was.
    """
    entries, unread = [], []
    with ExitStack() as stack:
        kept: dict[str, IO[bytes]] = {}
        for name in names:
            copy = stack.enter_context(tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES))
            entry = _read(source, name, copy)
            entries.append(entry)
            if entry.size <= LOOKED_INTO_BYTES[name]:
                kept[name] = copy
            else:
                unread.append(f"{name} has {entry.size} bytes and was not looked into")
        with _PARSING:
            facts = check_texts({name: _content(copy) for name, copy in kept.items()}, model)
    return AdapterTexts(tuple(entries), facts._replace(doubts=(*unread, *facts.doubts)))


def _read(source: Source, name: str, copy: IO[bytes]) -> FileEntry:
    with source.open(name) as file:
        stream = FileStream(file, name, MAX_BYTES[name])
        while chunk := stream.read(file_stream.CHUNK_BYTES):
            if stream.size <= LOOKED_INTO_BYTES[name]:
                _keep(copy, chunk, name)
        return stream.finish()


def _keep(copy: IO[bytes], chunk: bytes, name: str) -> None:
    try:
        copy.write(chunk)
    except OSError as error:
        raise SourceUnavailable(
            f"{name} cannot be kept in the registry's temporary folder while it is read: {error.strerror}",
            metadata={"file": name},
        ) from None


def _content(copy: IO[bytes]) -> bytes:
    copy.seek(0)
    return copy.read()

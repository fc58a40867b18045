"""A file of a source, read once from beginning to end: its entry in the manifest is of the bytes that passed."""

import hashlib

from shared.digest import FileEntry
from shared.errors import AdapterInvalid, SourceUnavailable
from shared.sources.resolver import SourceFile

CHUNK_BYTES = 1 << 20


class FileStream:
    """Reads `file`, called `name`, hashing what passes.

    Raises:
        AdapterInvalid: it has more than `limit` bytes (metadata `file`, `limit`).
    """

    def __init__(self, file: SourceFile, name: str, limit: int) -> None:
        self._file = file
        self._name = name
        self._hash = hashlib.sha256()
        self._offset = 0
        self.size = file.size
        if self.size > limit:
            raise AdapterInvalid(
                f"{name} has {self.size} bytes; the limit is {limit}", metadata={"file": name, "limit": str(limit)}
            )

    def read(self, count: int) -> bytes:
        """The next `count` bytes, fewer only at the end that the file had when it was opened."""
        wanted = min(count, self.size - self._offset)
        parts: list[bytes] = []
        while wanted:
            try:
                part = self._file.read(wanted)
            except OSError as error:
                raise self._unavailable(f"cannot be read: {error.strerror}") from None
            if not part:
                raise self._unavailable("was truncated while it was read")
            parts.append(part)
            wanted -= len(part)
        content = b"".join(parts)
        self._hash.update(content)
        self._offset += len(content)
        return content

    def finish(self) -> FileEntry:
        """The file's entry in the manifest, if it is still the file that was opened."""
        if not self._file.is_unchanged():
            raise self._unavailable("changed while it was read")
        return FileEntry(self._name, self.size, self._hash.hexdigest())

    def _unavailable(self, problem: str) -> SourceUnavailable:
        return SourceUnavailable(f"{self._name} {problem}", metadata={"file": self._name})

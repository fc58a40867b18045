"""A file of the disk tier. It lies where others may write, so nothing that was read counts before its hash is right."""

import hashlib
import os
from pathlib import Path

from shared.adapter_format.header import MAX_HEADER_BYTES
from shared.digest import FileEntry
from shared.errors import DigestMismatch

_PIECE_BYTES = 1 << 20


class CachedFile:
    """An open file that the manifest calls `entry`. Close it after use.

    `is_verified`: it was hashed a moment ago, as it was written, and need not be hashed again.

    Raises:
        DigestMismatch: it is missing, or has another size; as every call, where it cannot be read or is cut short.
    """

    def __init__(self, path: Path, entry: FileEntry, *, is_verified: bool) -> None:
        self.entry = entry
        self.is_verified = is_verified
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._damaged(error.strerror) from None
        if (size := os.fstat(self._fd).st_size) != entry.size:
            self.close()
            raise self._damaged(f"has {size} bytes instead of {entry.size}")

    def close(self) -> None:
        os.close(self._fd)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset` on. Never a mapping: a file that is cut short must be an error, not a SIGBUS."""
        while view:
            try:
                count = os.preadv(self._fd, [view], offset)
            except OSError as error:
                raise self._damaged(error.strerror) from None
            if not count:
                raise self._damaged("was cut short while it was read")
            view, offset = view[count:], offset + count

    def read_head(self) -> bytes:
        """Of a safetensors file, the bytes before the first tensor, as far as there are such."""
        prefix = bytearray(min(8, self.entry.size))
        self.read_into(memoryview(prefix), 0)
        length = min(8 + int.from_bytes(prefix, "little"), 8 + MAX_HEADER_BYTES, self.entry.size)
        head = bytearray(length)
        self.read_into(memoryview(head), 0)
        return bytes(head)

    def check_hash(self) -> None:
        """Something is wrong with what was read: is it what was registered?

        Raises:
            DigestMismatch: it is not.
        """
        if self.is_verified:
            return
        hasher = hashlib.sha256()
        buffer = memoryview(bytearray(_PIECE_BYTES))
        for offset in range(0, self.entry.size, _PIECE_BYTES):
            piece = buffer[: min(_PIECE_BYTES, self.entry.size - offset)]
            self.read_into(piece, offset)
            hasher.update(piece)
        self.compare(hasher.hexdigest())

    def compare(self, sha256: str) -> None:
        """Raises DigestMismatch unless this is the hash of the file that was registered."""
        if sha256 != self.entry.sha256:
            raise self._damaged("is not what was registered")

    def _damaged(self, problem: str | None) -> DigestMismatch:
        metadata = {"file": self.entry.path, "sha256": self.entry.sha256}
        advice = "it is fetched again by itself; look at the disk if this happens often"
        return DigestMismatch(f"{self.entry.path} in the cache {problem}; {advice}", metadata=metadata)


def read_verified(path: Path, entry: FileEntry) -> bytes:
    """All of a small file.

    Raises:
        DigestMismatch: it is missing, cannot be read, or is not what was registered.
    """
    file = CachedFile(path, entry, is_verified=False)
    try:
        data = bytearray(entry.size)
        file.read_into(memoryview(data), 0)
    finally:
        file.close()
    file.compare(hashlib.sha256(data).hexdigest())
    return bytes(data)

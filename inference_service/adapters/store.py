"""The host tier: which packed blobs lie where in the host arena, and which may go when room is needed."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from inference_service.lora.gaps import Range, coalesce, complement, fit, round_up
from inference_service.stats import Usage
from inference_service.types import BlobLayout
from shared.errors import AdapterMemory

BUSY_RETRY_SECONDS = 0.5


class StagedBlob(NamedTuple):
    """A blob in the host arena, `offset` bytes from its start."""

    offset: int
    layout: BlobLayout


@dataclass
class _Entry:
    """`references`: Acquires without their Release. `is_ready`: filled. `is_dropped`: goes with the last reference."""

    blob: StagedBlob
    references: int = 0
    is_ready: bool = False
    is_dropped: bool = False

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.references


class _Part(NamedTuple):
    """A blob, or a gap, without a digest. `age`: 0 for the blob used the longest ago, then 1 …; None: it must stay."""

    span: Range
    digest: str
    age: int | None


def _oldest_neighbours(parts: Iterable[_Part], need: int) -> list[str]:
    """Blobs whose going leaves a gap of `need` bytes: of all such runs, the one whose youngest blob is the oldest."""
    best: tuple[list[int], list[str]] = ([], [])
    run: deque[_Part] = deque()
    size = 0
    for part in parts:
        if part.age is None:
            run.clear()
            size = 0
            continue
        run.append(part)
        size += part.span.size
        while size - run[0].span.size >= need:
            size -= run.popleft().span.size
        if size >= need:
            ages = sorted((member.age for member in run if member.age is not None), reverse=True)
            if not best[0] or ages < best[0]:
                best = ages, [member.digest for member in run if member.digest]
    return best[1]


class HostStore:
    """An LRU over `nbytes` of arena. What is being filled or is referenced is never evicted. One thread only."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.num_evicted = 0
        self._gaps = coalesce([Range(0, nbytes)])
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first

    def reserve(self, digest: str, layout: BlobLayout) -> int:
        """Offset for a new blob, which the caller fills and then commits or aborts; evicts what it must.

        Raises:
            AdapterMemory: the blob is larger than the arena, or (with `retry_after`) what is in use leaves no room.
        """
        assert digest not in self._entries
        self._check_possible(digest, layout.nbytes)
        if fit(self._gaps, [round_up(layout.nbytes)]) is None:
            self._evict_for(round_up(layout.nbytes))
        place = fit(self._gaps, [round_up(layout.nbytes)])
        assert place is not None
        self._gaps = place.gaps
        blob = StagedBlob(place.offsets[0], layout)
        self._entries[digest] = _Entry(blob)
        return blob.offset

    def commit(self, digest: str) -> None:
        """The blob is filled."""
        self._entries[digest].is_ready = True
        self._entries.move_to_end(digest)

    def abort(self, digest: str) -> None:
        """The blob could not be filled; its bytes are free."""
        self._remove(digest)

    def find(self, digest: str) -> BlobLayout | None:
        """The layout of a filled blob, which counts as used now."""
        entry = self._entries.get(digest)
        if entry is None or not entry.is_ready:
            return None
        entry.is_dropped = False
        self._entries.move_to_end(digest)
        return entry.blob.layout

    def acquire(self, digest: str) -> StagedBlob | None:
        """A filled blob with one more reference, or None."""
        if self.find(digest) is None:
            return None
        self._entries[digest].references += 1
        return self._entries[digest].blob

    def release(self, digest: str) -> bool:
        """Gives one reference back; False if there is none."""
        entry = self._entries.get(digest)
        if entry is None or not entry.references:
            return False
        entry.references -= 1
        if entry.is_dropped and entry.is_idle:
            self._remove(digest)
        return True

    def release_all(self) -> None:
        """Gives every reference back: their holder died."""
        for digest, entry in list(self._entries.items()):
            entry.references = 0
            if entry.is_dropped and entry.is_idle:
                self._remove(digest)

    def drop(self, digest: str) -> int:
        """Forgets a filled blob, at once or when its last reference goes. Its bytes; 0 if there is none."""
        entry = self._entries.get(digest)
        if entry is None or not entry.is_ready:
            return 0
        if entry.is_idle:
            self._remove(digest)
        else:
            entry.is_dropped = True
        return entry.blob.layout.nbytes

    def entries(self) -> Iterator[tuple[str, BlobLayout]]:
        """Digest and layout of the filled blobs, least recently used first."""
        return ((digest, entry.blob.layout) for digest, entry in self._entries.items() if entry.is_ready)

    @property
    def usage(self) -> Usage:
        """Bytes of blobs, and in all."""
        return Usage(self._nbytes - sum(gap.size for gap in self._gaps), self._nbytes)

    @property
    def held_bytes(self) -> int:
        """Bytes of what may not be evicted now."""
        return sum(_span(entry).size for entry in self._entries.values() if not entry.is_idle)

    def check_integrity(self) -> None:
        """Blobs and gaps tile the arena. Raises AssertionError."""
        blobs = [_span(entry) for entry in self._entries.values()]
        assert complement(blobs, self._nbytes) == self._gaps
        assert sum(span.size for span in (*blobs, *self._gaps)) == self._nbytes, "blobs overlap"
        assert all(entry.references >= 0 for entry in self._entries.values())

    def _check_possible(self, digest: str, nbytes: int) -> None:
        """Nothing is evicted for a blob that would not fit even if everything idle were."""
        need, total = round_up(nbytes), self._nbytes
        metadata = {"digest": digest, "tier": "host"}
        if need > total:
            message = f"the adapter takes {need} bytes of host memory; all there is is {total}: raise --host-memory"
            raise AdapterMemory(message, metadata=metadata)
        busy = [_span(entry) for entry in self._entries.values() if not entry.is_idle]
        if fit(complement(busy, total), [need]) is None:
            message = f"no {need} bytes of host memory are free of adapters in use: raise --host-memory, or retry"
            raise AdapterMemory(message, metadata=metadata, retry_after=BUSY_RETRY_SECONDS)

    def _evict_for(self, need: int) -> None:
        """Make a gap of `need` bytes where blobs have gone that were used the longest ago.

        A blob is one piece, so the least recently used ones alone may not do: neighbours must go.
        """
        victims = _oldest_neighbours(self._parts(), need)
        for digest in victims:
            self._remove(digest)
        self.num_evicted += len(victims)

    def _parts(self) -> list[_Part]:
        """What lies in the arena, in order."""
        ages = {digest: age for age, digest in enumerate(self._entries)}
        blobs = [_Part(_span(e), digest, ages[digest] if e.is_idle else None) for digest, e in self._entries.items()]
        return sorted([*blobs, *(_Part(gap, "", -1) for gap in self._gaps)], key=lambda part: part.span)

    def _remove(self, digest: str) -> None:
        self._gaps = coalesce([*self._gaps, _span(self._entries.pop(digest))])


def _span(entry: _Entry) -> Range:
    return Range(entry.blob.offset, entry.blob.offset + round_up(entry.blob.layout.nbytes))

"""What adapters are called: version names and ranks by digest, one small JSON file a digest, kept over restarts.

They outlive an adapter's files, for the engine may hold what the disk does not any more.
"""

import json
import logging
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock

log = logging.getLogger(__name__)

MAX_REMEMBERED = 10_000
_PREFIX = "sha256:"


class AdapterNames:
    """Names under `folder`. Losing one harms nobody, so whatever goes wrong with a file is only logged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = Lock()
        self._names: dict[str, dict[str, int]] = {}
        try:
            folder.mkdir(exist_ok=True)
            files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        except OSError as error:
            log.warning("the names of cached adapters are not known: %s", error)
            return
        for path in files[:MAX_REMEMBERED]:
            self._names[_PREFIX + path.stem] = _read(path)
        for path in files[MAX_REMEMBERED:]:
            with suppress(OSError):
                path.unlink()

    def of(self, digest: str) -> Mapping[str, int]:
        """Rank by version name; empty if the digest was never resolved here."""
        with self._lock:
            return dict(self._names.get(digest, {}))

    def remember(self, digest: str, version: str, rank: int) -> None:
        """The digest was resolved from `version`. Blocks if that is news."""
        with self._lock:
            names = self._names.setdefault(digest, {})
            if names.get(version) == rank:
                return
            names[version] = rank
            text = json.dumps(names)
        path = self._folder / f"{digest.removeprefix(_PREFIX)}.json"
        fresh = self._folder / f"{uuid.uuid4().hex}.new"
        try:
            fresh.write_text(text)
            fresh.rename(path)
        except OSError as error:
            log.debug("the name of %s is not kept: %s", digest, error)
            with suppress(OSError):
                fresh.unlink()


def _read(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: rank for name, rank in found.items() if type(rank) is int}

"""Which folder of a source is the adapter's: the one that was named, or the one right below that has its name."""

import threading
from collections import deque
from typing import NamedTuple, Protocol
from urllib.parse import quote

from shared.adapter_format.files import CONFIG, named_folder
from shared.adapter_format.reasons import file_invalid
from shared.errors import AdapterInvalid, SourceForbidden, SourceNotFound, SourceUnavailable
from shared.sources.policy import SourcePolicy
from shared.sources.resolver import FolderedSource, PinnedSource, Source, open_source

MAX_LOOKED_INTO = 16  # folders, for advice alone


class Origin(NamedTuple):
    """What the caller names as an adapter's source, and the namespace that reads it."""

    uri: str
    credential_ref: str
    namespace: str


class AdapterFolder(NamedTuple):
    """The folder with the adapter's files. `above`: what lies beside it, where another one was named."""

    source: Source
    names: list[str]
    above: list[str]


def adapter_folder(origin: Origin, policy: SourcePolicy, stopping: threading.Event) -> AdapterFolder:
    """`origin`, or the folder in it that has the adapter's name.

    Raises:
        AdapterInvalid: it is not there, but deeper, or there are several: the text says which to name (`file`).
        LoraplexError: as `open_source`.
    """

    def opened(path: str) -> Source:
        uri = f"{origin.uri.rstrip('/')}/{path}" if path else origin.uri
        asked = PinnedSource(uri, credential_ref=origin.credential_ref)
        return open_source(asked, origin.namespace, policy, stopping)

    source = opened("")
    names = source.list()
    if CONFIG in names or not isinstance(source, FolderedSource):
        return AdapterFolder(source, names, [])
    found, path = AdapterFolder(source, names, []), ""
    try:
        folder = named_folder(names, source.folders())
    except AdapterInvalid:
        if (config := _config_below(found, path, opened)).count("/") > 1:
            raise _lies_deeper(config) from None
        raise
    if folder is not None:
        below = opened(folder)
        found, path = AdapterFolder(below, below.list(), names), folder
    if CONFIG not in found.names and (config := _config_below(found, path, opened)):
        raise _lies_deeper(config)
    return found


def _lies_deeper(config: str) -> AdapterInvalid:
    return file_invalid(CONFIG, "is missing from the adapter's folder", f"{config[:200]} exists: name that folder")


class _Open(Protocol):
    def __call__(self, path: str, /) -> Source: ...


def _config_below(found: AdapterFolder, path: str, opened: _Open) -> str:
    """Path of the nearest config below the folder `path`, or empty: only so many folders are looked into."""
    waiting, left = deque([(path, found.source, found.names)]), MAX_LOOKED_INTO
    while waiting:
        path, source, names = waiting.popleft()
        prefix = f"{path}/" if path else ""
        if inside := [name for name in names if name == CONFIG or name.endswith(f"/{CONFIG}")]:
            return prefix + min(inside, key=lambda name: (name.count("/"), name))
        if not isinstance(source, FolderedSource) or any("/" in name for name in names):
            continue  # it has no folders, or has listed them as well
        for folder in [folder for folder in source.folders() if quote(folder) == folder][:left]:
            left -= 1
            try:
                below = opened(f"{prefix}{folder}")
                waiting.append((f"{prefix}{folder}", below, below.list()))
            except (SourceForbidden, SourceNotFound):
                continue
            except SourceUnavailable:
                return ""
    return ""

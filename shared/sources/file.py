"""Adapter folders on a filesystem: `file://ROOT/relative/path`, or `file:///absolute/path` below one of the roots.

Nothing outside the roots is ever opened: names are resolved first, and what was opened is checked once more, so a
symbolic link swapped in between is seen too.
"""

import errno
import io
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from urllib.parse import quote, unquote

from shared.errors import InvalidArgument, SourceForbidden, SourceNotFound, SourceUnavailable
from shared.sources import advice
from shared.sources.policy import Access
from shared.sources.resolver import URI_FIELD, PinnedSource

MAX_LISTED = 10_000


class LocalFile(io.FileIO):
    """An open regular file."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "rb")
        self._opened = os.fstat(fd)
        self.size = self._opened.st_size

    def read(self, count: int | None = -1, /) -> bytes:
        """At most `count` of the next bytes; none at the end. Raises OSError."""
        return super().read(-1 if count is None else count) or b""

    def is_unchanged(self) -> bool:
        """Whether it has the size and the time of modification that it was opened with."""
        now = os.fstat(self.fileno())
        return (now.st_size, now.st_mtime_ns) == (self.size, self._opened.st_mtime_ns)


class FileSource:
    """A folder below a root. `%` escapes bytes in the URI, as in any URI."""

    def __init__(self, source: PinnedSource, access: Access) -> None:
        self._uri = source.uri
        self._credential_ref = source.credential_ref
        name, path = _split(source.uri)
        roots = access.roots
        real_roots = {root: os.path.realpath(folder) for root, folder in roots.items()}
        if not name:
            name, self._folder = self._below_a_root(path, real_roots)
        elif name in real_roots:
            self._folder = os.path.realpath(Path(real_roots[name], path.lstrip("/")))
        else:
            raise self._forbidden(f"no file root is called {name!r:.60}; {advice.name_a_root([*roots])}")
        self._root_name, self._root = name, real_roots[name]
        self._is_allowed = access.is_allowed
        self._check_allowed(self._folder, "the folder")
        with self._folder_fd():
            pass

    def _below_a_root(self, path: str, real_roots: Mapping[str, str]) -> tuple[str, str]:
        folder = os.path.realpath(path)
        around = [(root, name) for name, root in real_roots.items() if _is_inside(folder, root)]
        if not around:
            below = "an absolute path must lie below one of the file roots"
            raise self._forbidden(f"{below}; {advice.name_a_root([*real_roots])}")
        return max(around, key=lambda pair: len(pair[0]))[1], folder

    def pin(self) -> PinnedSource:
        """The root's name and the folder's real path below it."""
        return PinnedSource(self._canonical(self._folder), credential_ref=self._credential_ref)

    def list(self) -> list[str]:
        """Printable names of the folder's files, sorted; at most 10,000 entries are looked at."""
        return [*self._entries(of_folders=False)]

    def folders(self) -> tuple[str, ...]:
        """Printable names of the folders right below, sorted; at most 10,000 entries are looked at."""
        return self._entries(of_folders=True)

    def _entries(self, of_folders: bool) -> tuple[str, ...]:
        with self._folder_fd() as fd:
            try:
                with os.scandir(fd) as entries:
                    looked_at = islice(entries, MAX_LISTED)
                    names = [entry.name for entry in looked_at if _is_folder(entry) == of_folders]
            except OSError as error:
                raise self._failed(error, "") from None
        return tuple(sorted(name for name in names if name.isprintable()))

    def open(self, name: str) -> LocalFile:
        """One regular file."""
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise self._forbidden(f"{name!r:.100} is not a plain file name; name a file of the folder itself", name)
        path = os.path.realpath(Path(self._folder, name))
        if not _is_inside(path, self._root):
            raise self._forbidden(f"{name} is a symbolic link that leaves the file root; {advice.PLAIN_FILES}", name)
        self._check_allowed(path, name, name)
        # O_NONBLOCK: opening a FIFO must not wait for its writer.
        fd = self._opened(path, os.O_NONBLOCK, name)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise self._forbidden(f"{name} is not a regular file; {advice.PLAIN_FILES}", name)
        return LocalFile(fd)

    @contextmanager
    def _folder_fd(self) -> Iterator[int]:
        if not _is_inside(self._folder, self._root):
            raise self._forbidden(
                "the folder is a symbolic link that leaves the file root; put the folder itself there"
            )
        fd = self._opened(self._folder, os.O_DIRECTORY)
        try:
            yield fd
        finally:
            os.close(fd)

    def _canonical(self, path: str) -> str:
        relative = os.path.relpath(path, self._root)
        below = "" if relative == "." else quote(relative, errors="surrogateescape")
        return f"file://{quote(self._root_name)}/{below}"

    def _check_allowed(self, path: str, what: str, name: str = "") -> None:
        """What a symbolic link leads to must be allowed as well."""
        if not self._is_allowed(self._canonical(path)):
            raise self._forbidden(f"{what} lies where this namespace may not read; {advice.ALLOW_SOURCE}", name)

    def _opened(self, path: str, flags: int, name: str = "") -> int:
        """A file descriptor of `path`, which has no symbolic links left; checked to lie inside the root."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
        except OSError as error:
            raise self._failed(error, name) from None
        if not _is_inside(str(Path(f"/proc/self/fd/{fd}").readlink()), self._root):
            os.close(fd)
            raise self._forbidden(
                "the path left the file root while it was opened; change no links of a folder that is read", name
            )
        return fd

    def _failed(self, error: OSError, name: str) -> SourceNotFound | SourceForbidden | SourceUnavailable:
        what = f"{name} in {self._uri}" if name else self._uri
        match error:
            case FileNotFoundError() | NotADirectoryError():
                problem = "is not a folder" if isinstance(error, NotADirectoryError) else "does not exist"
                return SourceNotFound(f"{what} {problem}; {advice.ABSENT}", metadata=self._metadata(name))
            case PermissionError():
                return self._forbidden(f"{what}: the service may not read it; {advice.READABLE}", name)
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return SourceNotFound(f"{what}: {error.strerror}; {advice.ABSENT}", metadata=self._metadata(name))
        return SourceUnavailable(f"{what} cannot be read: {error.strerror}", metadata=self._metadata(name))

    def _forbidden(self, message: str, name: str = "") -> SourceForbidden:
        return SourceForbidden(message, metadata=self._metadata(name))

    def _metadata(self, name: str) -> dict[str, str]:
        return {"uri": self._uri, "file": name} if name else {"uri": self._uri}


def _split(uri: str) -> tuple[str, str]:
    """Root's name (empty for an absolute path) and path, unescaped."""
    name, slash, path = unquote(uri.removeprefix("file://"), errors="surrogateescape").partition("/")
    if "\0" in name + path or not (name or slash):
        raise InvalidArgument.of(URI_FIELD, "must be file://ROOT/path or file:///path")
    if ".." in path.split("/") or name in (".", ".."):
        raise SourceForbidden(f"a source's path may not contain '..'; {advice.FORBIDDEN_NAMES}", metadata={"uri": uri})
    return name, slash + path


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    """A symbolic link that leads nowhere is none: whoever opens it hears what is wrong."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")

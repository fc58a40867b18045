"""Adapter folders on a web server: `https://HOST/path/`, pinned by the ETags of their files."""

from contextlib import suppress
from functools import partial

from shared.adapter_format.files import CONFIG, WEIGHTS
from shared.adapter_format.texts import MAX_BYTES
from shared.errors import DigestMismatch, SourceNotFound
from shared.sources.advice import REPLACED
from shared.sources.http import GuardedClient
from shared.sources.policy import Access
from shared.sources.remote import Body, RemoteFile
from shared.sources.resolver import PinnedObject, PinnedSource


class HttpsSource:
    """What `loraplex.resolvers` asks of a source, and `open_range`, which lets replicas download in parts."""

    def __init__(self, source: PinnedSource, access: Access) -> None:
        self._source = source._replace(uri=f"{source.uri.rstrip('/')}/")
        self._access = access
        self._client = GuardedClient(access)
        self._pinned = {pinned.path: pinned for pinned in source.objects}

    def pin(self) -> PinnedSource:
        """The folder, and each file that was opened, as it was then."""
        return self._source._replace(objects=tuple(self._pinned[name] for name in sorted(self._pinned)))

    def list(self) -> list[str]:
        """Web servers list nothing: what adapters may bring is asked for, and only a 404 says that it is not there."""
        if not self._source.objects:
            for name in MAX_BYTES:
                with suppress(SourceNotFound):
                    self.open(name).close()
        return sorted({CONFIG, WEIGHTS, *self._pinned})

    def open(self, name: str) -> RemoteFile:
        """One file."""
        return RemoteFile(partial(self._get, name), self._access, self._metadata(name))

    def open_range(self, name: str, start: int, end: int) -> RemoteFile:
        """Bytes [start, end) of one file."""
        return RemoteFile(partial(self._get, name), self._access, self._metadata(name), start, end)

    def _get(self, name: str, start: int, end: int) -> Body:
        token = self._access.credential.reveal() if self._access.credential else ""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        body = self._client.get(self._source.uri + name, start, end, headers=headers, metadata=self._metadata(name))
        if self._pinned.setdefault(name, PinnedObject(name, etag=body.etag)).etag != body.etag:
            body.close()
            problem = f"{name} in {self._source.uri} was replaced; {REPLACED}"
            raise DigestMismatch(problem, metadata=self._metadata(name))
        return body

    def _metadata(self, name: str) -> dict[str, str]:
        return {"uri": self._source.uri, "file": name}

"""Adapter folders on the Hugging Face Hub: `hf://org/repo[@revision][/subfolder]`, a `/` in the revision as %2F.

Without a credential the library's own settings count: HF_ENDPOINT and HF_TOKEN. Files come over HTTP in ranges; the
Hub is trusted to redirect to its own stores, and its client sends the token to no other server.
"""

import logging
import re
import threading
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple
from urllib.parse import quote, unquote

import httpx2
from huggingface_hub import HfApi, constants, get_session, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, parse_ratelimit_headers

from shared.errors import InvalidArgument, LoraplexError, SourceForbidden, SourceNotFound, SourceUnavailable
from shared.sources import advice
from shared.sources.credentials import DEFAULT
from shared.sources.policy import Access, Patience
from shared.sources.remote import Body, RemoteFile, extent, patiently, range_header, retry_after, status_error
from shared.sources.resolver import URI_FIELD, PinnedSource

# They log whole URLs, and those of the Hub's stores are signed.
for _library in ("httpx2", "httpcore2", "huggingface_hub"):
    logging.getLogger(_library).setLevel(logging.WARNING)

_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_WRONG_TOKEN = "Invalid credentials in Authorization header"
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


class _Place(NamedTuple):
    repo: str
    revision: str  # empty for the repository's default
    folder: str  # empty for the root


def adapters_of(owner: str, patience: Patience = Patience()) -> list[str]:  # noqa: B008  # it is immutable
    """Ids of the repositories of a user or organisation that the Hub takes for PEFT adapters, sorted.

    Raises:
        SourceNotFound, SourceForbidden, SourceUnavailable: the Hub does not list them (metadata `uri`).
    """
    uri = f"hf://{owner}"
    metadata = {"uri": uri}

    def ask() -> list[str]:
        # HfApi's own listing cannot be told how often to try again, and writes of it to standard error.
        found: list[str] = []
        url: str | None = f"{constants.ENDPOINT}/api/models"
        query: dict[str, str] | None = {"author": owner, "filter": "peft"}
        timeout = httpx2.Timeout(patience.read, connect=patience.connect)
        headers = build_hf_headers(library_name="loraplex")
        try:
            while url is not None:
                response = get_session().get(url, params=query, headers=headers, timeout=timeout)
                hf_raise_for_status(response)
                found += [model["id"] for model in response.json()]
                url, query = response.links.get("next", {}).get("url"), None  # which has the query in it
        except (httpx2.HTTPError, HfHubHTTPError, OSError) as error:
            raise hub_error(error, uri, metadata) from None
        except (AttributeError, KeyError, TypeError, ValueError):
            raise SourceUnavailable(f"{uri}: the Hub's answer is malformed", metadata=metadata) from None
        return sorted(found)

    access = Access({}, None, (), lambda _: True, threading.Event(), patience)
    return patiently(ask, access, metadata)


class HubSource:
    """A folder of a model repository at one commit."""

    def __init__(self, source: PinnedSource, access: Access) -> None:
        self._uri = source.uri
        self._credential_ref = source.credential_ref
        self._access = access
        self._place = _split(source.uri)
        credential = access.credential
        self._endpoint = (credential.endpoint if credential else "").rstrip("/") or constants.ENDPOINT
        # None: the library's own token, if it has one. False: none at all.
        self._token: str | bool | None = None
        if credential is not None and credential.secret != DEFAULT:
            self._token = credential.reveal() or False
        self._listing: list[str] | None = None
        self._commit = source.revision
        if not self._commit:
            self._commit = self._look_up(self._place.revision)

    def pin(self) -> PinnedSource:
        """The repository and folder, and the commit that a branch or tag meant."""
        folder = f"/{quote(self._place.folder)}" if self._place.folder else ""
        return PinnedSource(
            f"hf://{self._place.repo}{folder}", revision=self._commit, credential_ref=self._credential_ref
        )

    def list(self) -> list[str]:
        """Paths of the files in the folder and below it, sorted."""
        if self._listing is None:
            self._look_up(self._commit)
        prefix = f"{self._place.folder}/" if self._place.folder else ""
        found = sorted(path.removeprefix(prefix) for path in self._listing or () if path.startswith(prefix))
        if not found:
            raise SourceNotFound(f"{self._uri} does not exist; {advice.ABSENT}", metadata={"uri": self._uri})
        return found

    def folders(self) -> tuple[str, ...]:
        """Names of the folders right below, sorted."""
        return tuple(sorted({path.partition("/")[0] for path in self.list() if "/" in path}))

    def open(self, name: str) -> RemoteFile:
        """One file."""
        return RemoteFile(partial(self._get, name), self._access, self._metadata(name))

    def open_range(self, name: str, start: int, end: int) -> RemoteFile:
        """Bytes [start, end) of one file."""
        return RemoteFile(partial(self._get, name), self._access, self._metadata(name), start, end)

    def _look_up(self, revision: str) -> str:
        """Reads the list of files and returns the commit."""
        api = HfApi(endpoint=self._endpoint, token=self._token, library_name="loraplex")

        def ask() -> str:
            try:
                info = api.model_info(self._place.repo, revision=revision or None, timeout=self._access.patience.read)
            except (httpx2.HTTPError, HfHubHTTPError, OSError) as error:
                raise self._failed(error) from None
            except (AttributeError, KeyError, TypeError, ValueError):
                raise SourceUnavailable("the Hub's answer is malformed", metadata=self._metadata()) from None
            if not _COMMIT.fullmatch(info.sha or ""):
                raise SourceUnavailable("the Hub does not tell the commit", metadata=self._metadata())
            self._listing = [sibling.rfilename for sibling in info.siblings or ()]
            return str(info.sha)

        return patiently(ask, self._access, self._metadata())

    def _get(self, name: str, start: int, end: int) -> Body:
        url = hf_hub_url(
            self._place.repo, name, subfolder=self._place.folder, revision=self._commit, endpoint=self._endpoint
        )
        headers = build_hf_headers(token=self._token, library_name="loraplex")
        headers |= {"Range": range_header(start, end), "Accept-Encoding": "identity"}
        timeout = httpx2.Timeout(self._access.patience.read, connect=self._access.patience.connect)
        client = get_session()
        try:
            request = client.build_request("GET", url, headers=headers, timeout=timeout)
            response = client.send(request, stream=True, follow_redirects=True)
            if response.is_error and response.status_code != 416:
                response.read()
                hf_raise_for_status(response)
        except (httpx2.HTTPError, HfHubHTTPError, OSError) as error:
            raise self._failed(error, name) from None
        return self._body(response, name)

    def _body(self, response: httpx2.Response, name: str) -> Body:
        headers = response.headers
        found = extent(response.status_code, headers.get("Content-Range"), headers.get("Content-Length"))
        if found is None or headers.get("Content-Encoding", "identity") != "identity":
            response.close()
            problem = "the Hub does not say how many bytes the file has"
            raise SourceUnavailable(problem, metadata=self._metadata(name))
        pieces = response.iter_raw()
        rest = b""

        def read(count: int) -> bytes:
            nonlocal rest
            try:
                rest = rest or next(pieces, b"")
            except httpx2.HTTPError as error:
                raise self._failed(error, name) from None
            piece, rest = rest[:count], rest[count:]
            return piece

        # The Hub's own answer has the ETag of the file, those of its stores have others.
        etags = [answer.headers.get("X-Linked-Etag", "") for answer in response.history]
        return Body(*found, next(filter(None, etags), headers.get("ETag", "")), read, response.close)

    def _failed(self, error: Exception, name: str = "") -> LoraplexError:
        what = f"{name} in {self._uri}" if name else self._uri
        metadata = self._metadata(name)
        if isinstance(error, GatedRepoError) or is_unknown_repository(error):
            return hub_error(error, self._uri, metadata)
        if isinstance(error, RevisionNotFoundError):
            return SourceNotFound(f"{self._uri} {self._lacks_revision()}", metadata=metadata)
        if isinstance(error, RemoteEntryNotFoundError):
            return SourceNotFound(f"{what} does not exist; {advice.ABSENT}", metadata=metadata)
        return hub_error(error, what, metadata)

    def _lacks_revision(self) -> str:
        repo, revision, folder = self._place
        if revision and folder:
            whole = f"{revision}/{folder}"[:100]
            written = f"hf://{repo}@{quote(whole, safe='')}"
            return f"has no revision {revision[:100]}; if the revision is {whole}, write its / as %2F: {written}"
        if revision:
            return f"has no revision {revision[:100]}; name a branch, a tag or a commit that the repository has"
        if self._commit:
            return f"has no revision {self._commit} any more; {advice.REPLACED}"
        return f"has no branch main; name a branch, a tag or a commit: hf://{repo}@REVISION"

    def _metadata(self, name: str = "") -> dict[str, str]:
        return {"uri": self._uri, "file": name} if name else {"uri": self._uri}


def hub_error(error: Exception, what: str, metadata: Mapping[str, str]) -> LoraplexError:
    """What any call of the Hub can fail of; `what` is the repository or the file that was asked for."""
    if isinstance(error, GatedRepoError):
        text = f"{what} is gated; accept its terms with the account whose token is used"
        return SourceForbidden(text, metadata=metadata)
    if is_unknown_repository(error):
        text = f"{what}: the repository does not exist, or it is private and the token does not open it"
        return SourceNotFound(f"{text}; correct its name, or {advice.LOGIN}", metadata=metadata)
    if isinstance(error, HfHubHTTPError):
        return status_error(error.response.status_code, what, metadata, _wait(error.response))
    return SourceUnavailable(f"{what}: the Hub is not reachable: {type(error).__name__}", metadata=metadata)


def is_unknown_repository(error: Exception) -> bool:
    """Whether the Hub knows of no such repository, or asks for a login, as it does for what does not exist.

    The library sees the latter on https only.
    """
    if isinstance(error, RepositoryNotFoundError):
        return not isinstance(error, GatedRepoError)
    if not isinstance(error, HfHubHTTPError) or error.response.status_code != 401:
        return False
    return error.response.headers.get("X-Error-Message") != _WRONG_TOKEN


def _wait(response: httpx2.Response) -> float | None:
    """Seconds that the Hub asks for."""
    limit = parse_ratelimit_headers(response.headers)
    if response.status_code == 429 and limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    return retry_after(response.headers.get("Retry-After"))


def _split(uri: str) -> _Place:
    parts = uri.removeprefix("hf://").split("/")
    name, _, revision = "/".join(parts[:2]).partition("@")
    folder = [unquote(part) for part in parts[2:] if part]
    if not _REPO.fullmatch(name) or (uri.partition("@")[2] == "" and "@" in uri):
        raise InvalidArgument.of(URI_FIELD, "must be hf://org/repo[@revision][/subfolder]")
    if any(part in (".", "..") or "/" in part or not part.isprintable() for part in (*name.split("/"), *folder)):
        raise SourceForbidden(
            f"a source's path may not contain '.' or '..'; {advice.FORBIDDEN_NAMES}", metadata={"uri": uri}
        )
    if not unquote(revision).isprintable():
        raise InvalidArgument.of(URI_FIELD, "the revision must be printable")
    return _Place(name, unquote(revision), "/".join(folder))

"""Adapter folders in S3 and stores like it: `s3://bucket/prefix`.

Without a credential boto3's own chain counts (variables, the role of the machine or of the service account). Objects
are pinned by version where the bucket keeps versions and by ETag always: every read is conditional on them.
"""

import logging
import re
import threading
from collections.abc import Iterable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import boto3
import botocore
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
)
from urllib3.exceptions import HTTPError

from shared.errors import DigestMismatch, InvalidArgument, LoraplexError, SourceForbidden, SourceUnavailable
from shared.sources import advice
from shared.sources.credentials import DEFAULT, NONE, Credential
from shared.sources.policy import Access
from shared.sources.remote import Body, RemoteFile, extent, patiently, range_header, retry_after, status_error
from shared.sources.resolver import URI_FIELD, PinnedObject, PinnedSource

MAX_LISTED = 10_000

# At `debug` they log requests with their signatures and session tokens.
for _library in ("boto3", "botocore", "urllib3", "s3transfer"):
    logging.getLogger(_library).setLevel(logging.WARNING)

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_MAX_CONNECTIONS = 64  # of one client, which all downloads with one credential share
_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, NoRegionError)
_making = threading.Lock()


class _Login(NamedTuple):
    """What a client is made of; empty: whatever boto3 finds by itself."""

    endpoint: str = ""
    region: str = ""
    is_anonymous: bool = False
    key_id: str = ""
    secret: str = ""
    session_token: str = ""


class S3Source:
    """The objects right below a prefix, `/`-separated."""

    def __init__(self, source: PinnedSource, access: Access) -> None:
        self._uri = source.uri
        self._credential_ref = source.credential_ref
        self._access = access
        self._bucket, self._prefix = _split(source.uri)
        self._is_pinned = bool(source.objects)
        self._objects = {pinned.path: pinned for pinned in source.objects}
        login = _login(access.credential)
        with _making:  # sessions are not made by several threads at once
            self._client = _client(login, access.patience.connect, access.patience.read)

    def pin(self) -> PinnedSource:
        """The prefix, and each object that was opened, as it was then."""
        uri = f"s3://{self._bucket}/{self._prefix.rstrip('/')}".rstrip("/")
        objects = tuple(self._objects[name] for name in sorted(self._objects))
        return PinnedSource(uri, objects=objects, credential_ref=self._credential_ref)

    def list(self) -> list[str]:
        """Names of the objects right below the prefix, sorted; at most 10,000 are looked at."""
        return [*self._below()[0]]

    def folders(self) -> tuple[str, ...]:
        """Names of the prefixes right below this one, sorted, among the first 10,000 objects and prefixes."""
        return self._below()[1]

    def _below(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Objects and prefixes. Raises SourceNotFound if there are neither."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix, Delimiter="/", PaginationConfig={"MaxItems": MAX_LISTED}
        )

        def ask() -> tuple[Any, ...]:
            try:
                return tuple(pages)
            except (ClientError, BotoCoreError) as error:
                raise self._failed(error) from None

        found = patiently(ask, self._access, self._metadata())
        names = self._sorted(entry["Key"] for page in found for entry in page.get("Contents", ()))
        folders = self._sorted(entry["Prefix"] for page in found for entry in page.get("CommonPrefixes", ()))
        if not names and not folders:
            raise status_error(404, self._uri, self._metadata())
        return names, folders

    def _sorted(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Names below the prefix; its own object, which stands for the folder in some stores, is none."""
        return tuple(sorted({key.removeprefix(self._prefix).rstrip("/") for key in keys} - {""}))

    def open(self, name: str) -> RemoteFile:
        """One object."""
        return RemoteFile(partial(self._get, name), self._access, self._metadata(name))

    def open_range(self, name: str, start: int, end: int) -> RemoteFile:
        """Bytes [start, end) of one object."""
        return RemoteFile(partial(self._get, name), self._access, self._metadata(name), start, end)

    def _get(self, name: str, start: int, end: int) -> Body:
        pinned = self._objects.get(name)
        if pinned is None and self._is_pinned:
            raise status_error(404, f"{name} in {self._uri}", self._metadata(name))
        condition = {}
        if pinned is not None:
            condition = {"IfMatch": pinned.etag, **({"VersionId": pinned.version_id} if pinned.version_id else {})}
        try:
            answer = self._client.get_object(
                Bucket=self._bucket, Key=self._prefix + name, Range=range_header(start, end), **condition
            )
        except ClientError as error:
            if (empty := _nothing_there(error)) is not None:
                return empty
            raise self._failed(error, name) from None
        except BotoCoreError as error:
            raise self._failed(error, name) from None
        self._objects.setdefault(name, PinnedObject(name, _version(answer), answer["ETag"]))
        return self._body(answer, name)

    def _body(self, answer: dict[str, Any], name: str) -> Body:
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        body = answer["Body"]
        stream = body.__enter__()  # urllib3's, which gives what has come: botocore's waits for all that was asked for
        found = extent(status, answer.get("ContentRange"), str(answer.get("ContentLength")))
        if found is None:
            body.close()
            problem = "the store does not say how many bytes the object has"
            raise SourceUnavailable(problem, metadata=self._metadata(name))

        def read(count: int) -> bytes:
            try:
                return bytes(stream.read1(count))
            except (HTTPError, OSError) as error:
                raise self._failed(error, name) from None

        return Body(*found, answer["ETag"], read, body.close)

    def _failed(self, error: Exception, name: str = "") -> LoraplexError:
        what, metadata = (f"{name} in {self._uri}" if name else self._uri), self._metadata(name)
        if isinstance(error, _NO_CREDENTIALS):
            text = f"{what}: this service has no credentials for S3; name a credential in its configuration"
            return SourceForbidden(text, metadata=metadata)
        if not isinstance(error, ClientError):
            return SourceUnavailable(f"{what}: S3 is not reachable: {type(error).__name__}", metadata=metadata)
        answer: dict[str, Any] = dict(error.response.get("ResponseMetadata", {}))
        status = answer.get("HTTPStatusCode", 500)
        if status == 412:
            return DigestMismatch(f"{what} was replaced after it was registered; {advice.REPLACED}", metadata=metadata)
        if status == 301:
            return SourceForbidden(
                f"{what}: the bucket is in another region; name it in the credential's region", metadata=metadata
            )
        return status_error(status, what, metadata, retry_after(answer.get("HTTPHeaders", {}).get("retry-after")))

    def _metadata(self, name: str = "") -> dict[str, str]:
        return {"uri": self._uri, "file": name} if name else {"uri": self._uri}


def _split(uri: str) -> tuple[str, str]:
    """Bucket and prefix; the prefix is empty or ends in a slash."""
    bucket, _, path = uri.removeprefix("s3://").partition("/")
    prefix = path.strip("/")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        raise InvalidArgument.of(URI_FIELD, "must be s3://bucket/prefix")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise SourceForbidden(
            f"a prefix may not contain '.', '..' or empty names; {advice.FORBIDDEN_NAMES}", metadata={"uri": uri}
        )
    return bucket, f"{prefix}/" if prefix else ""


def _login(credential: Credential | None) -> _Login:
    if credential is None:
        return _Login()
    place = _Login(credential.endpoint, credential.region)
    if credential.secret == NONE:
        return place._replace(is_anonymous=True)
    if credential.secret == DEFAULT:
        return place
    if not credential.key_id:
        raise SourceForbidden("the credential has a secret but no key_id; add it to the service's configuration")
    return place._replace(
        key_id=credential.reveal("key_id"),
        secret=credential.reveal("secret"),
        session_token=credential.reveal("session_token"),
    )


@lru_cache(maxsize=32)
def _client(login: _Login, connect_seconds: float, read_seconds: float) -> Any:
    """A client, which many threads may share; credentials of a role renew themselves in it."""
    keys = {}
    if login.secret:
        keys = {
            "aws_access_key_id": login.key_id,
            "aws_secret_access_key": login.secret,
            "aws_session_token": login.session_token or None,
        }
    config = Config(
        signature_version=botocore.UNSIGNED if login.is_anonymous else None,
        connect_timeout=connect_seconds,
        read_timeout=read_seconds,
        max_pool_connections=_MAX_CONNECTIONS,
        retries={"total_max_attempts": 1},  # `remote.Backoff` does it, for the body too
        # Every byte is hashed anyway, and not every store knows the checksums.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = botocore.session.Session()
    session.register_component("data_loader", _descriptions())
    return boto3.session.Session(botocore_session=session, **keys).client(
        "s3", endpoint_url=login.endpoint or None, region_name=login.region or None, config=config
    )


@cache
def _descriptions() -> Any:
    """What the library knows of S3, for all clients: reading it takes 100 ms, and each session would by itself."""
    return botocore.session.Session().get_component("data_loader")


def _version(answer: dict[str, Any]) -> str:
    """Empty where the bucket keeps no versions."""
    version = answer.get("VersionId", "")
    return "" if version == "null" else str(version)


def _nothing_there(error: ClientError) -> Body | None:
    """The answer to a range beyond the object's end."""
    answer: dict[str, Any] = dict(error.response)
    details = answer.get("ResponseMetadata", {})
    if details.get("HTTPStatusCode") != 416:
        return None
    found = extent(416, details.get("HTTPHeaders", {}).get("content-range"), None)
    size = int(answer.get("Error", {}).get("ActualObjectSize", 0)) if found is None else found[2]
    return Body(size, size, size, "", lambda _: b"", lambda: None)

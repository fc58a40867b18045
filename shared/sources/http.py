"""A small HTTP client for sources of plugins, guarded: a URI is a caller's text and must not open what callers cannot.

Only https and public addresses, unless the configuration names the endpoint; the address that was checked is the one
that is connected to; each redirect is judged anew and gets no credentials of another server. Proxies are not used.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from shared.errors import LoraplexError, SourceForbidden, SourceUnavailable
from shared.sources import advice
from shared.sources.policy import Access
from shared.sources.remote import Body, extent, range_header, retry_after, status_error

MAX_REDIRECTS = 5

_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_PLAIN = {"Accept-Encoding": "identity"}
_REDIRECTS = (301, 302, 303, 307, 308)
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _Target(NamedTuple):
    scheme: str
    host: str
    port: int
    path: str  # with the query

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port


class _Answer(NamedTuple):
    response: http.client.HTTPResponse
    connection: http.client.HTTPConnection

    def close(self) -> None:
        self.response.close()
        self.connection.close()


class GuardedClient:
    """Asks for ranges of files. Every call makes a connection of its own and may block."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._endpoints = {_target(url).origin for url in access.endpoints}
        self._tls = ssl.create_default_context()

    def get(
        self,
        url: str,
        start: int,
        end: int,
        *,
        headers: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Body:
        """Bytes [start, end) of the file at `url`. `headers` go to its own server only. `metadata` is for errors.

        Raises:
            SourceForbidden: the URL, or where it leads, may not be opened, or the server refuses.
            SourceNotFound, DigestMismatch, SourceUnavailable: see `remote.status_error`.
        """
        metadata = {"uri": url, **(metadata or {})}
        target, sent = _target(url), dict(headers or {})
        for _ in range(1 + MAX_REDIRECTS):
            answer = self._ask(target, {**sent, "Range": range_header(start, end)}, metadata)
            if answer.response.status not in _REDIRECTS:
                return _body(answer, metadata)
            answer.close()
            moved = _target(urljoin(_url(target), answer.response.headers.get("Location", "")))
            if not self._access.is_allowed(_url(moved)):
                raise SourceForbidden(
                    f"the server redirects to {moved.host}, which is not allowed; {advice.ALLOW_SOURCE}",
                    metadata=metadata,
                )
            target, sent = moved, (sent if moved.origin == target.origin else {})
        problem = f"the server redirects more than {MAX_REDIRECTS} times; name where the files are"
        raise SourceForbidden(problem, metadata=metadata)

    def _ask(self, target: _Target, headers: Mapping[str, str], metadata: Mapping[str, str]) -> _Answer:
        is_configured = target.origin in self._endpoints
        if target.scheme != "https" and not is_configured:
            raise SourceForbidden(
                f"{target.host} may be read by https only; {advice.ALLOW_ENDPOINT}", metadata=metadata
            )
        addresses = self._addresses(target, metadata)
        if not is_configured and not all(is_public(address) for address in addresses):
            problem = f"{target.host} has an address that is not public; {advice.ALLOW_ENDPOINT}"
            raise SourceForbidden(problem, metadata=metadata)
        connection = http.client.HTTPConnection(target.host, target.port, timeout=self._access.patience.read)
        try:
            connection.sock = self._connect(target, addresses)
            with _cut_after(self._access.patience.answer, connection.sock):
                connection.request("GET", target.path, headers={"Connection": "close", **_PLAIN, **headers})
                return _Answer(connection.getresponse(), connection)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _interrupted(error, metadata) from None

    def _addresses(self, target: _Target, metadata: Mapping[str, str]) -> list[_Address]:
        try:
            found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise SourceUnavailable(f"the name {target.host} has no address", metadata=metadata) from None
        return [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]

    def _connect(self, target: _Target, addresses: list[_Address]) -> socket.socket:
        """A connection to the first of exactly these addresses that answers."""
        failure = OSError("it has no address")
        for address in addresses:
            try:
                plain = socket.create_connection((str(address), target.port), self._access.patience.connect)
                plain.settimeout(self._access.patience.read)
                return self._with_tls(plain, target.host) if target.scheme == "https" else plain
            except OSError as error:
                failure = error
        raise failure

    def _with_tls(self, plain: socket.socket, host: str) -> ssl.SSLSocket:
        secured = self._tls.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
        try:
            with _cut_after(self._access.patience.answer, secured):
                secured.do_handshake()
        except BaseException:
            secured.close()
            raise
        return secured


@contextmanager
def _cut_after(seconds: float, connection: socket.socket) -> Iterator[None]:
    """Whoever reads from the connection meanwhile finds it ended after so long: a server may send a byte now and then,
    for ever."""

    def cut() -> None:
        with suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_public(address: _Address) -> bool:
    """Whether the address, and any that it stands for, belongs to the public Internet."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast


def _target(url: str) -> _Target:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise SourceForbidden("the URL is malformed; write https://HOST[:PORT]/path") from None
    if parts.scheme not in _PORTS or not parts.hostname or "@" in parts.netloc:
        raise SourceForbidden("the URL is not one that may be read; write https://HOST[:PORT]/path")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii() or any(ord(char) <= 32 for char in path):
        raise SourceForbidden(
            "the URL's path is not percent-encoded; write %XX for spaces, controls and what is not ASCII"
        )
    return _Target(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], path)


def _url(target: _Target) -> str:
    host = f"[{target.host}]" if ":" in target.host else target.host
    port = "" if target.port == _PORTS[target.scheme] else f":{target.port}"
    return f"{target.scheme}://{host}{port}{target.path}"


def _body(answer: _Answer, metadata: Mapping[str, str]) -> Body:
    response, headers = answer.response, answer.response.headers
    if response.status not in (200, 206, 416):
        answer.close()
        raise status_error(response.status, _what(metadata), metadata, retry_after(headers.get("Retry-After")))
    found = extent(response.status, headers.get("Content-Range"), headers.get("Content-Length"))
    if found is None or headers.get("Content-Encoding", "identity") != "identity":
        answer.close()
        problem = f"{_what(metadata)}: the server does not say how many bytes it has; have it send Content-Length"
        raise SourceForbidden(problem, metadata=metadata)

    def read(count: int) -> bytes:
        try:
            return response.read1(count)
        except (OSError, http.client.HTTPException) as error:
            raise _interrupted(error, metadata) from None

    return Body(*found, headers.get("ETag", ""), read, answer.close)


def _interrupted(error: Exception, metadata: Mapping[str, str]) -> LoraplexError:
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = f"the server's certificate is not valid: {error.verify_message}"
        advice_here = "SSL_CERT_FILE names an authority of your own"
        return SourceForbidden(f"{_what(metadata)}: {problem}; {advice_here}", metadata=metadata)
    return SourceUnavailable(f"{_what(metadata)} is not reachable: {type(error).__name__}", metadata=metadata)


def _what(metadata: Mapping[str, str]) -> str:
    return f"{metadata['file']} in {metadata['uri']}" if "file" in metadata else metadata["uri"]

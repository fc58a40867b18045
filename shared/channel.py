"""A client's channel: plaintext or TLS, with a bearer token on each call if there is one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from shared.changing_file import ChangingFile
from shared.errors import InvalidArgument
from shared.following_channel import FollowingChannel
from shared.targets import grpc_target
from shared.tls import SYSTEM_CA, check_client_files, client_credentials, client_files

MAX_TOKEN_CHARS = 6 << 10  # servers take 8 KiB of metadata


@dataclass(frozen=True)
class ClientIdentity:
    """How a client shows who it is, and whom it trusts.

    `token`: bearer token. `token_file`: or a file with it, which is read again when it changes.
    `ca`: PEM file of the CA that signs the servers' certificates, or `system`; any of ca, cert and key means TLS.
    `cert`, `key`: PEM files of the client's own certificate, for mTLS. When a PEM file changes, new calls go by it.
    """

    token: str = field(default="", repr=False)
    token_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""

    @property
    def is_secure(self) -> bool:
        """Whether connections are TLS."""
        return bool(self.ca or self.cert or self.key)


NOBODY = ClientIdentity()


def open_channel(
    target: str,
    identity: ClientIdentity = NOBODY,
    options: Sequence[tuple[str, Any]] = (),
    interceptors: Sequence[Any] = (),
) -> grpc.aio.Channel:
    """A channel to `target`, HOST:PORT or what else `is_target`. Create it inside a running event loop.

    `interceptors`: see calls first.

    Raises:
        InvalidArgument: a file of `identity` cannot be used; names its field.
    """
    target = grpc_target(target)
    all_interceptors = [*interceptors, *_interceptors(identity)]
    if not identity.is_secure:
        return grpc.aio.insecure_channel(target, options, interceptors=all_interceptors)

    def secured(credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(target, credentials, options, interceptors=all_interceptors)

    files = client_files(identity.ca or SYSTEM_CA, identity.cert, identity.key)
    return FollowingChannel(files, secured) if files is not None else secured(client_credentials())


def check_identity(identity: ClientIdentity) -> None:
    """Raises the InvalidArgument that `open_channel` would for these files, without starting gRPC."""
    _interceptors(identity)
    if identity.is_secure:
        check_client_files(identity.ca or SYSTEM_CA, identity.cert, identity.key)


def _interceptors(identity: ClientIdentity) -> list[Any]:
    if identity.token and identity.token_file:
        raise InvalidArgument.of("token_file", "cannot be given together with token")
    if identity.token:
        token = _checked("token", identity.token)
        return [_BearerUnary(lambda: token), _BearerStream(lambda: token)]
    if identity.token_file:
        read = _token_file(identity.token_file).value
        return [_BearerUnary(read), _BearerStream(read)]
    return []


def _token_file(path: str) -> ChangingFile[str]:
    def read(content: bytes) -> str:
        try:
            return _checked("token_file", content.decode("ascii", errors="replace").strip())
        except InvalidArgument as error:
            raise ValueError(error.violations[0].description) from None

    try:
        return ChangingFile((Path(path).expanduser(),), read)
    except OSError as error:
        raise InvalidArgument.of("token_file", f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidArgument.of("token_file", f"{path} {error}") from None


def _checked(name: str, token: str) -> str:
    if not 1 <= len(token) <= MAX_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidArgument.of(name, f"must hold one token: printable ASCII, 1 to {MAX_TOKEN_CHARS} characters")
    return token


def _with_token(details: Any, token: str) -> Any:
    return details._replace(metadata=grpc.aio.Metadata(*(details.metadata or ()), ("authorization", f"Bearer {token}")))


class _BearerUnary(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._token()), request)


class _BearerStream(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_token(client_call_details, self._token()), request)

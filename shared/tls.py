"""TLS: a server's credentials, which follow their files, and a client's."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from shared.changing_file import ChangingFile
from shared.errors import InvalidArgument

T = TypeVar("T")

SYSTEM_CA = "system"


def server_credentials(cert: str, key: str, client_ca: str = "") -> grpc.ServerCredentials:
    """Credentials from PEM files. Each new connection is made with what they hold then; open ones stay.

    A certificate and key that do not belong together yet, for they are replaced one after the other, wait for each
    other. With `client_ca` clients must have a certificate that it signed.

    Raises:
        InvalidArgument: the files cannot be used; names the setting.
    """
    files = _server_files(cert, key, client_ca, _configuration)
    given = [files.value()]

    def changed() -> Any:
        """Called before each handshake, in a thread of gRPC's; None: as before."""
        if (now := files.value()) is given[0]:
            return None
        given[0] = now
        return now

    return grpc.dynamic_ssl_server_credentials(given[0], changed, bool(client_ca))


def check_server_files(cert: str, key: str, client_ca: str = "") -> None:
    """Raises the InvalidArgument that `server_credentials` would, without starting gRPC."""
    _server_files(cert, key, client_ca, _check)


def _server_files(cert: str, key: str, client_ca: str, read: Callable[..., T]) -> ChangingFile[T]:
    """What `read` makes of PEM files. Raises InvalidArgument for those it cannot use."""
    settings = (("tls_cert", cert), ("tls_key", key), ("tls_client_ca", client_ca))
    given = {name: Path(path).expanduser() for name, path in settings if path}
    try:
        return ChangingFile(tuple(given.values()), read)
    except OSError as error:
        name = next((name for name, path in given.items() if str(path) == str(error.filename)), "tls_cert")
        raise InvalidArgument.of(name, f"{error.filename} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidArgument.of("tls_cert", f"{cert}, {key}: {error}") from None


def client_credentials(ca: str = SYSTEM_CA, cert: str = "", key: str = "") -> grpc.ChannelCredentials:
    """Credentials of a client that trusts the certificates of the PEM file `ca`, or of the system, and shows its own.

    Raises:
        InvalidArgument: a file cannot be used; names the argument.
    """
    roots, chain, private = check_client_files(ca, cert, key)
    return grpc.ssl_channel_credentials(roots, private, chain)


def check_client_files(ca: str, cert: str, key: str) -> tuple[bytes | None, bytes | None, bytes | None]:
    """What the files of `client_credentials` hold, found good without starting gRPC.

    Raises:
        InvalidArgument: a file cannot be used; names the argument.
    """
    if bool(cert) != bool(key):
        missing, other = ("cert", "key") if key else ("key", "cert")
        raise InvalidArgument.of(missing, f"is required with {other}: cert and key go together")
    roots = None if ca == SYSTEM_CA else _read("ca", ca)
    chain, private = (_read("cert", cert), _read("key", key)) if cert else (None, None)
    wrong, path = "ca", ca
    try:
        if roots is not None:
            _certificates(roots)
        if chain is not None and private is not None:
            wrong, path = "cert", cert
            _check(chain, private)
    except ValueError as error:
        raise InvalidArgument.of(wrong, f"{path}: {error}") from None
    return roots, chain, private


def client_files(ca: str = SYSTEM_CA, cert: str = "", key: str = "") -> ChangingFile[grpc.ChannelCredentials] | None:
    """What `client_credentials` makes of these files, again when one of them is another; None if there is none.

    Raises:
        InvalidArgument: a file cannot be used; names the argument.
    """
    client_credentials(ca, cert, key)
    names = [name for name, path in (("ca", ca), ("cert", cert), ("key", key)) if path and path != SYSTEM_CA]
    given = {"ca": ca, "cert": cert, "key": key}

    def read(*contents: bytes) -> grpc.ChannelCredentials:
        found = dict(zip(names, contents, strict=True))
        if "ca" in found:
            _certificates(found["ca"])
        if "cert" in found:
            _configuration(found["cert"], found["key"])
        return grpc.ssl_channel_credentials(found.get("ca"), found.get("key"), found.get("cert"))

    if not names:
        return None
    paths = tuple(Path(given[name]).expanduser() for name in names)
    return ChangingFile(paths, read, check_seconds=0.0)  # a call that waits for a connection stays with what it began


def _configuration(chain: bytes, key: bytes, client_ca: bytes | None = None) -> Any:
    """What gRPC makes a connection with. Raises ValueError for what it would refuse."""
    _check(chain, key, client_ca)
    return grpc.ssl_server_certificate_configuration([(key, chain)], client_ca)


def _check(chain: bytes, key: bytes, client_ca: bytes | None = None) -> None:
    """Raises ValueError for what gRPC would refuse."""
    certificates = _certificates(chain)
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError):
        raise ValueError("the key is no PEM private key without a password") from None
    if _public(certificates[0]) != private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo):
        raise ValueError("the certificate is not that of the key")
    if client_ca is not None:
        _certificates(client_ca)


def _certificates(content: bytes) -> Sequence[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise ValueError("there is no PEM certificate") from None


def _public(certificate: x509.Certificate) -> bytes:
    return certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidArgument.of(name, f"{path} cannot be read: {error.strerror}") from None

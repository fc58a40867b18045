"""The settings of both services about who may call, and what they build."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import grpc

from shared.auth.authenticator import Authenticator
from shared.auth.certificates import CertificateCallers, CertificateIdentity
from shared.auth.json_web_tokens import ALGORITHMS, JwtSettings, JwtVerifier
from shared.auth.tokens import TokenFile
from shared.config import is_address
from shared.errors import InvalidArgument
from shared.tls import check_server_files, server_credentials

log = logging.getLogger(__name__)

T = TypeVar("T")


def _are_algorithms(names: tuple[str, ...]) -> str | None:
    return None if names and set(names) <= set(ALGORITHMS) else f"some of {', '.join(ALGORITHMS)}"


def _is_address_or_none(address: str) -> str | None:
    return None if address == "" else is_address(address)


def _setting(default: Any, description: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": description, **metadata})


@dataclass(frozen=True, kw_only=True)
class AccessSettings:
    """Who may call a service, and how its connections are secured. Without any of it, anybody, in the clear."""

    auth_token_file: str = _setting("", "TOML or .jsonl file of SHA-256 hashed bearer tokens")
    auth_jwks_file: str = _setting("", "JSON Web Key Set that JWT bearer tokens are verified against")
    auth_jwt_issuer: str = _setting("", "claim `iss` of JWTs; required with a key set")
    auth_jwt_audience: str = _setting("", "claim `aud` of JWTs; required with a key set")
    auth_jwt_algorithms: tuple[str, ...] = _setting(
        JwtSettings.algorithms,
        "signature algorithm of JWTs; repeatable",
        flag="--auth-jwt-algorithm",
        check=_are_algorithms,
    )
    auth_jwt_namespaces_claim: str = _setting(JwtSettings.namespaces_claim, "claim with the namespaces of a JWT")
    auth_jwt_roles_claim: str = _setting(JwtSettings.roles_claim, "claim with the roles of a JWT")
    auth_certificates: dict[str, CertificateIdentity] = field(
        default_factory=dict,
        metadata={"help": "tables [auth_certificates.NAME]: callers known by their certificates"},
    )
    tls_cert: str = _setting("", "PEM file of the certificate chain; with it the service speaks TLS only")
    tls_key: str = _setting("", "PEM file of its private key")
    tls_client_ca: str = _setting("", "PEM file of the CA that clients must have a certificate of")
    health_listen: str = _setting(
        "",
        "address of a second port that serves Health alone, in the clear: Kubernetes' probes speak no TLS",
        check=_is_address_or_none,
    )

    def access(self) -> "AccessSettings":
        """These settings alone, of a service's configuration that has others as well."""
        return AccessSettings(**{about.name: getattr(self, about.name) for about in fields(AccessSettings)})

    def authenticator(self) -> Authenticator:
        """Who knows the callers.

        Raises:
            InvalidArgument: a file cannot be used, or settings are missing; names the setting.
        """
        if (self.auth_token_file or self.auth_jwks_file) and not self.tls_cert:
            log.warning("bearer tokens come over plaintext connections: set tls_cert, unless a mesh encrypts them")
        return self._authenticator()

    def _authenticator(self) -> Authenticator:
        if self.auth_certificates and not self.tls_client_ca:
            raise InvalidArgument.of("tls_client_ca", "is required with auth_certificates")
        return Authenticator(
            _opened("auth_token_file", self.auth_token_file, TokenFile) if self.auth_token_file else None,
            self._web_tokens() if self.auth_jwks_file else None,
            CertificateCallers(self.auth_certificates.values()) if self.auth_certificates else None,
        )

    def tls_credentials(self) -> grpc.ServerCredentials | None:
        """What a port is secured with; None for plaintext.

        Raises:
            InvalidArgument: a file cannot be used, or settings are missing; names the setting.
        """
        return server_credentials(self.tls_cert, self.tls_key, self.tls_client_ca) if self._is_secure() else None

    def check_files(self) -> None:
        """Raises the InvalidArgument that `authenticator` or `tls_credentials` would, without starting gRPC."""
        self._authenticator()
        if self._is_secure():
            check_server_files(self.tls_cert, self.tls_key, self.tls_client_ca)

    def _is_secure(self) -> bool:
        if not (self.tls_cert or self.tls_key or self.tls_client_ca):
            return False
        for name in ("tls_cert", "tls_key"):
            if not getattr(self, name):
                raise InvalidArgument.of(name, "is required for TLS")
        return True

    def _web_tokens(self) -> JwtVerifier:
        for name in ("auth_jwt_issuer", "auth_jwt_audience"):
            if not getattr(self, name):
                raise InvalidArgument.of(name, "is required with auth_jwks_file")
        settings = JwtSettings(
            self.auth_jwt_issuer,
            self.auth_jwt_audience,
            self.auth_jwt_algorithms,
            self.auth_jwt_namespaces_claim,
            self.auth_jwt_roles_claim,
        )
        return _opened("auth_jwks_file", self.auth_jwks_file, lambda path: JwtVerifier(path, settings))


def _opened(name: str, path: str, open_file: Callable[[Path], T]) -> T:
    try:
        return open_file(Path(path).expanduser())
    except OSError as error:
        raise InvalidArgument.of(name, f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidArgument.of(name, f"{path}: {error}") from None

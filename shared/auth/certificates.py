"""Callers known by the certificate of their connection."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.auth.caller import INCLUDED, Caller, Role, granted, own_namespace
from shared.auth.tokens import check_namespaces, check_subject


def _are_roles(roles: tuple[str, ...]) -> str | None:
    return None if roles and all(role in INCLUDED for role in roles) else f"some of {', '.join(INCLUDED)}"


def _are_namespaces(names: tuple[str, ...]) -> str | None:
    try:
        check_namespaces(names)
    except ValueError as error:
        return str(error)
    return None


def _is_identity(text: str) -> str | None:
    try:
        check_subject(text)
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class CertificateIdentity:
    """One table `[auth_certificates.NAME]`."""

    identity: str = field(
        metadata={"help": "a subject alternative name, as it is, or CN=common name", "check": _is_identity}
    )
    roles: tuple[str, ...] = field(metadata={"help": "what it may", "check": _are_roles})
    namespaces: tuple[str, ...] = field(default=(), metadata={"help": "and where", "check": _are_namespaces})

    def caller(self) -> Caller:
        """Who that is."""
        roles: list[Role] = [role for role in INCLUDED if role in self.roles]
        return Caller(self.identity, own_namespace(self.namespaces), granted(self.namespaces, roles), "certificate")


class CertificateCallers:
    """Callers by what their certificates say. gRPC has verified that the certificate is one of the client CA's."""

    def __init__(self, identities: Iterable[CertificateIdentity]) -> None:
        self._callers = {identity.identity: identity.caller() for identity in identities}

    def caller(self, peer: Mapping[str, Sequence[bytes]]) -> Caller | None:
        """`peer` is a context's `auth_context()`."""
        names = [name.decode(errors="replace") for name in peer.get("x509_subject_alternative_name", ())]
        names += [f"CN={name.decode(errors='replace')}" for name in peer.get("x509_common_name", ())]
        return next((self._callers[name] for name in names if name in self._callers), None)

"""JSON Web Tokens of one issuer, verified against its public keys in a JWKS file.

Only signatures by asymmetric keys count: a verifier that knew a secret could forge tokens with it.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jwt

from shared.auth.caller import EVERY_NAMESPACE, INCLUDED, Caller, Role, granted, own_namespace
from shared.auth.tokens import check_subject
from shared.changing_file import ChangingFile
from shared.errors import InvalidArgument, Unauthenticated
from shared.references import check_id

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
LEEWAY_SECONDS = 10.0  # for clocks that differ
MAX_REMEMBERED = 10_000


@dataclass(frozen=True)
class JwtSettings:
    """What a token must say, and where in it namespaces and roles are.

    A claim is named by its key, or by a path with dots such as `realm_access.roles`.
    """

    issuer: str
    audience: str
    algorithms: tuple[str, ...] = ("RS256", "ES256", "EdDSA")
    namespaces_claim: str = "namespaces"
    roles_claim: str = "roles"


class _Verified(NamedTuple):
    caller: Caller
    until: float  # seconds since the epoch


class JwtVerifier:
    """Verifies tokens against the keys of a file, which is read again when it changes."""

    def __init__(self, jwks: Path, settings: JwtSettings, clock: Callable[[], float] = time.time) -> None:
        """Raises OSError or ValueError if the file cannot be used."""
        self._settings = settings
        self._clock = clock
        self._file = ChangingFile((jwks,), _read_keys)
        self._keys = self._file.value()
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()

    def caller(self, token: str, digest: bytes) -> Caller:
        """Whose token it is. `digest` stands for the token in memory; what was verified once is not verified again
        while the keys are the same.

        Raises:
            Unauthenticated: it is not valid, here or now.
        """
        if (keys := self._file.value()) is not self._keys:
            self._keys = keys
            self._verified.clear()
        known = self._verified.get(digest)
        if known is None or self._clock() >= known.until:
            known = self._verify(token)
            self._verified[digest] = known
            if len(self._verified) > MAX_REMEMBERED:
                self._verified.popitem(last=False)
        return known.caller

    def _verify(self, token: str) -> _Verified:
        try:
            claims = jwt.decode(
                token,
                self._key(jwt.get_unverified_header(token).get("kid")),
                algorithms=list(self._settings.algorithms),
                issuer=self._settings.issuer,
                audience=self._settings.audience,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
            return _Verified(self._caller(claims), float(claims["exp"]) + LEEWAY_SECONDS)
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise Unauthenticated(f"the token is not valid: {_reason(error)}") from None

    def _key(self, key_id: object) -> jwt.PyJWK:
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        if not isinstance(key_id, str) or key_id not in self._keys:
            raise ValueError("it is signed by no key that is known here")
        return self._keys[key_id]

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        namespaces = [name for name in _strings(_claim(claims, self._settings.namespaces_claim)) if _is_namespace(name)]
        roles: list[Role] = [role for role in INCLUDED if role in _strings(_claim(claims, self._settings.roles_claim))]
        return Caller(check_subject(claims["sub"]), own_namespace(namespaces), granted(namespaces, roles), "jwt")


def _read_keys(content: bytes) -> dict[str, jwt.PyJWK]:
    """The public keys for signatures, by id."""
    try:
        listed = json.loads(content)["keys"]
        wanted = [key for key in listed if key.get("kty") != "oct" and key.get("use", "sig") == "sig"]
        keys = {str(key.get("kid", "")): jwt.PyJWK(key) for key in wanted}
    except (jwt.PyJWTError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"it is no JSON Web Key Set: {type(error).__name__}") from None
    if not keys or len(keys) < len(wanted):
        raise ValueError("there must be one public key or more, each with another kid")
    return keys


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _strings(claim: Any) -> list[str]:
    """A claim as strings: it may be a list, or words as in `scope`."""
    if isinstance(claim, str):
        return claim.split()
    return [item for item in claim if isinstance(item, str)] if isinstance(claim, list) else []


def _is_namespace(text: str) -> bool:
    """What is none may be in the claim, for others."""
    try:
        return text == EVERY_NAMESPACE or bool(check_id(text, "namespaces"))
    except InvalidArgument:
        return False


def _reason(error: Exception) -> str:
    """What is wrong with a token, without anything out of it."""
    match error:
        case jwt.ExpiredSignatureError():
            return "it has expired"
        case jwt.ImmatureSignatureError():
            return "it is not valid yet"
        case jwt.InvalidAudienceError():
            return "it is for another audience"
        case jwt.InvalidIssuerError():
            return "it is from another issuer"
        case jwt.InvalidAlgorithmError():
            return "its algorithm is not accepted"
        case jwt.MissingRequiredClaimError():
            return f"it has no claim {error.claim}"
        case jwt.InvalidSignatureError():
            return "its signature is wrong"
        case jwt.PyJWTError():
            return "it cannot be read"
    return str(error) if isinstance(error, ValueError) else "it cannot be read"

"""Who makes a call: by bearer token (of a file, or a JWT), by certificate, or nobody in particular."""

from collections.abc import Iterable, Mapping, Sequence

from shared.auth.caller import ANONYMOUS, Caller
from shared.auth.certificates import CertificateCallers
from shared.auth.json_web_tokens import JwtVerifier
from shared.auth.tokens import TokenFile, hash_token
from shared.errors import Unauthenticated

Metadata = Iterable[tuple[str, str | bytes]]

_CHALLENGE = 'Bearer realm="loraplex"'
_REFUSAL = f'{_CHALLENGE}, error="invalid_token"'


class Authenticator:
    """Knows callers. With none of its parts, everybody is `ANONYMOUS`.

    A bearer token decides; only a call without one is known by its connection's certificate.
    """

    def __init__(
        self,
        tokens: TokenFile | None = None,
        web_tokens: JwtVerifier | None = None,
        certificates: CertificateCallers | None = None,
    ) -> None:
        self._tokens = tokens
        self._web_tokens = web_tokens
        self._certificates = certificates

    @property
    def is_open(self) -> bool:
        """Whether nobody authenticates."""
        return self._tokens is None and self._web_tokens is None and self._certificates is None

    def caller(self, metadata: Metadata, peer: Mapping[str, Sequence[bytes]]) -> Caller:
        """Who calls. `peer` is the context's `auth_context()`.

        Raises:
            Unauthenticated: nobody that is known; metadata has the challenge `www_authenticate`.
        """
        if self.is_open:
            return ANONYMOUS
        values = [value for key, value in metadata if key == "authorization"]
        if not values:
            found = self._certificates.caller(peer) if self._certificates is not None else None
            if found is None:
                raise _refused("the call has no bearer token, and no certificate that is known here", _CHALLENGE)
            return found
        scheme, _, token = str(values[0]).partition(" ")
        if len(values) > 1 or scheme.lower() != "bearer" or not token.strip():
            raise _refused("the metadata `authorization` must be one `Bearer TOKEN`", _CHALLENGE)
        return self._bearer(token.strip())

    def _bearer(self, token: str) -> Caller:
        digest = hash_token(token)
        listed = self._tokens.caller(digest) if self._tokens is not None else None
        if listed is not None:
            return listed
        if self._web_tokens is None or token.count(".") != 2:
            raise _refused("the token is not known here, or not any more", _REFUSAL)
        try:
            return self._web_tokens.caller(token, digest)
        except Unauthenticated as error:
            raise _refused(error.message, _REFUSAL) from None


def _refused(message: str, challenge: str) -> Unauthenticated:
    return Unauthenticated(message, metadata={"www_authenticate": challenge})

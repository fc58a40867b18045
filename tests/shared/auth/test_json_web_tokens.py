"""JSON Web Tokens: what counts, and each way of being no good."""

import base64
import datetime
import hmac
import json
import time

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from shared.auth.json_web_tokens import JwtSettings, JwtVerifier
from shared.auth.tokens import hash_token
from shared.errors import Unauthenticated
from tests.shared.auth.authority import Issuer

LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
SETTINGS = JwtSettings(Issuer.NAME, Issuer.AUDIENCE)


@pytest.fixture
def issuer(tmp_path):
    return Issuer(tmp_path / "jwks.json")


def caller(verifier, token):
    return verifier.caller(token, hash_token(token))


def refusal(verifier, token):
    with pytest.raises(Unauthenticated) as caught:
        caller(verifier, token)
    assert token not in caught.value.message
    return caught.value.message


def test_who_it_is(issuer):
    verifier = JwtVerifier(issuer.jwks, SETTINGS)
    found = caller(verifier, issuer.token(namespaces=["team-a", "team-b", "Not An Id"], roles=["writer", "vip"]))
    assert (found.name, found.namespace, found.credential) == ("anna", "team-a", "jwt")
    assert found.roles == {"team-a": {"reader", "writer"}, "team-b": {"reader", "writer"}}
    assert not caller(verifier, issuer.token(namespaces=None)).roles
    assert caller(verifier, issuer.token(roles="replica")).roles_in("any") == {"replica"}


def test_claims_elsewhere(issuer):
    named = JwtSettings(
        Issuer.NAME, Issuer.AUDIENCE, namespaces_claim="https://x.example/ns", roles_claim="realm_access.roles"
    )
    claims = {"https://x.example/ns": "a b", "realm_access": {"roles": ["admin"]}, "namespaces": ["c"]}
    found = caller(JwtVerifier(issuer.jwks, named), issuer.token(**claims))
    assert set(found.roles) == {"a", "b"}
    assert "admin" in found.roles_in("a")


def test_what_does_not_count(issuer, tmp_path):
    verifier = JwtVerifier(issuer.jwks, SETTINGS)
    assert "expired" in refusal(verifier, issuer.token(exp=LONG_AGO))
    assert "not valid yet" in refusal(verifier, issuer.token(nbf=datetime.datetime(2999, 1, 1, tzinfo=datetime.UTC)))
    assert "audience" in refusal(verifier, issuer.token(aud="another"))
    assert "issuer" in refusal(verifier, issuer.token(iss="https://another.example"))
    for claim in ("exp", "sub", "aud", "iss"):
        assert f"no claim {claim}" in refusal(verifier, issuer.token(**{claim: None}))
    assert "signature" in refusal(verifier, issuer.token(key=ec.generate_private_key(ec.SECP256R1())))
    assert "no key that is known" in refusal(verifier, issuer.token(headers={"kid": "another"}))
    refusal(verifier, issuer.token(sub="a\nb"))
    refusal(verifier, "a.b.c")
    head, body, sign = issuer.token().split(".")
    changed = json.loads(base64.urlsafe_b64decode(body + "=="))
    changed["roles"] = ["admin"]
    forged = base64.urlsafe_b64encode(json.dumps(changed).encode()).decode().rstrip("=")
    assert "signature" in refusal(verifier, f"{head}.{forged}.{sign}")


def test_algorithms_that_are_not_accepted(issuer):
    verifier = JwtVerifier(issuer.jwks, SETTINGS)
    # One key: a token that names none is verified against it.
    unsigned = jwt.encode(jwt.decode(issuer.token(), options={"verify_signature": False}), None, "none")
    assert "algorithm" in refusal(verifier, unsigned)
    named = jwt.encode({"sub": "x", "exp": time.time() + 99}, None, "none", {"kid": issuer.key_id})
    assert "algorithm" in refusal(verifier, named)
    # The public key as the secret of a symmetric algorithm: whoever knows the one must not have the other.
    public = issuer.key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    head, body, _ = jwt.encode({"sub": "x"}, b"k" * 32, "HS256", {"kid": issuer.key_id}).split(".")
    signature = hmac.digest(public, f"{head}.{body}".encode(), "sha256")
    forged = base64.urlsafe_b64encode(signature).decode().rstrip("=")
    assert "algorithm" in refusal(verifier, f"{head}.{body}.{forged}")
    # An accepted algorithm, but not that of the key.
    other = rsa.generate_private_key(65537, 2048)
    refusal(verifier, issuer.token(key=other, algorithm="RS256"))
    narrow = JwtVerifier(issuer.jwks, JwtSettings(Issuer.NAME, Issuer.AUDIENCE, algorithms=("RS256",)))
    assert "algorithm" in refusal(narrow, issuer.token())


def test_keys_are_followed_and_what_was_verified_is_verified_again(issuer, monkeypatch):
    verifier = JwtVerifier(issuer.jwks, SETTINGS)
    token = issuer.token()
    assert caller(verifier, token) is caller(verifier, token)
    issuer.rotate("k2")
    later = time.monotonic() + 2
    monkeypatch.setattr(time, "monotonic", lambda: later)
    refusal(verifier, token)
    assert caller(verifier, issuer.token()).name == "anna"


def test_what_was_verified_expires(issuer):
    verifier = JwtVerifier(issuer.jwks, SETTINGS)
    end = int(time.time()) + 4
    token = issuer.token(exp=end - 10)  # clocks may differ by ten seconds
    assert caller(verifier, token).name == "anna"
    time.sleep(end - time.time() + 0.1)
    assert "expired" in refusal(verifier, token)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"keys": []}', '{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', '{"keys": [{"kty": "EC"}]}'],
)
def test_wrong_key_sets_are_refused(tmp_path, text):
    path = tmp_path / "jwks.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"key|Key"):
        JwtVerifier(path, SETTINGS)

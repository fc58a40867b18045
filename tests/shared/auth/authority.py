"""A certificate authority, and an issuer of JSON Web Tokens, made for a test."""

import datetime
import json
from pathlib import Path
from typing import Any, NamedTuple

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Files(NamedTuple):
    """PEM files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates, below one folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, None), critical=True)
        self.cert = folder / f"{name}.pem"
        self.cert.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *alternatives: str) -> Files:
        """A certificate for DNS names and URIs, in files called `name`; those of an earlier one are replaced."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.UniformResourceIdentifier(n) if "://" in n else x509.DNSName(n) for n in alternatives]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        cert = builder.sign(self._key, hashes.SHA256())
        files = Files(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        files.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        files.key.write_bytes(private_pem(key))
        return files

    def _builder(self, subject: x509.Name, key: Any) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(key.public_key())
        return builder.serial_number(x509.random_serial_number()).not_valid_before(now - DAY).not_valid_after(now + DAY)


def private_pem(key: Any) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


class Issuer:
    """Issues JSON Web Tokens, and writes its public keys to a file."""

    NAME, AUDIENCE = "https://issuer.example", "loraplex"

    def __init__(self, jwks: Path) -> None:
        self.jwks = jwks
        self.rotate("k1")

    def rotate(self, key_id: str) -> None:
        """From now on there is one key, and it is another."""
        self.key_id = key_id
        self.key = ec.generate_private_key(ec.SECP256R1())
        public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key()))
        self.jwks.write_text(json.dumps({"keys": [{**public, "kid": key_id, "use": "sig"}]}))

    def token(self, *, key: Any = None, algorithm: str = "ES256", headers: Any = None, **claims: Any) -> str:
        """A token for an hour; a claim that is None is left out."""
        now = datetime.datetime.now(datetime.UTC)
        usual = {"iss": self.NAME, "aud": self.AUDIENCE, "sub": "anna", "exp": now + DAY / 24}
        usual |= {"namespaces": ["team-a"], "roles": ["reader"]}
        kept = {name: value for name, value in (usual | claims).items() if value is not None}
        return jwt.encode(kept, key or self.key, algorithm, {"kid": self.key_id, **(headers or {})})

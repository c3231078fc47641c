"""An issuer of JSON Web Tokens, and forgers of them."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER = "https://issuer.example"
AUDIENCE = "conch"

_EXPORTS: Mapping[str, Any] = {
    "RS256": RSAAlgorithm.to_jwk,
    "PS256": RSAAlgorithm.to_jwk,
    "ES256": ECAlgorithm.to_jwk,
    "EdDSA": OKPAlgorithm.to_jwk,
}


def new_key(algorithm: str, bits: int = 2048) -> Any:
    """A private key for an algorithm."""
    if algorithm == "ES256":
        return ec.generate_private_key(ec.SECP256R1())
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    return rsa.generate_private_key(65537, bits)


def public_jwk(key: Any, algorithm: str, kid: str) -> dict[str, Any]:
    """The JWK of a key's public half."""
    exported: dict[str, Any] = json.loads(_EXPORTS[algorithm](key.public_key()))
    return {**exported, "kid": kid, "use": "sig"}


def claims_of(**changes: Any) -> dict[str, Any]:
    """Claims that the server accepts, with changes; a value of None leaves one out."""
    now = int(time.time())
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "iat": now, "exp": now + 600, **changes}
    return {name: value for name, value in claims.items() if value is not None}


class Issuer:
    """Signs tokens with one key.

    Attributes:
        key: Its private key.
        kid: The key's name.
    """

    def __init__(self, algorithm: str = "ES256", kid: str = "one") -> None:
        self.algorithm = algorithm
        self.kid = kid
        self.key = new_key(algorithm)

    @property
    def jwk(self) -> dict[str, Any]:
        """Its public key."""
        return public_jwk(self.key, self.algorithm, self.kid)

    @property
    def jwks(self) -> bytes:
        """Its JWK set."""
        return json.dumps({"keys": [self.jwk]}).encode()

    def token(self, header: Mapping[str, Any] | None = None, **changes: Any) -> str:
        """A token with the claims of `claims_of`."""
        return jwt.encode(claims_of(**changes), self.key, self.algorithm, {"kid": self.kid, **(header or {})})


def raw_token(header: Mapping[str, Any], claims: Mapping[str, Any], signature: bytes = b"") -> str:
    """A token with whatever header and signature."""
    parts = (json.dumps(header).encode(), json.dumps(claims).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)

"""Verifies JSON Web Tokens (RFC 7519, 8725) with the keys of a JWK set (RFC 7517), by PyJWT.

Only asymmetric algorithms, and of these only what fits the type of the key. A token names its key by ``kid``,
which is looked up among the keys that are there; what else a header says of keys (``jku``, ``x5u``, ``jwk``)
is not read. Used by: `policy_state`, `policy_file`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conch.core.errors import UnauthenticatedError, UnavailableError

_BY_KIND: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("RSA", ""): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
_LEAST_RSA_BITS = 2048
_MOST_TOKEN_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class JwtSettings:
    """The table ``[jwt]`` of a policy.

    Attributes:
        issuer: The claim ``iss`` of tokens.
        audiences: One of them must be in the claim ``aud``.
        jwks_file: File with the keys; None if they come from a URL.
        jwks_url: URL of the keys; empty if they come from a file.
        clock_skew_s: Seconds by which the clocks of issuer and server may differ.
    """

    issuer: str
    audiences: tuple[str, ...]
    jwks_file: Path | None
    jwks_url: str
    clock_skew_s: float


@dataclass(frozen=True, slots=True)
class VerifiedToken:
    """A token that is valid now.

    Attributes:
        claims: Its claims.
        subject: Its claim ``sub``, or empty.
        expires_s: Seconds since 1970 after which it is not accepted any more.
    """

    claims: Mapping[str, Any]
    subject: str
    expires_s: float


class UnknownSigningKeyError(UnauthenticatedError):
    """The token names a key that is not there; the issuer may have a new one."""


@dataclass(frozen=True, slots=True)
class _SigningKey:
    """A public key, and the algorithms that it may be used with."""

    key: Any
    algorithms: tuple[str, ...]


class KeySet:
    """The public keys of an issuer.

    Args:
        text: A JWK set in JSON. Keys of other kinds, and keys that are not for signatures, are left out.

    Raises:
        ValueError: It is no JWK set, a key is malformed or too short, or none can be used.
        ImportError: PyJWT or cryptography is not installed.
    """

    def __init__(self, text: bytes) -> None:
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"no JWK set: {error}") from None
        listed = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(listed, list):
            raise ValueError("no JWK set: expected an object with a list 'keys'")
        self._keys: dict[str, _SigningKey] = {}
        for jwk in listed:
            self._add(jwk)
        if not self._keys:
            raise ValueError("no key of the JWK set is a public key for signatures (RSA, EC or Ed25519)")

    def _add(self, jwk: Any) -> None:
        if not isinstance(jwk, dict):
            raise ValueError("a key of the JWK set is no object")
        kind = str(jwk.get("kty", "")), str(jwk.get("crv", ""))
        algorithms = _BY_KIND.get(kind, ())
        if jwk.get("alg") is not None:
            algorithms = tuple(each for each in algorithms if each == jwk["alg"])
        if not algorithms or jwk.get("use", "sig") != "sig":
            return
        kid = jwk.get("kid", "")
        if not isinstance(kid, str) or kid in self._keys:
            raise ValueError(f"the kid {kid!r} of the JWK set is no text, or occurs twice")
        self._keys[kid] = _SigningKey(_public_key(jwk, algorithms[0]), algorithms)

    def find(self, kid: str | None) -> _SigningKey:
        """The key of a token; one without a ``kid`` needs a set of one key.

        Raises:
            UnknownSigningKeyError: There is none.
        """
        if kid is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        found = None if kid is None else self._keys.get(kid)
        if found is None:
            raise UnknownSigningKeyError("the token is signed with a key that is not known here")
        return found


def _public_key(jwk: Mapping[str, Any], algorithm: str) -> Any:
    import jwt

    try:
        key = jwt.PyJWK(dict(jwk), algorithm).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"the key {jwk.get('kid', '')!r} of the JWK set is malformed: {error}") from None
    if hasattr(key, "public_key"):
        raise ValueError(
            f"the key {jwk.get('kid', '')!r} of the JWK set is a private key: give public keys only"
        )
    if getattr(key, "key_size", _LEAST_RSA_BITS) < _LEAST_RSA_BITS and jwk["kty"] == "RSA":
        raise ValueError(
            f"the key {jwk.get('kid', '')!r} of the JWK set has less than {_LEAST_RSA_BITS} bits"
        )
    return key


class TokenVerifier:
    """Verifies tokens; `keys` is None as long as the issuer's keys have not been read."""

    def __init__(self, settings: JwtSettings, keys: KeySet | None) -> None:
        self._settings = settings
        self._keys = keys

    def verify(self, token: str) -> VerifiedToken:
        """Verifies signature, issuer, audience and times.

        Raises:
            UnauthenticatedError: The token is malformed, forged, for others, expired or not valid yet.
            UnavailableError: There are no keys yet.
        """
        import jwt

        if len(token) > _MOST_TOKEN_BYTES:
            raise UnauthenticatedError("the token is too long")
        if self._keys is None:
            raise UnavailableError("the keys of the token's issuer have not been read yet; try again soon")
        settings = self._settings
        try:
            kid = jwt.get_unverified_header(token).get("kid")
            signer = self._keys.find(kid)
            claims = jwt.decode(
                token,
                signer.key,
                algorithms=list(signer.algorithms),
                audience=settings.audiences,
                issuer=settings.issuer,
                leeway=settings.clock_skew_s,
                options={"require": ["exp", "iss", "aud"]},
            )
            expires_s = float(claims["exp"]) + settings.clock_skew_s
        # Odd JSON: numbers without an end, and lists that are nested too deep.
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise UnauthenticatedError(f"the token is not valid: {error}") from None
        return VerifiedToken(claims, str(claims.get("sub", "")), expires_s)

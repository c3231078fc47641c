"""Verifies JSON Web Tokens (RFC 7519, 8725) with the keys of a JWK set (RFC 7517), by PyJWT.

Only asymmetric algorithms, and of these only what fits the type of the key. A token names its key by ``kid``,
which is looked up among the keys that are there; what else a header says of keys (``jku``, ``x5u``, ``jwk``)
is not read.
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
_MOST_REASONS = 20
_MOST_KID = 80


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

    A key that can't be used is left out (RFC 7517, 5), and of two keys with one ``kid`` the second.

    Args:
        text: A JWK set in JSON.

    Attributes:
        left_out: For each key that is left out which one and why, without its contents; not for those with
            a ``use`` other than ``sig``, which are not meant for tokens.

    Raises:
        ValueError: It is no JWK set, or no key can be used; the text says why.
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
        left_out: list[str] = []
        others: list[str] = []
        for number, jwk in enumerate(listed, 1):
            try:
                self._add(jwk)
            except ValueError as error:
                texts = others if _is_for_others(jwk) else left_out
                texts.append(f"key {number}{_named(jwk)}: {error}")
        if not self._keys:
            reasons = left_out + others
            more = [f"and {len(reasons) - _MOST_REASONS} more"] if len(reasons) > _MOST_REASONS else []
            told = "; ".join(reasons[:_MOST_REASONS] + more) or "it is empty"
            raise ValueError(f"no key of the JWK set can be used: {told}")
        self.left_out = tuple(left_out)

    def _add(self, jwk: Any) -> None:
        """Adds a key. Raises ValueError: it can't be used."""
        if not isinstance(jwk, dict):
            raise ValueError("it is no object")
        if _is_for_others(jwk):
            raise ValueError("its 'use' is not 'sig'")
        kind = str(jwk.get("kty", "")), str(jwk.get("crv", ""))
        algorithms = _BY_KIND.get(kind, ())
        if not algorithms:
            raise ValueError("its type is none of RSA, EC (P-256, P-384, P-521) and OKP (Ed25519)")
        if jwk.get("alg") is not None:
            algorithms = tuple(each for each in algorithms if each == jwk["alg"])
        if not algorithms:
            raise ValueError("its 'alg' is no signature algorithm of its type")
        kid = jwk.get("kid", "")
        if not isinstance(kid, str):
            raise ValueError("its 'kid' is no text")
        key = _public_key(jwk, algorithms[0])
        if kid in self._keys:
            raise ValueError(f"a key before it has {'its' if kid else 'no'} 'kid' too")
        self._keys[kid] = _SigningKey(key, algorithms)

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


def _is_for_others(jwk: Any) -> bool:
    return isinstance(jwk, dict) and jwk.get("use", "sig") != "sig"


def _named(jwk: Any) -> str:
    kid = jwk.get("kid") if isinstance(jwk, dict) else None
    return f" (kid {kid!r:.{_MOST_KID}})" if isinstance(kid, str) else ""


def _public_key(jwk: Mapping[str, Any], algorithm: str) -> Any:
    import jwt
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        key = jwt.PyJWK(dict(jwk), algorithm).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, UnsupportedAlgorithm) as error:
        raise ValueError(f"it is malformed: {error}") from None
    if hasattr(key, "public_key"):
        raise ValueError("it is a private key: give public keys only")
    if getattr(key, "key_size", _LEAST_RSA_BITS) < _LEAST_RSA_BITS and jwk["kty"] == "RSA":
        raise ValueError(f"it has less than {_LEAST_RSA_BITS} bits")
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

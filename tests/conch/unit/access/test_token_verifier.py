"""Tokens: those of the issuer are accepted, and every classic forgery is refused."""

from __future__ import annotations

import hmac
import json
import re
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from tests.support.tokens import AUDIENCE, ISSUER, Issuer, claims_of, new_key, public_jwk, raw_token

from conch.access.token_verifier import JwtSettings, KeySet, TokenVerifier, UnknownSigningKeyError
from conch.core.errors import UnauthenticatedError

SKEW_S = 600.0
SETTINGS = JwtSettings(ISSUER, (AUDIENCE, "other"), None, "", SKEW_S)
issuer = Issuer("RS256")
verifier = TokenVerifier(SETTINGS, KeySet(issuer.jwks))


def keyed_with_the_public_key() -> str:
    """Signs by HMAC, with the public key as the secret: works where the header chooses the algorithm."""
    pem = issuer.key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    unsigned = raw_token({"alg": "HS256", "typ": "JWT", "kid": issuer.kid}, claims_of()).rpartition(".")[0]
    signature = hmac.new(pem, unsigned.encode(), sha256).digest()
    return unsigned + "." + raw_token({}, {}, signature).rpartition(".")[2]


def with_another_body() -> str:
    head, _, signature = issuer.token().split(".")
    return ".".join((head, raw_token({}, claims_of(sub="root")).split(".")[1], signature))


def with_its_own_key(field: str, value: Any) -> str:
    forger = Issuer("RS256", issuer.kid)
    return forger.token({field: value if value is not None else forger.jwk})


FORGERIES: dict[str, Callable[[], str]] = {
    "alg none": lambda: raw_token({"alg": "none", "kid": issuer.kid}, claims_of()),
    "alg nOnE": lambda: raw_token({"alg": "nOnE", "kid": issuer.kid}, claims_of()),
    "no alg": lambda: raw_token({"kid": issuer.kid}, claims_of()),
    "HMAC with the public key": keyed_with_the_public_key,
    "algorithm of another key": lambda: raw_token({"alg": "ES256", "kid": "one"}, claims_of(), b"x" * 64),
    "wrong key": lambda: Issuer("RS256", issuer.kid).token(),
    "no signature": lambda: issuer.token().rpartition(".")[0] + ".",
    "changed claims": with_another_body,
    "key in the header": lambda: with_its_own_key("jwk", None),
    "URL of keys in the header": lambda: with_its_own_key("jku", "https://forger.example/jwks"),
    "critical extension": lambda: issuer.token({"crit": ["b64"], "b64": True}),
    "kid traversal": lambda: issuer.token({"kid": "../../../../dev/null"}),
    "kid injection": lambda: issuer.token({"kid": "x' UNION SELECT 'secret"}),
    "kid no text": lambda: raw_token({"alg": "RS256", "kid": ["one"]}, claims_of(), b"x" * 256),
    "kid empty": lambda: issuer.token({"kid": ""}),
    "expired": lambda: issuer.token(exp=int(time.time() - SKEW_S) - 5),
    "without expiry": lambda: issuer.token(exp=None),
    "endless": lambda: issuer.token(exp=float("inf")),
    "expiry no number": lambda: issuer.token(exp="never"),
    "not valid yet": lambda: issuer.token(nbf=int(time.time() + SKEW_S) + 60),
    "issued in the future": lambda: issuer.token(iat=int(time.time() + SKEW_S) + 60),
    "wrong audience": lambda: issuer.token(aud="another"),
    "without audience": lambda: issuer.token(aud=None),
    "wrong issuer": lambda: issuer.token(iss="https://forger.example"),
    "without issuer": lambda: issuer.token(iss=None),
    "malformed": lambda: "a.b.c",
    "deep header": lambda: raw_token({}, {}).replace("e30", "W1tb" * 3000, 1),
    "too long": lambda: issuer.token(more="x" * 20_000),
}  # fmt: skip


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_forgeries_are_refused(forge: Callable[[], str]) -> None:
    token = forge()
    with pytest.raises(UnauthenticatedError) as refused:
        verifier.verify(token)
    assert token not in refused.value.message


@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "ES256", "EdDSA"])
def test_tokens_of_the_issuer_are_accepted(algorithm: str) -> None:
    own = Issuer(algorithm)
    expires_s = int(time.time() - SKEW_S) + 300
    signed = own.token(aud=["x", "other"], exp=expires_s, groups=["ml"])
    token = TokenVerifier(SETTINGS, KeySet(own.jwks)).verify(signed)
    assert (token.subject, token.claims["groups"], token.expires_s) == (
        "alice",
        ["ml"],
        expires_s + SKEW_S,
    )


def test_a_token_without_a_kid_needs_a_set_of_one_key() -> None:
    token = jwt.encode(claims_of(), issuer.key, "RS256")
    assert verifier.verify(token).subject == "alice"
    two = KeySet(json.dumps({"keys": [issuer.jwk, Issuer(kid="two").jwk]}).encode())
    with pytest.raises(UnknownSigningKeyError):
        TokenVerifier(SETTINGS, two).verify(token)


def test_an_algorithm_of_the_key_excludes_others() -> None:
    keys = KeySet(json.dumps({"keys": [{**issuer.jwk, "alg": "PS256"}]}).encode())
    with pytest.raises(UnauthenticatedError):
        TokenVerifier(SETTINGS, keys).verify(issuer.token())


PRIVATE = {**json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(issuer.key)), "kid": "whole"}
UNUSABLE: dict[str, tuple[Any, str]] = {
    "no object": (["RSA"], "key 1: it is no object"),
    "symmetric": ({"kty": "oct", "k": "c2VjcmV0", "kid": "a"}, r"key 1 \(kid 'a'\): its type is none of"),
    "of a kind to come": ({"kty": "AKP", "alg": "ML-DSA-65"}, "key 1: its type is none of"),
    "malformed": ({"kty": "RSA", "n": "AQ", "kid": "b"}, r"key 1 \(kid 'b'\): it is malformed"),
    "with a number": ({"kty": "RSA", "n": 7, "e": "AQAB"}, "key 1: it is malformed"),
    "off its curve": ({"kty": "EC", "crv": "P-256", "x": "A" * 43, "y": "A" * 43}, "it is malformed"),
    "too short": (public_jwk(new_key("RS256", 1024), "RS256", "c"), "it has less than 2048 bits"),
    "private": (PRIVATE, r"key 1 \(kid 'whole'\): it is a private key"),
    "kid no text": ({**issuer.jwk, "kid": 1}, "key 1: its 'kid' is no text"),
    "for encryption by its alg": ({**issuer.jwk, "alg": "RSA-OAEP"}, "its 'alg' is no signature algorithm"),
}  # fmt: skip


@pytest.mark.parametrize(("jwk", "reason"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_key_that_can_not_be_used_is_left_out(jwk: Any, reason: str) -> None:
    keys = KeySet(json.dumps({"keys": [jwk, issuer.jwk]}).encode())
    assert TokenVerifier(SETTINGS, keys).verify(issuer.token()).subject == "alice"
    (told,) = keys.left_out
    assert re.search(reason, told)
    assert not any(secret in told for secret in (PRIVATE["d"], PRIVATE["n"], "c2VjcmV0"))
    with pytest.raises(ValueError, match=f"no key of the JWK set can be used: .*{reason}"):
        KeySet(json.dumps({"keys": [jwk]}).encode())


def test_the_first_of_two_keys_with_one_kid_counts() -> None:
    second = Issuer("ES256", issuer.kid)
    keys = KeySet(json.dumps({"keys": [issuer.jwk, second.jwk]}).encode())
    assert keys.left_out == ("key 2 (kid 'one'): a key before it has its 'kid' too",)
    assert TokenVerifier(SETTINGS, keys).verify(issuer.token()).subject == "alice"
    with pytest.raises(UnauthenticatedError):
        TokenVerifier(SETTINGS, keys).verify(second.token())


def test_keys_for_another_use_are_no_cause_for_a_warning() -> None:
    other = {**issuer.jwk, "use": "enc"}
    assert KeySet(json.dumps({"keys": [other, issuer.jwk]}).encode()).left_out == ()
    with pytest.raises(ValueError, match=r"key 1 \(kid 'one'\): its 'use' is not 'sig'"):
        KeySet(json.dumps({"keys": [other]}).encode())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{", "no JWK set"),
        (b"[" * 100_000, "no JWK set"),
        (b"[]", "a list 'keys'"),
        (b'{"keys": []}', "it is empty"),
        (json.dumps({"keys": [1] * 25}).encode(), "key 20: it is no object; and 5 more$"),
    ],
    ids=range(5),
)
def test_sets_of_keys_that_can_not_be(text: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        KeySet(text)

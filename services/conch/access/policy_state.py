"""The policy in effect: from credentials to grants.

Keys and tokens are found by a keyed hash of their SHA-256, whose key is drawn at random for each state, and
then compared in constant time: neither step takes a time that tells of a part of a key. Verified tokens are
remembered until they expire or another state is installed, so that a request costs two hashes and a lookup.

Owns: the remembered tokens. Threads and locks: any thread; a lock guards changes of what is remembered.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b, sha256
from hmac import compare_digest
from typing import Any

from conch.access.policy_file import Policy, PrincipalEntry
from conch.access.principals import Grant, Principal
from conch.access.request_limits import Limiter
from conch.access.token_verifier import KeySet, TokenVerifier, UnknownSigningKeyError
from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import PermissionDeniedError, UnauthenticatedError

MOST_TOKENS = 4096
"""Tokens that are remembered; those verified first are forgotten first."""

_DIGEST_BYTES = 16
_SPACED_CLAIMS = frozenset(("scope", "scp"))
_UNKNOWN = "unknown credentials: neither a key of the access policy nor a token that it accepts"


@dataclass(frozen=True, slots=True)
class _Known:
    """A credential that is known, by the SHA-256 of it."""

    digest: bytes
    grant: Grant


class PolicyState:
    """One policy with one set of signing keys.

    Args:
        policy: The policy.
        keys: The keys that sign tokens; None as long as there are none.
        limiters: Limiters of earlier states by principal; those of the same name go on with what they count.
        refresh_keys: Called for a token with an unknown key, to have the keys read again.
        clock: Monotonic time of the limits.

    Attributes:
        policy: The policy.
        limiters: The limiters of its principals, by name.
        certificates: Grants by name in a certificate.
        anonymous: The grant of callers without credentials; None if they are refused.
    """

    def __init__(
        self,
        policy: Policy,
        keys: KeySet | None = None,
        limiters: Mapping[str, Limiter] | None = None,
        refresh_keys: Callable[[], None] | None = None,
        clock: Clock = monotonic_ns,
    ) -> None:
        self.policy = policy
        self.limiters: dict[str, Limiter] = {}
        self.certificates: dict[str, Grant] = {}
        self.anonymous: Grant | None = None
        self._secret = secrets.token_bytes(32)
        self._keys: dict[bytes, _Known] = {}
        self._tokens: dict[bytes, _Known] = {}
        self._by_claims: list[tuple[Mapping[str, str], Principal]] = []
        self._lock = threading.Lock()
        self._refresh_keys = refresh_keys
        self._verifier = None if policy.jwt is None else TokenVerifier(policy.jwt, keys)
        for entry in policy.principals:
            self._add(entry, (limiters or {}).get(entry.name), clock)

    def _add(self, entry: PrincipalEntry, limiter: Limiter | None, clock: Clock) -> None:
        if limiter is None:
            limiter = Limiter(entry.name, entry.limits, clock)
        else:
            limiter.change(entry.limits)
        self.limiters[entry.name] = limiter
        principal = Principal(entry.name, entry.models, limiter)
        grant = Grant(principal, epoch=self)
        for digest in entry.keys:
            self._keys[self._place(digest)] = _Known(digest, grant)
        for name in entry.certificates:
            self.certificates[name] = Grant(principal, name, epoch=self)
        if entry.claims:
            self._by_claims.append((entry.claims, principal))
        if entry.anonymous:
            self.anonymous = grant

    def _place(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._secret, digest_size=_DIGEST_BYTES).digest()

    def grant_of(self, credential: str, now_s: float) -> Grant:
        """The grant of a key or a token; `now_s` is in seconds since 1970.

        Raises:
            UnauthenticatedError: It is unknown, forged or expired.
            PermissionDeniedError: The token is valid, but no principal has its claims.
        """
        digest = sha256(credential.encode(errors="backslashreplace")).digest()
        place = self._place(digest)
        known = self._keys.get(place) or self._tokens.get(place)
        if known is not None and compare_digest(known.digest, digest) and known.grant.expires_s > now_s:
            return known.grant
        if self._verifier is None or credential.count(".") != 2:
            raise UnauthenticatedError(_UNKNOWN)
        try:
            token = self._verifier.verify(credential)
        except UnknownSigningKeyError:
            if self._refresh_keys is not None:
                self._refresh_keys()
            raise
        grant = Grant(self._principal_of(token.claims), token.subject, token.expires_s, self)
        self._remember(place, _Known(digest, grant))
        return grant

    def _principal_of(self, claims: Mapping[str, Any]) -> Principal:
        for wanted, principal in self._by_claims:
            if all(_has(claims, name, value) for name, value in wanted.items()):
                return principal
        raise PermissionDeniedError(
            "the token is valid, but no principal of the access policy has its claims"
        )

    def _remember(self, place: bytes, known: _Known) -> None:
        with self._lock:
            while len(self._tokens) >= MOST_TOKENS:
                del self._tokens[next(iter(self._tokens))]
            self._tokens[place] = known


def _has(claims: Mapping[str, Any], name: str, value: str) -> bool:
    """True if a claim is this text, or a list (or a spaced text, for some names) that has it."""
    claim = claims.get(name)
    if isinstance(claim, str):
        return claim == value or (name in _SPACED_CLAIMS and value in claim.split())
    return isinstance(claim, list) and value in claim

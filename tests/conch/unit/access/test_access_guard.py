"""One set of rules protects a port: the policy, keys of restricted categories, and the port's own token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from conch.access.access_guard import (
    EVERYTHING,
    UNGUARDED,
    Access,
    AccessGuard,
    OwnToken,
    PortRules,
    RestrictedError,
)
from conch.access.policy_file import Policy
from conch.access.policy_state import PolicyState
from conch.access.principals import CONTROLS, EVERY_MODEL, INFERS, OPEN
from conch.core.errors import UnauthenticatedError

KEYED = PortRules({"inference": ("key", "värde")}, "restricted, expecting '{key}'")
TOKEN = PortRules(token=OwnToken("pearl", "own", "no token", "wrong token"))


@dataclass
class Caller:
    """A client with headers."""

    headers: Mapping[str, str | list[str]] = field(default_factory=dict)
    client: str = "c"
    certificate_names: tuple[str, ...] = ()

    def header_values(self, name: str) -> list[str]:
        given = self.headers.get(name, [])
        return [given] if isinstance(given, str) else given


def policy() -> Access:
    """A policy without principals."""
    return Access(PolicyState(Policy(())))


def test_a_port_without_rules_checks_nothing() -> None:
    assert not UNGUARDED.identifies and not UNGUARDED.checks(CONTROLS, "model-repository")
    grant = UNGUARDED.admit(Caller(), CONTROLS, "load_model", category="model-repository")
    UNGUARDED.check(Caller(), grant, CONTROLS, "load_model", EVERY_MODEL)
    assert grant is EVERYTHING


@pytest.mark.parametrize("shown", [{}, {"key": "x"}, {"key": ["x", "y"]}, {"other": "värde"}])
def test_a_key_is_asked_for_in_its_category_only(shown: Mapping[str, str | list[str]]) -> None:
    guard = AccessGuard(None, "grpc", KEYED)
    assert guard.checks(INFERS, "inference") and not guard.checks(INFERS, "health")
    guard.admit(Caller(shown), INFERS, "infer", category="health")
    with pytest.raises(RestrictedError, match=r"^restricted, expecting 'key'$") as raised:
        guard.admit(Caller(shown), INFERS, "infer", category="inference")
    error = raised.value
    assert (error.code, error.grpc_status, error.http_status) == ("UNAUTHENTICATED", 14, 403)
    guard.admit(Caller({"key": ["x", "värde"]}), INFERS, "infer", category="inference")


def test_the_policy_refuses_before_the_key_and_counts() -> None:
    access = policy()
    guard = AccessGuard(access, "grpc", KEYED)
    with pytest.raises(UnauthenticatedError, match="no credentials"):
        guard.admit(Caller(), INFERS, "infer", category="inference")
    assert access.counts().refused["unauthenticated"] == 1
    with pytest.raises(RestrictedError):  # without roles only the key counts
        guard.admit(Caller(), OPEN, "server_live", category="inference")
    assert access.counts().refused["unauthenticated"] == 1


@pytest.mark.parametrize("access", [None, policy()])
def test_the_ports_own_token_gives_all_roles(access: Access | None) -> None:
    guard = AccessGuard(access, "control", TOKEN)
    holder = Caller({"authorization": "Bearer pearl"})
    grant = guard.admit(holder, CONTROLS, "drain", model=EVERY_MODEL)
    assert grant.name == "own"
    assert guard.renew(holder, grant, CONTROLS, "drain") is grant  # no policy takes it back
    for shown in ({}, {"authorization": "Bearer shell"}, {"authorization": ["Bearer pearl"] * 2}):
        with pytest.raises(UnauthenticatedError) as raised:
            guard.admit(Caller(shown), CONTROLS, "drain")
        if access is None:
            assert raised.value.message == ("wrong token" if shown else "no token")

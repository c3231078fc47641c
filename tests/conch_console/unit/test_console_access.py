"""Access to the console: tokens, sessions, hosts and origins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest
from tests.support.tokens import AUDIENCE, ISSUER, Issuer

from conch.access.access_guard import Access
from conch.access.policy_file import Policy, PrincipalEntry
from conch.access.policy_state import PolicyState
from conch.access.principals import Role
from conch.access.request_limits import RequestLimits
from conch.access.token_verifier import JwtSettings, KeySet
from conch.core.errors import (
    ConchError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from conch_console.console_access import MOST_SESSIONS, ConsoleAccess, Need
from conch_console.console_options import ConsoleOptions, ConsoleTokens, read_tokens

TOKENS = ConsoleTokens("look", "change")


@dataclass
class Visit:
    """A request."""

    fields: dict[bytes, bytes] = field(default_factory=dict)
    client: str = "127.0.0.1:50000"
    length: int | None = None
    certificate_names: tuple[str, ...] = ()

    def header_values(self, name: str) -> list[str]:
        value = self.fields.get(name.encode())
        return [] if value is None else [value.decode()]


NO_SESSION = Visit()


class SteeredClock:
    """A clock that the test moves; nanoseconds."""

    def __init__(self) -> None:
        self.now = 10**12

    def __call__(self) -> int:
        return self.now

    def pass_s(self, seconds: float) -> None:
        """Moves it on."""
        self.now += int(seconds * 1e9)


def access(clock: SteeredClock | None = None, **options: Any) -> ConsoleAccess:
    return ConsoleAccess(ConsoleOptions(**options), None, clock or SteeredClock())


def visit_of(headers: Iterable[str], client: str = NO_SESSION.client) -> Visit:
    """A request with the cookies that some Set-Cookie headers set."""
    return Visit({b"cookie": "; ".join(each.partition(";")[0] for each in headers).encode()}, client)


@pytest.mark.parametrize(
    ("host", "passes"),
    [
        ("localhost:8004", True),
        ("127.0.0.1:8004", True),
        ("[::1]:8004", True),
        ("10.0.0.7", True),
        ("console.example:8004", True),
        ("CONSOLE.example", True),
        ("evil.example:8004", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example:8004", False),
        ("", False),
        ("user@localhost", False),
        ("localhost:8004:1", False),
    ],
)
def test_hosts(host: str, passes: bool) -> None:
    guard = access(hosts=("console.example",))
    if passes:
        guard.check_host([host])
    else:
        with pytest.raises(PermissionDeniedError, match="--console-host") as refused:
            guard.check_host([host])
        assert refused.value.http_status == 421
    for hosts in ([], ["localhost", host]):
        with pytest.raises(InvalidArgumentError, match=f"one Host header, not {len(hosts)}"):
            guard.check_host(hosts)


OWN = {b"host": b"localhost:8004", b"x-conch-console": b"1"}


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({b"sec-fetch-site": b"same-origin"}, True),
        ({b"origin": b"http://localhost:8004"}, True),
        ({b"sec-fetch-site": b"same-origin", b"origin": b"http://localhost:8004"}, True),
        ({}, False),
        ({b"sec-fetch-site": b"cross-site"}, False),
        ({b"sec-fetch-site": b"same-site"}, False),
        ({b"sec-fetch-site": b"none"}, False),
        ({b"origin": b"http://localhost:9000"}, False),
        ({b"origin": b"null"}, False),
        ({b"sec-fetch-site": b"same-origin", b"origin": b"http://evil.example"}, False),
        ({b"sec-fetch-site": b"same-origin", b"x-conch-console": b""}, False),
        ({b"sec-fetch-site": b"cross-site", b"origin": b"http://localhost:8004"}, False),
    ],
)
def test_only_the_own_page_may_change_something(changes: dict[bytes, bytes], passes: bool) -> None:
    guard = access()
    if passes:
        guard.check_origin(OWN | changes)
    else:
        with pytest.raises(PermissionDeniedError):
            guard.check_origin(OWN | changes)


def test_rights_by_role_and_switch() -> None:
    def outcome(guard: ConsoleAccess, visit: Visit, need: Need) -> str:
        try:
            return guard.admit(visit, need).grant.name
        except ConchError as error:
            return error.code

    closed, open_ = access(tokens=TOKENS), access(tokens=TOKENS, allow_control=True, allow_infer=True)
    for guard, able in ((closed, "PERMISSION_DENIED"), (open_, "admin")):
        viewer, admin = (visit_of(guard.log_in(NO_SESSION, token)) for token in ("look", "change"))
        expected = {
            Need.READ: ("UNAUTHENTICATED", "viewer", "admin"),
            Need.CONTROL: ("UNAUTHENTICATED", "PERMISSION_DENIED", able),
            Need.INFER: ("UNAUTHENTICATED", "PERMISSION_DENIED", able),
            Need.SETTINGS: ("UNAUTHENTICATED", "PERMISSION_DENIED", "admin"),
        }
        for need, outcomes in expected.items():
            assert tuple(outcome(guard, visit, need) for visit in (NO_SESSION, viewer, admin)) == outcomes
    assert access().admit(NO_SESSION, Need.SETTINGS).name == "local@127.0.0.1"


def test_sessions_end_and_their_cookie_is_no_ones_else() -> None:
    clock = SteeredClock()
    guard = access(clock, tokens=TOKENS)
    header, known = guard.log_in(NO_SESSION, "change")
    assert header.endswith("; Path=/; Max-Age=43200; HttpOnly; SameSite=Strict")
    assert known.endswith("; Path=/; Max-Age=2592000; HttpOnly; SameSite=Strict")
    visit = visit_of([header])
    user = guard.admit(visit, Need.READ)
    assert guard.renew(visit, user) == user and "change" not in repr(user)
    for wrong in (
        {b"cookie": b"conch-console="},
        {b"cookie": b"conch-console=change"},
        {b"cookie": b'a="\\'},
        {b"authorization": b"Bearer change"},
    ):
        with pytest.raises(UnauthenticatedError):
            guard.admit(Visit(wrong), Need.READ)
    clock.pass_s(12 * 3600)
    with pytest.raises(UnauthenticatedError):
        guard.renew(visit, user)
    with pytest.raises(UnauthenticatedError):
        guard.admit(visit, Need.READ)
    again = visit_of(guard.log_in(NO_SESSION, "change"))
    guard.log_out(again.fields)
    with pytest.raises(UnauthenticatedError):
        guard.admit(again, Need.READ)


def test_five_wrong_tokens_a_minute() -> None:
    clock = SteeredClock()
    guard = access(clock, tokens=ConsoleTokens(admin="change"))
    for token in ("", "Change", "changes", "chang", "look"):  # an empty viewer token is none
        with pytest.raises(UnauthenticatedError):
            guard.log_in(NO_SESSION, token)
    with pytest.raises(ResourceExhaustedError):
        guard.log_in(Visit(client="127.0.0.1:50001"), "change")
    guard.log_in(Visit(client="10.0.0.1:50000"), "change")
    clock.pass_s(60)
    guard.log_in(NO_SESSION, "change")


def test_wrong_tokens_of_others_behind_a_proxy_lock_out_no_known_browser() -> None:
    clock = SteeredClock()
    guard = access(clock, tokens=TOKENS)  # all visitors have the proxy's address
    known = visit_of(guard.log_in(NO_SESSION, "look"))
    forged = Visit({b"cookie": b"conch-console-known=" + b"viewer".hex().encode() + b".00"})
    for _ in range(5):
        with pytest.raises(UnauthenticatedError):
            guard.log_in(NO_SESSION, "guess")
    for locked in (NO_SESSION, forged):
        with pytest.raises(ResourceExhaustedError):
            guard.log_in(locked, "look")
    assert guard.log_in(known, "look")
    # Known is a principal: its browser guesses no other's token, and is locked out by guesses of its own.
    for token in ("change", "guess", "guess", "guess", "guess"):
        with pytest.raises(UnauthenticatedError):
            guard.log_in(known, token)
    with pytest.raises(ResourceExhaustedError):
        guard.log_in(known, "look")
    clock.pass_s(60)
    assert guard.log_in(NO_SESSION, "look")


def test_wrong_tokens_are_counted_over_all_addresses() -> None:
    clock = SteeredClock()
    guard = access(clock, tokens=TOKENS)
    known = visit_of(guard.log_in(NO_SESSION, "change"), "10.9.9.9:1")
    for number in range(100):
        with pytest.raises(UnauthenticatedError):
            guard.log_in(Visit(client=f"10.0.{number}.1:1"), "guess")
    with pytest.raises(ResourceExhaustedError):
        guard.log_in(Visit(client="10.1.0.1:1"), "change")
    assert guard.log_in(known, "change")
    clock.pass_s(60)
    assert guard.log_in(Visit(client="10.1.0.1:1"), "change")


def test_logins_are_limited_by_principal_and_address_and_end_sessions_of_their_own_only() -> None:
    clock = SteeredClock()
    guard = access(clock, tokens=TOKENS)
    admin, first = (visit_of(guard.log_in(NO_SESSION, token)) for token in ("change", "look"))
    viewers = [first]
    while len(viewers) < MOST_SESSIONS:
        try:
            viewers.append(visit_of(guard.log_in(NO_SESSION, "look")))
        except ResourceExhaustedError as refused:
            assert len(viewers) % 20 == 0 and "too many logins" in refused.message
            assert refused.retry_after_ms is not None and refused.retry_after_ms <= 60_000
            # Another address, and another principal of this one, go on.
            guard.log_out(visit_of(guard.log_in(Visit(client="10.0.0.1:50000"), "look")).fields)
            guard.log_out(visit_of(guard.log_in(NO_SESSION, "change")).fields)
            clock.pass_s(60)
    assert all(guard.admit(each, Need.READ).grant.name == "viewer" for each in viewers)
    clock.pass_s(60)
    viewers.append(visit_of(guard.log_in(NO_SESSION, "look")))
    assert [guard.user(each) is not None for each in (admin, *viewers)] == [
        True,
        False,
        *[True] * MOST_SESSIONS,
    ]


def test_callers_of_one_principal_end_sessions_of_their_own_first() -> None:
    issuer = Issuer()
    jwt = JwtSettings(ISSUER, (AUDIENCE,), None, "", 0.0)
    entry = PrincipalEntry("all", (), {"iss": ISSUER}, (), False, {Role.READ: ("*",)}, RequestLimits())
    policy = Access(PolicyState(Policy((entry,), jwt), KeySet(issuer.jwks)))
    guard = ConsoleAccess(ConsoleOptions(policy=True), policy, SteeredClock())
    mallory = issuer.token(sub="mallory")
    alice = visit_of(guard.log_in(NO_SESSION, issuer.token()))
    visits = [
        visit_of(guard.log_in(Visit(client=f"10.0.0.{number // 10}:1"), mallory))
        for number in range(MOST_SESSIONS)
    ]
    assert guard.user(alice) is not None
    assert [number for number, visit in enumerate(visits) if guard.user(visit) is None] == [0]


def test_a_policy_knows_callers_by_session_by_certificate_and_as_anonymous() -> None:
    def entry(name: str, role: Role = Role.READ, **credentials: Any) -> PrincipalEntry:
        known: dict[str, Any] = {
            "keys": (),
            "claims": {},
            "certificates": (),
            "anonymous": False,
        } | credentials
        return PrincipalEntry(name, models={role: ("*",)}, limits=RequestLimits(), **known)

    entries = (
        entry("web", keys=(sha256(b"the-key-of-web").digest(),)),
        entry("browser", certificates=("cn:browser",)),
    )
    policy = Access(PolicyState(Policy(entries)))
    guard = ConsoleAccess(ConsoleOptions(policy=True), policy, SteeredClock())
    session = visit_of(guard.log_in(NO_SESSION, "the-key-of-web"))
    certified = Visit(certificate_names=("dns:other", "cn:browser"))
    both = Visit(session.fields, certificate_names=certified.certificate_names)
    assert [guard.admit(visit, Need.READ).grant.name for visit in (session, certified, both)] == [
        "web", "browser", "web"
    ]  # fmt: skip
    assert guard.user(NO_SESSION) is None
    user = guard.admit(session, Need.READ)
    policy.state = PolicyState(Policy((entry("web", Role.INFER, keys=entries[0].keys),)))
    with pytest.raises(PermissionDeniedError):  # a stream goes on only with the role
        guard.renew(session, user)
    policy.state = PolicyState(Policy((*entries[1:], entry("guest", anonymous=True))))
    with pytest.raises(UnauthenticatedError):  # its key is none any more, so it is not the guest either
        guard.admit(both, Need.READ)
    assert [guard.admit(visit, Need.READ).grant.name for visit in (NO_SESSION, both)] == ["guest", "browser"]
    for credential in ("", "the-key-of-web"):
        with pytest.raises(UnauthenticatedError):
            guard.log_in(certified, credential)


@pytest.mark.parametrize(
    "text", ["", "secret", "admin: a b", "admin: x\nviewer: x", "admin: x\nadmin: y", "root: x", "admin:"]
)
def test_token_files_that_are_wrong(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        read_tokens(text)


def test_a_token_file() -> None:
    assert read_tokens("viewer: look\n\nadmin:change\n") == TOKENS
    assert "change" not in repr(TOKENS)


def test_a_console_for_others_needs_protection() -> None:
    ConsoleOptions(address="0.0.0.0", tokens=TOKENS).check()
    ConsoleOptions(address="0.0.0.0", policy=True).check()
    ConsoleOptions(address="::1").check()
    with pytest.raises(InvalidArgumentError, match="--console-token-file"):
        ConsoleOptions(address="0.0.0.0").check()

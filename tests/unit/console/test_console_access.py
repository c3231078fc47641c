"""Who may use the console: tokens, sessions, hosts and origins."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from conch.console.console_access import ConsoleAccess
from conch.console.console_options import ConsoleOptions, ConsoleTokens, read_tokens
from conch.console.console_users import Need, Role, TokenUsers, User
from conch.core.errors import (
    ConchError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)

CLIENT = "127.0.0.1:50000"
TOKENS = ConsoleTokens("look", "change")


class SteeredClock:
    """A clock that the test moves; nanoseconds."""

    def __init__(self) -> None:
        self.now = 10**12

    def __call__(self) -> int:
        return self.now

    def pass_s(self, seconds: float) -> None:
        """Moves it on."""
        self.now += int(seconds * 1e9)


def access(clock: SteeredClock | None = None, **options: object) -> ConsoleAccess:
    made = ConsoleOptions(**options)  # type: ignore[arg-type]
    return ConsoleAccess(made, TokenUsers(made), clock or SteeredClock())


class Request:
    """A request from a client."""

    certificate_names = ()

    def __init__(self, fields: Mapping[bytes, bytes] | None = None, client: str = CLIENT) -> None:
        self.fields, self.client = fields or {}, client


def cookie_of(header: str) -> dict[bytes, bytes]:
    return {b"cookie": header.partition(";")[0].encode()}


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
    fields = {b"host": host.encode()}
    if passes:
        guard.check_host(fields)
    else:
        with pytest.raises(PermissionDeniedError, match="--console-host") as refused:
            guard.check_host(fields)
        assert refused.value.http_status == 421


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
    def outcome(guard: ConsoleAccess, fields: dict[bytes, bytes], need: Need) -> str:
        try:
            user = guard.check(Request(fields), need)
        except ConchError as error:
            return error.code
        return "" if user is None else user.role.name

    closed, open_ = access(tokens=TOKENS), access(tokens=TOKENS, allow_control=True, allow_infer=True)
    for guard, able in ((closed, "PERMISSION_DENIED"), (open_, "ADMIN")):
        viewer, admin = (cookie_of(guard.log_in(token, Request())) for token in ("look", "change"))
        expected = {
            Need.NOTHING: ("", "VIEWER", "ADMIN"),
            Need.READ: ("UNAUTHENTICATED", "VIEWER", "ADMIN"),
            Need.CONTROL: ("UNAUTHENTICATED", "PERMISSION_DENIED", able),
            Need.INFER: ("UNAUTHENTICATED", "PERMISSION_DENIED", able),
            Need.ADMIN: ("UNAUTHENTICATED", "PERMISSION_DENIED", "ADMIN"),
        }
        for need, outcomes in expected.items():
            assert tuple(outcome(guard, fields, need) for fields in ({}, viewer, admin)) == outcomes
    local = access().check(Request(), Need.ADMIN)
    assert local == User("local@127.0.0.1", Role.ADMIN)


def test_sessions_end_and_their_cookie_is_no_ones_else() -> None:
    clock = SteeredClock()
    guard = access(clock, tokens=TOKENS)
    header = guard.log_in("change", Request())
    assert header.endswith("; Path=/; Max-Age=43200; HttpOnly; SameSite=Strict")
    fields = cookie_of(header)
    assert guard.check(Request(fields), Need.READ) is not None
    for wrong in (
        {b"cookie": b"conch-console="},
        {b"cookie": b"conch-console=change"},
        {b"cookie": b'a="\\'},
    ):
        with pytest.raises(UnauthenticatedError):
            guard.check(Request(wrong), Need.READ)
    clock.pass_s(12 * 3600)
    with pytest.raises(UnauthenticatedError):
        guard.check(Request(fields), Need.READ)
    again = cookie_of(guard.log_in("change", Request()))
    guard.log_out(again)
    with pytest.raises(UnauthenticatedError):
        guard.check(Request(again), Need.READ)


def test_five_wrong_tokens_a_minute() -> None:
    clock = SteeredClock()
    guard = access(clock, tokens=ConsoleTokens(admin="change"))
    for token in ("", "Change", "change ", "chang", "look"):  # an empty viewer token is none
        with pytest.raises(UnauthenticatedError):
            guard.log_in(token, Request())
    with pytest.raises(ResourceExhaustedError):
        guard.log_in("change", Request(client="127.0.0.1:50001"))
    guard.log_in("change", Request(client="10.0.0.1:50000"))
    clock.pass_s(60)
    guard.log_in("change", Request())


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
    ConsoleOptions(address="::1").check()
    with pytest.raises(InvalidArgumentError, match="--console-token-file"):
        ConsoleOptions(address="0.0.0.0").check()

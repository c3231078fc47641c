"""Reloads: of changed files once they have settled, never of a broken policy; keys of tokens from a URL."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.support.raw_http import DRIPS, dripping
from tests.support.servers import WAIT_S, eventually
from tests.support.tokens import AUDIENCE, ISSUER, Issuer

from conch.access.access_guard import Access, AccessGuard
from conch.access.policy_reload import KeyFetcher, PolicyReload
from conch.access.principals import CONTROLS, INFERS
from conch.cli.access_command import run
from conch.core.errors import (
    ConchError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from conch.observability.logging.audit_log import AuditLog

FIRST, SECOND = "first-key-of-the-web", "second-key-of-the-web"


class Caller:
    """A client with a bearer credential, or none."""

    client = "127.0.0.1:1"
    certificate_names: tuple[str, ...] = ()

    def __init__(self, credential: str = "") -> None:
        self.credential = credential

    def header_values(self, name: str) -> list[str]:
        assert name == "authorization"
        return [f"Bearer {self.credential}"] if self.credential else []


def policy(infer: str = "*", more: str = "") -> str:
    return f'[[principal]]\nname = "web"\nkey_file = "web.key"\ninfer = ["{infer}"]\n{more}'


class Place:
    """A policy in a directory, as a server has it."""

    def __init__(self, directory: Path, text: str) -> None:
        self.path = directory / "access.toml"
        self.key = directory / "web.key"
        self.path.write_text(text)
        self.key.write_text(FIRST)
        self.reload = PolicyReload(self.path)
        self.access = Access(self.reload.state)
        self.guard = AccessGuard(self.access, "test")
        self.reload.start(self.access)

    def looks(self, times: int) -> None:
        for _ in range(times):
            self.reload.reread_files()

    def may(self, credential: str, model: str = "m") -> bool:
        """True if a caller may run a model."""
        try:
            self.guard.admit(Caller(credential), INFERS, "infer", model=model)
        except ConchError:
            return False
        return True


def test_limits_of_loads_are_for_on_demand_mode(tmp_path: Path) -> None:
    (tmp_path / "access.toml").write_text(policy(more="cold_loads_per_minute = 3"))
    (tmp_path / "web.key").write_text(FIRST)
    with pytest.raises(InvalidArgumentError, match="'web': cold_loads_per_minute has an effect only with"):
        PolicyReload(tmp_path / "access.toml").refuse_load_limits()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr("conch.access.policy_reload.READ_S", WAIT_S)  # the test looks
    made = Place(tmp_path, policy())
    yield made
    made.reload.stop()


def test_a_change_counts_when_it_has_settled(place: Place) -> None:
    place.key.write_text(f"{FIRST}\n{SECOND}")
    place.looks(1)
    assert not place.may(SECOND)
    place.key.write_text(SECOND)
    place.looks(1)
    assert (place.may(FIRST), place.may(SECOND)) == (True, False)
    place.looks(1)
    assert (place.may(FIRST), place.may(SECOND)) == (False, True)
    assert place.access.counts().reloads == {"ok": 1, "failed": 0}
    place.looks(3)
    assert place.access.counts().reloads == {"ok": 1, "failed": 0}


def test_a_directory_that_is_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Kubernetes does with the directory of a secret."""
    monkeypatch.setattr("conch.access.policy_reload.READ_S", WAIT_S)
    for name, key in (("1", FIRST), ("2", SECOND)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "web.key").write_text(key)
        (tmp_path / name / "access.toml").write_text(policy())
    (tmp_path / "data").symlink_to(tmp_path / "1")
    reload = PolicyReload(tmp_path / "data" / "access.toml")
    access = Access(reload.state)
    reload.start(access)
    (tmp_path / "new").symlink_to(tmp_path / "2")
    (tmp_path / "new").rename(tmp_path / "data")
    reload.reread_files()
    reload.reread_files()
    reload.stop()
    assert AccessGuard(access, "test").admit(Caller(SECOND), INFERS, "infer").name == "web"


@pytest.mark.parametrize(
    "broken", ["[[principal", "", policy(more="burst = 1\n"), policy().replace("web.", "\\u0000"), None]
)
def test_a_broken_policy_changes_nothing_and_is_told(
    place: Place, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    if broken is None:
        place.key.unlink()
    else:
        place.path.write_text(broken)
    with caplog.at_level(logging.ERROR):
        place.looks(4)
    (record,) = caplog.records
    assert "the one before stays in effect" in record.message
    assert FIRST not in record.message
    assert place.may(FIRST)
    place.path.write_text(policy(infer="n"))
    place.key.write_text(FIRST)
    place.looks(2)
    assert (place.may(FIRST, "m"), place.may(FIRST, "n")) == (False, True)
    assert place.access.counts().reloads == {"ok": 1, "failed": 1}


def test_limits_and_requests_in_flight_outlive_a_reload(place: Place) -> None:
    grant = place.guard.admit(Caller(FIRST), INFERS, "infer")
    place.guard.enter(Caller(FIRST), grant, "infer", "m")
    place.path.write_text(policy(more="concurrent = 1\n"))
    place.looks(2)
    renewed = place.guard.next(Caller(FIRST), grant, INFERS, "infer", "m", 0)
    assert renewed.epoch is place.access.state
    with pytest.raises(ResourceExhaustedError):
        place.guard.enter(Caller(FIRST), renewed, "infer", "m")


def test_an_open_call_ends_with_its_key(place: Place) -> None:
    grant = place.guard.open(Caller(FIRST), INFERS, "stream_infer")
    assert place.guard.next(Caller(FIRST), grant, INFERS, "stream_infer", "m", 0) is grant
    place.key.write_text(SECOND)
    place.looks(2)
    with pytest.raises(UnauthenticatedError):
        place.guard.next(Caller(FIRST), grant, INFERS, "stream_infer", "m", 0)


class Jwks:
    """A server of a JWK set, or of whatever its answer is."""

    def __init__(self) -> None:
        self.answer = b""
        self.status = 200
        self.asked = 0
        jwks = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                jwks.asked += 1
                self.send_response(jwks.status)
                self.send_header("location", "/elsewhere")
                self.end_headers()
                self.wfile.write(jwks.answer)

            def log_message(self, *_: object) -> None:
                """Logs nothing."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/jwks"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def fetching(jwks: Jwks, clock: Callable[[], int]) -> Iterator[tuple[KeyFetcher, list[str]]]:
    results: list[str] = []
    fetcher = KeyFetcher(jwks.url, lambda fetcher: None, results.append, clock)
    try:
        yield fetcher, results
    finally:
        fetcher.stop()


def tokens(url: str) -> str:
    return (
        f'[jwt]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\njwks_url = "{url}"\n'
        '[[principal]]\nname = "ml"\nclaims = { groups = "ml" }\ninfer = ["*"]\n'
        '[[principal]]\nname = "cd"\nclaims = { scope = "deploy", sub = "alice" }\ncontrol = ["*"]\n'
    )


def test_tokens_by_keys_from_a_url(tmp_path: Path) -> None:
    issuer = Issuer()
    audit = tmp_path / "audit"
    with closing(Jwks()) as jwks:
        jwks.answer = issuer.jwks
        path = tmp_path / "access.toml"
        path.write_text(tokens(jwks.url))
        reload = PolicyReload(path)
        with closing(AuditLog(audit)) as log:
            access = Access(reload.state, log)
            guard = AccessGuard(access, "test")
            reload.start(access)
            try:
                ml = Caller(issuer.token(groups=["a", "ml"]))
                eventually(lambda: access.counts().fetches["ok"], "the keys are fetched")
                assert (
                    eventually(lambda: guard.admit(ml, INFERS, "infer", model="m"), "is there").name == "ml"
                )
                cd = Caller(issuer.token(scope="read deploy"))
                assert guard.admit(cd, CONTROLS, "load_model").subject == "alice"
                with pytest.raises(PermissionDeniedError, match="role 'infer'"):
                    guard.admit(cd, INFERS, "infer")
                with pytest.raises(PermissionDeniedError, match="no principal of the access policy has its"):
                    guard.admit(Caller(issuer.token(groups="other")), INFERS, "infer")
                with pytest.raises(UnauthenticatedError, match="a key that is not known here"):
                    guard.admit(Caller(Issuer(kid="two").token(groups="ml")), INFERS, "infer")
            finally:
                reload.stop()
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line["code"], line["principal"], line.get("subject")) for line in lines] == [
        ("PERMISSION_DENIED", "cd", "alice"),
        ("PERMISSION_DENIED", "", None),
        ("UNAUTHENTICATED", "", None),
    ]
    assert not any(caller.credential in audit.read_text() for caller in (ml, cd))


def test_other_rules_for_tokens_keep_the_keys_of_their_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conch.access.policy_reload.READ_S", WAIT_S)
    issuer = Issuer()
    path = tmp_path / "access.toml"
    with closing(Jwks()) as jwks:
        jwks.answer = issuer.jwks
        path.write_text(tokens(jwks.url))
        reload = PolicyReload(path)
        access = Access(reload.state)
        reload.start(access)
        try:
            eventually(lambda: access.counts().fetches["ok"], "the keys are fetched")
            jwks.status = 500
            path.write_text("[jwt]\nclock_skew_seconds = 5\n" + tokens(jwks.url).removeprefix("[jwt]\n"))
            reload.reread_files()
            reload.reread_files()
            assert access.counts().reloads["ok"]
            assert access.grant(Caller(issuer.token(groups="ml"))).name == "ml"
            assert jwks.asked == 1
        finally:
            reload.stop()


def test_keys_that_are_left_out_are_told_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("conch.access.policy_reload.READ_S", WAIT_S)
    issuer = Issuer()
    path, keys = tmp_path / "access.toml", tmp_path / "jwks.json"
    text = tokens("").replace('jwks_url = ""', 'jwks_file = "jwks.json"')
    path.write_text(text)
    keys.write_text(
        json.dumps({"keys": [{"kty": "RSA", "kid": "a"}, {"kty": "oct", "kid": "b"}, issuer.jwk]})
    )
    assert run(["check", str(path)]) == 0
    assert (
        "left out of the keys that sign tokens: key 1 (kid 'a'): it is malformed" in capsys.readouterr().err
    )
    reload = PolicyReload(path)
    access = Access(reload.state)
    reload.start(access)
    try:
        path.write_text(text + "# changed")
        for _ in range(2):
            reload.reread_files()
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [("(kid 'a')" in text, "(kid 'b')" in text) for text in warnings] == [
            (True, False), (False, True)
        ]  # fmt: skip
        keys.write_text('{"keys": [{"kty": "oct"}]}')
        for _ in range(2):
            reload.reread_files()
        assert (
            "jwks.json: no key of the JWK set can be used: key 1: its type is none of" in caplog.messages[-1]
        )
        assert access.counts().reloads == {"ok": 1, "failed": 1}
        assert access.grant(Caller(issuer.token(groups="ml"))).name == "ml"
    finally:
        reload.stop()


def test_a_remembered_token_ends_with_its_time(tmp_path: Path) -> None:
    issuer = Issuer()
    (tmp_path / "jwks.json").write_bytes(issuer.jwks)
    (tmp_path / "access.toml").write_text(
        f'[jwt]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\njwks_file = "jwks.json"\n'
        'clock_skew_seconds = 0.5\n[[principal]]\nname = "a"\nclaims = { sub = "alice" }\ninfer = ["*"]\n'
    )
    now = time.time()
    access = Access(PolicyReload(tmp_path / "access.toml").state, wall=lambda: now)
    token = Caller(issuer.token(exp=int(now) + 3600))
    grant = access.grant(token)
    assert access.grant(token) is grant
    now += 3601
    assert not access.holds(grant)
    assert access.grant(token) is not grant, "it is verified again"


def test_unknown_keys_cause_one_fetch_a_minute() -> None:
    now = [0]
    with closing(Jwks()) as jwks:
        jwks.answer = Issuer().jwks
        with fetching(jwks, lambda: now[0]) as (fetcher, results):
            eventually(lambda: results, "fetched at the start")
            for _ in range(100):
                fetcher.ask()
            now[0] = 61 * 10**9
            for _ in range(100):
                fetcher.ask()
            eventually(lambda: len(results) == 2, "fetched once more")
            fetcher.ask()
        assert (jwks.asked, results) == (2, ["ok", "ok"])


def test_a_url_of_this_machine_needs_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would get the request in plain text, and could answer with keys of its own."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with closing(Jwks()) as jwks, closing(Jwks()) as proxy:
        jwks.answer = proxy.answer = Issuer().jwks
        monkeypatch.setenv("http_proxy", proxy.url)
        with fetching(jwks, lambda: 0) as (_, results):
            eventually(lambda: results, "fetched")
        assert (jwks.asked, proxy.asked) == (1, 0)


@pytest.mark.parametrize(
    ("status", "answer"), [(500, b""), (302, b""), (200, b"{}"), (200, b" " * (1 << 20) + Issuer().jwks)]
)
def test_a_url_that_gives_no_keys_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, status: int, answer: bytes
) -> None:
    monkeypatch.setattr("conch.access.policy_reload.FIRST_RETRY_S", 0.02)
    with closing(Jwks()) as jwks:
        jwks.status, jwks.answer = status, answer
        with fetching(jwks, lambda: 0) as (fetcher, results):
            eventually(lambda: results, "tried")
            jwks.status, jwks.answer = 200, Issuer().jwks
            eventually(lambda: "ok" in results, "tried again")
            assert (results[0], fetcher.keys is not None) == ("failed", True)


@pytest.mark.parametrize("part", DRIPS)
def test_a_url_that_drips_is_too_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    """Each byte comes in time; the answer does not."""
    monkeypatch.setattr("conch.access.policy_reload.FIRST_RETRY_S", WAIT_S)
    monkeypatch.setattr("conch.access.policy_reload.TIMEOUT_S", 0.5)
    results: list[str] = []
    with dripping(DRIPS[part]) as address:
        fetcher = KeyFetcher(f"http://{address}/jwks", lambda fetcher: None, results.append)
        eventually(lambda: results == ["failed"], "the fetch is given up")
        fetcher.stop()
    assert "the keys of tokens can't be fetched" in caplog.text

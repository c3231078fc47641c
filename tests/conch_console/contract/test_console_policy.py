"""The console under an access policy: every route with every role, revocation, limits, the audit log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from tests.conch_console.contract.test_console_security import READING
from tests.support.console import Page
from tests.support.raw_http import head, raw_http
from tests.support.servers import LocalServer, eventually, free_port, serving, write_probe
from tests.support.tokens import AUDIENCE, ISSUER, Issuer

POLICY = f"""
[jwt]
issuer = "{ISSUER}"
audience = "{AUDIENCE}"
jwks_file = "jwks.json"
clock_skew_seconds = 0

[[principal]]
name = "users"
claims = {{ sub = "alice" }}
infer = ["probe"]

[[principal]]
name = "single"
key_file = "single"
infer = ["*"]
concurrent = 1

[[principal]]
name = "infers"
key_file = "infers"
infer = ["probe"]

[[principal]]
name = "reads"
key_file = "reads"
read = ["*"]

[[principal]]
name = "controls"
key_file = "controls"
control = ["*"]

[[principal]]
name = "others"
key_file = "others"
infer = ["other*"]
read = ["other*"]
control = ["other*"]

[[principal]]
name = "revoked"
key_file = "revoked"
infer = ["*"]
read = ["*"]
control = ["*"]

[[principal]]
name = "slow"
key_file = "slow"
read = ["*"]
requests_per_second = 0.001

[[principal]]
name = "heavy"
key_file = "heavy"
infer = ["*"]
bytes_per_second = 0.001
"""
KEYS = {
    name: f"the-key-of-{name}-1"
    for name in ("infers", "reads", "controls", "others", "revoked", "slow", "heavy", "single")
}
TENSOR = {"name": "IN", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}
TRY = "/api/models/probe/infer"

# By route, the principals that it lets in.
ALLOWED = {("GET", path): "reads controls" for path in READING} | {
    ("GET", "/api/settings"): "controls",
    ("GET", "/api/models/other/config"): "reads controls",  # a page, of which none is of some models only
    ("POST", "/api/models/none/load"): "controls",
    ("POST", "/api/models/none/unload"): "controls",
    ("POST", "/api/models/other/load"): "controls others",
    ("POST", "/api/models/other/unload"): "controls others",
    ("POST", "/api/models/other/sample"): "controls others",
    ("POST", "/api/models/none/rollout/action"): "controls",
    ("POST", "/api/models/other/rollout/action"): "controls others",
    ("POST", "/api/traces/sample"): "controls",
    ("POST", "/api/settings/log"): "controls",
    ("POST", "/api/settings/trace"): "controls",
    ("POST", "/api/drain"): "controls",
    ("POST", "/api/models/probe/infer"): "infers",
    ("POST", "/api/models/probe/chat"): "infers",
    ("POST", "/api/models/other/versions/1/infer"): "others",
    ("GET", "/"): "all",
    ("GET", "/api/session"): "all",
}


class Place(NamedTuple):
    """A server whose console takes a policy."""

    server: LocalServer
    directory: Path
    issuer: Issuer

    def page(self, name: str) -> Page:
        """The page of a principal, or of a token's; not logged in for an empty name."""
        page = Page(self.server.console_url)
        if name:
            assert page.post("/api/session", {"token": KEYS.get(name, name)}).status_code == 200
        return page

    def audited(self, principal: str) -> list[tuple[str, str, str]]:
        """Action, model and code of the lines of a principal."""
        whole = (self.directory / "audit.log").read_text().rpartition("\n")[0]  # without a line half written
        lines = map(json.loads, whole.splitlines())
        return [
            (line["action"], line["model"], line["code"])
            for line in lines
            if (line["port"], line["principal"]) == ("console", principal)
        ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("policy")
    write_probe(directory / "models")
    for name, key in KEYS.items():
        (directory / name).write_text(key)
    issuer = Issuer()
    (directory / "jwks.json").write_bytes(issuer.jwks)
    (directory / "access.toml").write_text(POLICY)
    flags = [
        f"--console-port={free_port()}",
        "--console-allow-control",
        "--console-allow-infer",
        f"--access-policy={directory / 'access.toml'}",
        f"--audit-log={directory / 'audit.log'}",
        "--model-control-mode=explicit",
        "--load-model=probe",
    ]
    with serving(directory / "models", flags=flags) as server:
        yield Place(server, directory, issuer)


def let_in(page: Page, name: str) -> dict[tuple[str, str], str]:
    """By route ``yes``, or the status of a refusal."""
    found = {}
    for method, path in ALLOWED:
        if (name, path) == ("controls", "/api/drain"):
            found[method, path] = "yes"  # it can't be undone, so it is tried by those who may not
            continue
        with page.client.stream(
            method, path, json={} if method == "POST" else None
        ) as answer:  # one of them has no end
            refused = answer.status_code in (401, 403)
            found[method, path] = str(answer.status_code) if refused else "yes"
    return found


@pytest.mark.parametrize("name", ["", "infers", "reads", "controls", "others"])
def test_every_route(place: Place, name: str) -> None:
    no = "403" if name else "401"
    with place.page(name) as page:
        found = let_in(page, name)
        session = page.get("/api/session").json()
    wanted = {
        route: "yes" if names == "all" or (name and name in names.split()) else no
        for route, names in ALLOWED.items()
    }
    assert found == wanted
    assert (
        session["tokens"] and session["policy"] and (session.get("role") == "admin") is (name == "controls")
    )
    assert {key for key in ("read", "control", "infer") if session.get(key)} == {
        "": set(), "infers": {"infer"}, "reads": {"read"}, "controls": {"read", "control"},
        "others": {"control", "infer"},
    }[name]  # fmt: skip


def test_a_revoked_key_ends_streams_and_sessions(place: Place) -> None:
    with place.page("revoked") as page, page.live() as events:
        assert next(events)[0] == "hello"
        (place.directory / "revoked").write_text("another-key-of-revoked")
        for _ in events:  # until the server ends the stream
            pass
        assert {found for route, found in let_in(page, "").items() if ALLOWED[route] != "all"} == {"401"}
        assert "user" not in page.get("/api/session").json()
        assert page.post("/api/session", {"token": KEYS["revoked"]}).status_code == 401


def test_several_headers_with_credentials_are_refused(place: Place) -> None:
    sent = [("authorization", "Bearer a")]
    with place.page("reads") as page:
        assert page.client.get("/api/models", headers=sent).status_code == 200  # one counts for nothing
        refused = page.client.get("/api/models", headers=sent * 2)
        assert (refused.status_code, refused.json()["error"]) == (
            401, "there is more than one 'authorization' header: send one"
        )  # fmt: skip
        assert page.get("/api/models").status_code == 200  # the session goes on


def test_wrong_keys_are_counted(place: Place) -> None:
    own = {"origin": place.server.console_url, "x-conch-console": "1"}
    elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")  # or the other tests were locked out
    with httpx.Client(base_url=place.server.console_url, headers=own, transport=elsewhere) as client:
        answers = [client.post("/api/session", json={"token": "guess"}).status_code for _ in range(6)]
        late = client.post("/api/session", json={"token": KEYS["reads"]}).status_code
    assert [*answers, late] == [401] * 5 + [429, 429]


def test_limits_hold(place: Place) -> None:
    with ExitStack() as stack:
        slow, heavy = (stack.enter_context(place.page(name)) for name in ("slow", "heavy"))
        assert [slow.get("/api/models").status_code for _ in range(2)] == [200, 429]
        # The size of a body in chunks is known to the admission of requests only.
        chunks = [json.dumps({"inputs": [TENSOR]}).encode(), b" "]
        answers = [heavy.client.post(TRY, content=iter(chunks)).status_code for _ in range(2)]
        assert answers == [200, 429]


def test_requests_in_flight(place: Place, signal_files: tuple[Path, Path]) -> None:
    started, go = signal_files
    parameters = {"started": str(started), "wait_for": str(go)}
    waiting = {"inputs": [TENSOR], "parameters": parameters}
    with place.page("single") as page:
        with page.client.stream("POST", TRY, json=waiting) as first:
            eventually(started.exists, "the model runs")
            refused = page.post(TRY, {"inputs": [TENSOR]})
            go.touch()
            assert (first.status_code, b"event: response" in first.read()) == (200, True)
        assert refused.status_code == 429 and "its limit of 1 requests at a time" in refused.json()["error"]
        again = {"inputs": [TENSOR]}
        eventually(lambda: page.post(TRY, again).status_code == 200, "the request has ended")
    wanted = {("infer", "probe", "RESOURCE_EXHAUSTED")}
    eventually(lambda: set(place.audited("single")) == wanted, "it is audited")


def test_a_try_has_a_place_of_its_principal_once_its_body_is_there(
    place: Place, signal_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 2
    monkeypatch.setattr("conch_console.try_route.MOST_TRIES", most)
    started, go = signal_files
    waiting = {"inputs": [TENSOR], "parameters": {"started": str(started), "wait_for": str(go)}}
    with ExitStack() as stack:
        page, other = (stack.enter_context(place.page(name)) for name in ("infers", place.issuer.token()))
        address = page.url.removeprefix("http://")
        lines = [f"{name}: {value}" for name, value in page.client.headers.items()]
        cookie = f"Cookie: conch-console={page.client.cookies['conch-console']}"
        for _ in range(most + 1):  # their bodies never come
            slow = stack.enter_context(raw_http(address))
            begun = head("POST", TRY, "Content-Length: 99", "Expect: 100-continue", cookie, *lines)
            slow.send(begun.replace(b"Host: conch", f"Host: {address}".encode()))
            answer = slow.response()
            assert answer is not None and answer.status == 100  # the server waits for the body
        runs = [stack.enter_context(page.client.stream("POST", TRY, json=waiting)) for _ in range(most)]
        assert [each.status_code for each in runs] == [200] * most
        refused = page.post(TRY, waiting)
        assert refused.status_code == 429 and "of 'infers' run already" in refused.json()["error"]
        with other.client.stream("POST", TRY, json=waiting) as run:
            go.touch()
            assert run.status_code == 200


def test_a_session_by_a_token_ends_with_the_token(place: Place) -> None:
    token, forged = place.issuer.token(), Issuer().token()
    with place.page(token) as page:
        assert page.infer("probe", {"inputs": [TENSOR]})[-1][0] == "end"
        assert page.get("/api/session").json()["user"].startswith("users@")
        assert page.get("/api/models").status_code == 403
        assert page.post("/api/session", {"token": forged}).status_code == 401
    with place.page(place.issuer.token(exp=int(time.time()) + 2)) as page:
        eventually(lambda: page.get("/api/models").status_code == 401, "the token has expired")
        assert "user" not in page.get("/api/session").json()
    text = (place.directory / "audit.log").read_text()
    assert token not in text and forged not in text


def test_changes_and_refusals_are_audited(place: Place) -> None:
    with place.page("controls") as page, place.page("others") as other:
        assert page.post("/api/settings/trace", {"trace_rate": []}).status_code == 200
        load = page.post("/api/models/none/load")
        assert load.status_code >= 400
        assert other.post("/api/models/probe/unload").status_code == 403
        assert other.get("/api/logs").status_code == 403
    wanted = [("unload_model", "probe", "PERMISSION_DENIED"), ("console", "*", "PERMISSION_DENIED")]
    eventually(lambda: place.audited("others")[-2:] == wanted, "they are written")
    assert place.audited("controls")[-2:] == [
        ("update_trace_settings", "*", "OK"),
        ("load_model", "none", load.json()["code"]),
    ]

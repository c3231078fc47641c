"""Refusals of the console: other hosts and origins, users without a right, viewers that never read."""

from __future__ import annotations

import itertools
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import httpx
import psutil
import pytest
from tests.support.certificates import Authority
from tests.support.console import SCRIPT, Page
from tests.support.servers import LocalServer, eventually, free_port, serving

from conch.settings.option import FlagError
from conch_console.live_feed import MOST_VIEWERS

UNSAFE = [
    ("POST", "/api/session"),
    ("DELETE", "/api/session"),
    ("POST", "/api/models/probe/load"),
    ("POST", "/api/models/probe/unload"),
    ("POST", "/api/models/probe/infer"),
    ("POST", "/api/models/probe/chat"),
    ("POST", "/api/models/probe/rollout/action"),
    ("POST", "/api/drain"),
    ("POST", "/api/settings/log"),
    ("POST", "/api/settings/trace"),
    ("POST", "/api/traces/sample"),
    ("POST", "/api/models/probe/sample"),
]
READING = [
    "/api/live",
    "/api/server",
    "/api/models",
    "/api/models/probe",
    "/api/models/probe/config",
    "/api/models/probe/history",
    "/api/models/probe/rollout",
    "/api/models/probe/profiles",
    "/api/rollouts",
    "/api/fronts",
    "/api/chat",
    "/api/traces",
    "/api/logs",
    "/api/settings",
]


@pytest.fixture(scope="module")
def token_server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server whose console has both tokens and allows control, but no requests to models."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("viewer: look\nadmin: change\n")
    flags = [
        f"--console-port={free_port()}",
        f"--console-token-file={tokens}",
        "--console-allow-control",
        "--console-host=console.example",
        "--exit-on-error=false",
    ]
    with serving(repository, flags=flags) as server:
        yield server


def logged_in(server: LocalServer, token: str) -> Page:
    page = Page(server.console_url)
    assert page.post("/api/session", {"token": token}).status_code == 200
    return page


@pytest.mark.parametrize(("method", "path"), UNSAFE)
def test_unsafe_routes_take_nothing_from_elsewhere(page: Page, method: str, path: str) -> None:
    own = {"origin": page.url, "sec-fetch-site": "same-origin", "x-conch-console": "1"}
    foreign = [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"x-conch-console": ""},
    ]
    for changes in foreign:
        response = httpx.request(method, page.url + path, headers=own | changes, json={})
        assert response.status_code == 403, (changes, response.text)
    bare = httpx.request(method, page.url + path, json={}, headers={"user-agent": "Mozilla/5.0"})
    assert bare.status_code == 403
    rebound = httpx.request(method, page.url + path, headers=own | {"host": "evil.example"}, json={})
    assert rebound.status_code == 421


@pytest.mark.parametrize("path", ["/", "/js/main.js", *READING])
def test_no_route_answers_to_another_host(page: Page, path: str) -> None:
    response = page.get(path, host="evil.example:8004")
    assert response.status_code == 421 and "--console-host" in response.json()["error"]


def test_nothing_is_read_or_done_without_a_token(token_server: LocalServer) -> None:
    with Page(token_server.console_url) as page:
        for path in READING:
            assert page.get(path).status_code == 401, path
        for method, path in UNSAFE[2:]:
            assert page.client.request(method, path, json={}).status_code == 401, path
        assert page.get("/api/session").json() == {"tokens": True, "policy": False}
        assert page.get("/").status_code == 200


def test_viewers_read_and_admins_do_what_is_allowed(token_server: LocalServer) -> None:
    with logged_in(token_server, "look") as viewer, logged_in(token_server, "change") as admin:
        assert viewer.get("/api/session").json()["role"] == "viewer"
        for path in READING[1:-1]:
            assert viewer.get(path).status_code == 200, path
        assert viewer.get("/api/settings").status_code == 403
        for method, path in UNSAFE[2:]:
            refused = viewer.client.request(method, path, json={})
            assert refused.status_code == 403 and "'viewer' may not" in refused.json()["error"], path
        assert admin.get("/api/settings").status_code == 200
        assert admin.post("/api/models/probe/sample", {"count": 1}).status_code == 200
        given = '{"backend": "unknown", "parameters": {"CONCH_ENV_X": {"string_value": "1"}}}'
        wrong = admin.post("/api/models/probe/load", {"config": given})
        assert wrong.status_code != 403 and "unknown" in wrong.json()["error"]
        for way in ("infer", "chat"):
            sent = admin.post(f"/api/models/probe/{way}", {})
            assert sent.status_code == 403 and "--console-allow-infer" in sent.json()["error"]
        assert admin.get("/api/models", host="console.example:8004").status_code == 200
        admin.client.request("DELETE", "/api/session")
        assert admin.get("/api/models").status_code == 401


def test_wrong_tokens_are_counted(repository: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("admin: change\n")
    flags = [f"--console-port={free_port()}", f"--console-token-file={tokens}", "--exit-on-error=false"]
    with serving(repository, flags=flags) as server, Page(server.console_url) as page:
        answers = [page.post("/api/session", {"token": "guess"}).status_code for _ in range(6)]
        assert answers == [401] * 5 + [429]
        late = page.post("/api/session", {"token": "change"})
        assert late.status_code == 429 and int(late.headers["retry-after"]) <= 60


def test_every_answer_has_the_security_headers(page: Page) -> None:
    for path in ("/", "/js/main.js", "/api/models", "/api/nothing", "/api/session", "/unknown"):
        headers = page.get(path).headers
        kept = [each for each in headers.get_list("cache-control") if each != "no-store"]
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';"), path
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers
        assert headers.get_list("cache-control") == (["no-store"] if path.startswith("/api/") else kept)
    assert page.client.request("PUT", "/api/models").status_code == 405


def test_a_model_named_like_a_script_is_a_name(page: Page) -> None:
    found = page.get(f"/api/models/{quote(SCRIPT, safe='')}").json()
    assert found["name"] == SCRIPT
    answer = page.post(f"/api/models/{quote(SCRIPT, safe='')}/load")
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"


@pytest.mark.slow
def test_a_viewer_that_never_reads_is_dropped_and_holds_up_no_one(
    open_server: LocalServer, page: Page
) -> None:
    host, _, port = open_server.console_url.removeprefix("http://").rpartition(":")
    with socket.socket() as stuck, ExitStack() as stack:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect((host, int(port)))
        request = f"GET /api/live?logs=1 HTTP/1.1\r\nhost: {host}:{port}\r\n\r\n"
        stuck.sendall(request.encode())
        events = stack.enter_context(page.live())
        # Each look has 100 long lines for the stuck viewer, and few bytes for the other one.
        flood = logging.LogRecord("conch.test.flood", logging.INFO, "", 0, "x", None, None)
        flood.exc_text = "x" * 16_000
        for name, _ in itertools.islice(events, 60):
            if name == "tick":
                for _ in range(100):
                    logging.getLogger("conch").handle(flood)
            if _is_closed(stuck):
                break
        else:
            pytest.fail("the viewer that does not read is still connected")
        assert next(events)[0] == "tick"


def _is_closed(client: socket.socket) -> bool:
    """True if the server has closed its end; its kernel still holds bytes, so the client can't tell."""
    mine = client.getsockname()
    return all(each.raddr != mine for each in psutil.Process().net_connections("tcp"))


def test_viewers_are_limited(page: Page) -> None:
    def one_too_many() -> str:
        with ExitStack() as stack:
            try:
                streams = [stack.enter_context(page.live()) for _ in range(MOST_VIEWERS)]
            except AssertionError:  # viewers of before have not left yet
                return ""
            assert next(streams[-1])[0] == "hello"
            refused = page.get("/api/live")
            assert refused.status_code == 429
            return str(refused.json()["error"])

    assert "pages watch already" in eventually(one_too_many, "32 viewers watch")


def test_streams_end_with_the_server(repository: Path) -> None:
    flags = [f"--console-port={free_port()}", "--exit-on-error=false", "--exit-timeout-secs=120"]
    with serving(repository, flags=flags) as server, Page(server.console_url) as page, page.live() as events:
        assert next(events)[0] == "hello"
        assert server.server.stop()
        assert [name for name, _ in events] in ([], ["tick"], ["tick", "tick"])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"console_allow_control": True}, "--console-allow-control needs --console-port"),
        ({"console_host": "x"}, "--console-host needs --console-port"),
        ({"console_port": 1, "console_address": "0.0.0.0"}, "--console-token-file"),
        ({"console_port": 1, "console_server_cert": "x"}, "--console-server-cert needs --console-use-ssl"),
        ({"console_port": 1, "console_use_ssl": True}, "--console-server-cert must be specified"),
        ({"console_port": 1, "console_address": "unix:/tmp/x"}, "Unix socket"),
        ({"console_port": 1, "console_token_file": "/nowhere"}, "can't be read"),
        (
            {"console_port": 1, "console_token_file": "x", "access_policy": "x"},
            "its keys and tokens; leave it out",
        ),
    ],
)
def test_settings_that_can_not_be(repository: Path, flags: dict[str, object], text: str) -> None:
    import conch

    with pytest.raises(FlagError, match=text):
        conch.Server(repository, **flags)  # type: ignore[arg-type]


def test_control_for_viewers_only_is_refused(repository: Path, tmp_path: Path) -> None:
    import conch

    tokens = tmp_path / "tokens"
    tokens.write_text("viewer: look\n")
    with pytest.raises(FlagError, match="has no line 'admin: TOKEN'"):
        conch.Server(repository, console_port=1, console_token_file=tokens, console_allow_control=True)


@pytest.mark.parametrize(
    ("policy", "user"),
    [
        ("", ("certificate@127.0.0.1", "admin")),
        (
            '[[principal]]\nname = "web"\ncertificate = "cn:me"\nread = ["*"]\n',
            ("web@127.0.0.1", "viewer"),
        ),
    ],
)
def test_client_certificates_stand_for_tokens(
    repository: Path, tmp_path: Path, policy: str, user: tuple[str, str]
) -> None:
    authority = Authority(tmp_path / "authority")
    (server_key, server_certificate), (client_key, client_certificate) = map(
        authority.issue, ("server", "me")
    )
    flags = [
        f"--console-port={free_port()}",
        "--console-use-ssl",
        f"--console-server-cert={server_certificate}",
        f"--console-server-key={server_key}",
        f"--console-root-cert={authority.root}",
        "--exit-on-error=false",
    ]
    if policy:
        (tmp_path / "access.toml").write_text(policy)
        flags.append(f"--access-policy={tmp_path / 'access.toml'}")
    context = ssl.create_default_context(cafile=authority.root)
    with serving(repository, flags=flags) as server:
        assert server.console_url.startswith("https://")
        with httpx.Client(verify=context) as stranger, pytest.raises(httpx.HTTPError):
            stranger.get(f"{server.console_url}/api/session")
        context.load_cert_chain(client_certificate, client_key)
        with httpx.Client(verify=context) as known:
            session = known.get(f"{server.console_url}/api/session").json()
    assert (session["user"], session["role"]) == user

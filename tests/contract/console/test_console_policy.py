"""The console under an access policy: its principals are the users."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.console.test_console_security import READING, UNSAFE
from tests.support.console import Page
from tests.support.servers import LocalServer, eventually, free_port, serving

from conch.cli.settings.setting import FlagError

NAMES = ("infers", "reads", "controls", "runs", "leaves")
POLICY = """
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
name = "runs"
key_file = "runs"
read = ["*"]
infer = ["probe"]
control = ["probe"]

[[principal]]
name = "leaves"
key_file = "leaves"
read = ["*"]

[[principal]]
name = "anyone"
anonymous = true
read = ["*"]
"""
ALLOWED = {
    "/api/models/probe/infer": {"infers", "runs"},
    "/api/models/probe/load": {"controls", "runs"},
    "/api/models/probe/unload": {"controls", "runs"},
    "/api/drain": {"controls"},
    "/api/settings": {"controls"},
    "/api/settings/log": {"controls"},
    "/api/settings/trace": {"controls"},
    "/api/traces/sample": {"controls"},
}
"""Who may use a route; pages are for all but `infers`."""


def key(name: str) -> str:
    return f"the-key-of-{name}-1"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    for name in NAMES:
        (directory / name).write_text(key(name))
    (directory / "access.toml").write_text(POLICY)
    return directory


@pytest.fixture(scope="module")
def server(repository: Path, directory: Path) -> Iterator[LocalServer]:
    flags = [
        f"--access-policy={directory / 'access.toml'}",
        f"--audit-log={directory / 'audit.log'}",
        f"--console-port={free_port()}",
        "--console-allow-control",
        "--console-allow-infer",
        "--exit-on-error=false",
    ]
    with serving(repository, flags=flags) as server:
        yield server


def page_of(server: LocalServer, name: str) -> Page:
    page = Page(server.console_url)
    if name:
        assert page.post("/api/session", {"token": key(name)}).status_code == 200
    return page


@pytest.mark.parametrize("name", ["", "infers", "reads", "controls", "runs"])
def test_every_route_by_every_role(server: LocalServer, name: str) -> None:
    readers = set(NAMES) - {"infers"}
    routes = [("GET", path) for path in READING if path != "/api/live"]
    # A body that is refused once the caller is admitted, so that nothing changes.
    routes += [(method, path) for method, path in UNSAFE if not path.endswith(("/session", "/drain"))]
    if name != "controls":
        routes.append(("POST", "/api/drain"))
    with page_of(server, name) as page:
        for method, path in routes:
            allowed = name in ALLOWED.get(path, readers)
            status = page.client.request(method, path, content=None if method == "GET" else b"[]").status_code
            refused = 401 if not name else 0 if allowed else 403
            assert status == refused or (allowed and status not in (401, 403)), (method, path, status)


def test_wrong_keys_are_refused_and_changes_are_audited(server: LocalServer, directory: Path) -> None:
    with Page(server.console_url) as page:
        assert page.post("/api/session", {"token": "no-key-of-anyone-1"}).status_code == 401
    with page_of(server, "controls") as page:
        assert page.get("/api/session").json()["control"]
        assert page.post("/api/settings/trace", {"trace_rate": ["500"]}).status_code == 200
    wanted = {"port": "console", "principal": "controls", "action": "change_traces", "code": "OK"}

    def audited() -> bool:
        lines = (directory / "audit.log").read_text().splitlines(keepends=True)
        return any(wanted.items() <= json.loads(line).items() for line in lines if line.endswith("\n"))

    eventually(audited, "the change is in the audit log")
    assert "the-key-of" not in (directory / "audit.log").read_text()


def test_a_revoked_key_ends_the_session_and_its_stream(server: LocalServer, directory: Path) -> None:
    with page_of(server, "leaves") as page, page.live() as events:
        assert next(events)
        (directory / "leaves").write_text("another-key-of-leaves-2")
        for _ in events:
            pass  # the server ends the stream
        eventually(lambda: page.get("/api/models").status_code == 401, "the session has ended")


def test_a_policy_takes_the_place_of_tokens(repository: Path, directory: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("admin: change\n")
    flags = [f"--access-policy={directory / 'access.toml'}", f"--console-token-file={tokens}"]
    with (
        pytest.raises(FlagError, match="leave it out"),
        serving(repository, flags=[*flags, f"--console-port={free_port()}"]),
    ):
        pass

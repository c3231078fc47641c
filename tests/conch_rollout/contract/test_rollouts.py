"""Rollouts by rollout.toml, the control port and REST: routes, labels, files and what clients see of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.loading import model_text, write_number
from tests.support.servers import AnyServer, eventually, free_port, serving

from conch.core.errors import FailedPreconditionError
from conch.core.rollouts import RolloutReport
from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import ConnectionOptions
from conch_rollout.cli.rollout_command import run

pytestmark = pytest.mark.slow

DECLARED = """
[labels]
stable = 1
[rollout]
candidate = "newest"
steps = ["20% 1h", "50% 1h"]
sticky = ["header:x-user"]
keep = "1h"
"""


KEY = "--http-restricted-api=model-repository:key=secret"


def write_version(repository: Path, version: int, text: str | None = None) -> None:
    directory = repository / "m" / str(version)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.py").write_text(model_text(version) if text is None else text)


class Site:
    """A server whose model answers with the number of its version."""

    def __init__(self, server: AnyServer, repository: Path, target: str) -> None:
        self.repository = repository
        self.target = target
        self.control = ModelControlClient(ConnectionOptions(target))
        self.server = server
        self.http = httpx.Client(base_url=f"http://{server.http_address}", timeout=60)

    def answer(self, user: str = "", **headers: str) -> int:
        given = {"x-user": user, **headers} if user else headers
        inputs = [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]
        reply = self.http.post("/v2/models/m/infer", json={"inputs": inputs}, headers=given).json()
        (version,) = reply["outputs"][0]["data"]
        assert str(int(version)) == reply["model_version"]
        return int(version)

    def shares(self, users: int = 300) -> dict[int, float]:
        """The share of the users that each version has."""
        found = [self.answer(f"user-{number}") for number in range(users)]
        return {version: found.count(version) / users for version in set(found)}

    def wait(self, *states: str) -> RolloutReport:
        def reached() -> RolloutReport | None:
            report = self.control.rollout("m")
            return report if report.state in states else None

        found: RolloutReport = eventually(reached, f"rollout is {states}")
        return found

    def command(self, *arguments: str) -> int:
        """The exit code of `conch rollout`."""
        return run([*arguments, f"--target={self.target}"], {})

    def rest(self, method: str, path: str = "", body: Any = None) -> httpx.Response:
        return self.http.request(method, f"/v2/repository/models/m/rollout{path}", json=body)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    found = tmp_path / "models"
    write_number(found, "m", extra="version_policy { latest { num_versions: 1 } }", versions=(1,))
    write_version(found, 1)
    return found


@pytest.fixture
def make_site(repository: Path) -> Iterator[Any]:
    sites = []
    ends: list[Any] = []

    def make(*flags: str) -> Site:
        port = free_port()
        server = serving(repository, flags=[f"--control-port={port}", *flags])
        ends.append(server)
        running = server.__enter__()
        sites.append(Site(running, repository, f"127.0.0.1:{port}"))
        return sites[-1]

    yield make
    for site in sites:
        site.http.close()
        site.control.close()
    for server in reversed(ends):
        server.__exit__(None, None, None)


def test_a_new_version_becomes_the_candidate_of_rollout_toml(
    make_site: Any, repository: Path, tmp_path: Path
) -> None:
    (repository / "m" / "rollout.toml").write_text(DECLARED)
    flags = (
        "--model-control-mode=poll",
        "--repository-poll-secs=0.2",
        f"--state-directory={tmp_path / 'state'}",
    )
    site: Site = make_site(*flags)
    assert site.shares(20) == {1: 1.0}
    write_version(repository, 2)
    report = site.wait("STEP")
    assert (report.stable, report.candidate, report.weight, report.source) == (1, 2, 20.0, "file")
    shares = site.shares()
    assert abs(shares[2] - 0.2) < 0.08
    assert [site.answer(**{"conch-version": each}) for each in ("candidate", "stable", "2")] == [2, 1, 2]
    # A change of the file reloads nothing; one of the steps begins anew.
    loads = site.http.get("/v2/models/m/versions/1/stats").json()["model_stats"][0]["inference_count"]
    (repository / "m" / "rollout.toml").write_text(DECLARED.replace("20%", "40%"))
    report = eventually(lambda: (found := site.wait("STEP")).weight == 40.0 and found, "40 %")
    assert report.id == 2
    assert site.http.get("/v2/models/m/versions/1/stats").json()["model_stats"][0]["inference_count"] >= loads
    with pytest.raises(FailedPreconditionError, match=r"is declared in rollout\.toml; change it"):
        site.control.start_rollout("m", {"rollout": {"candidate": 2}})
    text = httpx.get(site.server.metrics_url).text
    assert 'conch_rollout_state{model="m",state="STEP"} 1' in text
    assert 'conch_rollout_weight{model="m",version="2"} 0.4' in text
    assert 'conch_rollout_transitions_total{model="m",reason="rule",to="STEP"} 2' in text
    assert 'conch_route_requests_total{by="override",model="m",version="2"} 2' in text
    site.control.update_rollout("m", "promote")
    assert site.shares(20) == {2: 1.0}
    assert site.control.update_rollout("m", "rollback").state in ("ROLLING_BACK", "ABORTING", "ABORTED")
    report = site.wait("ABORTED")
    assert (report.stable, report.refused, site.shares(20)) == (1, (2,), {1: 1.0})
    # A change of the file brings nothing back that is held out, and neither does a restart.
    (repository / "m" / "rollout.toml").write_text(DECLARED.replace("20%", "60%"))
    held = (
        "the rollout holds version 2 out: rolled back by a call; change its files, or start it with 'again'"
    )
    eventually(lambda: site.control.rollout("m").steps[0] == "60% 1h", "the change is seen")
    for each in (site, make_site(*flags)):
        report = each.wait("ABORTED")
        assert (report.steps[0], report.refused, report.note, each.shares(20)) == (
            "60% 1h",
            (2,),
            held,
            {1: 1.0},
        )
        assert each.command("start", "m") == 1
    site.control.start_rollout("m", {}, again=True)
    assert site.wait("STEP").weight == 60.0


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_rest_changes_no_rollouts_where_nothing_identifies_the_caller(make_site: Any, mode: str) -> None:
    site: Site = make_site(f"--model-control-mode={mode}")
    declared = {"rollout": {"candidate": 1, "steps": ["100% 1h"]}}
    for answer in (site.rest("POST", body=declared), site.rest("POST", "/promote"), site.rest("DELETE")):
        assert answer.status_code == 503
        assert f"mode is '{mode}'" in answer.json()["error"] and "--access-policy" in answer.json()["error"]
    assert site.rest("GET").status_code == 404


def test_rest_changes_rollouts_in_poll_mode(make_site: Any, repository: Path, tmp_path: Path) -> None:
    write_version(repository, 2)
    site: Site = make_site("--model-control-mode=poll", "--repository-poll-secs=0.2", KEY)
    assert site.rest("POST", "/promote").status_code == 403
    site.http.headers["key"] = "secret"
    assert site.http.put("/v2/repository/models/m/labels/best", json={"version": 2}).status_code == 503
    declared = {"candidate": 2, "steps": ["20% 1h"], "sticky": ["header:x-user"], "keep": "1h"}
    assert site.rest("POST", body={"labels": {"stable": 1}, "rollout": declared}).status_code == 200
    site.wait("STEP")
    for action in ("pause", "promote"):
        assert site.rest("POST", f"/{action}").status_code == 200
    baking = site.wait("BAKING")
    assert (baking.stable, baking.labels) == (2, {"stable": 2})
    text = site.rest("POST", body={"rollout": declared}).json()["error"]
    assert text.endswith("is BAKING already; wait until the time of 'keep' is over, or roll it back first")
    assert site.rest("POST", "/rollback").status_code == 200
    site.wait("ABORTED")
    assert site.rest("DELETE").json()["refused"] == [2]
    site.control.set_label("m", "stable", None)
    # What was held out stays so without the rollout, until its files change.
    assert (site.shares(20), site.rest("GET").json()["refused"]) == ({1: 1.0}, [2])
    write_version(repository, 2, model_text(2) + "# changed")
    eventually(lambda: site.answer() == 2, "version 2 serves again")

    def users() -> dict[str, int]:
        """The version of each user."""
        eventually(lambda: not site.rest("GET").json()["note"], "all versions serve")
        return {user: site.answer(user) for user in map(str, range(300))}

    missing = site.rest("POST", body={"rollout": {"split": {"1": 50, "3": 50}}})
    assert (missing.status_code, missing.json()["error"]) == (
        409,
        "the rollout of 'm' can't split: version 3 is not in the repository",
    )
    write_version(repository, 3)
    shares = {"split": {"1": 50, "2": 30, "3": 20}, "sticky": ["header:x-user"]}
    assert site.rest("POST", body={"rollout": shares}).json()["state"] == "SPLIT"
    before = users()
    assert site.command("start", "m", "--split", "1=35", "2=35%", "3=30", "--sticky", "header:x-user") == 0
    after = users()
    for version, share in ((1, 0.5), (2, 0.3), (3, 0.2)):
        assert abs(list(before.values()).count(version) / 300 - share) < 0.1
    assert {before[user] for user in before if before[user] != after[user]} == {1}
    found = site.rest("GET").json()
    assert [(each["version"], each["role"], each["traffic"]) for each in found["sides"]] == [
        (1, "stable", 35.0),
        (2, "split", 35.0),
        (3, "split", 30.0),
    ]
    assert sum(each["requests"] for each in found["sides"]) >= 600
    assert 'conch_rollout_weight{model="m",version="3"} 0.3' in httpx.get(site.server.metrics_url).text
    assert site.command("report", "m", f"--html={tmp_path / 'report.html'}") == 0
    page = (tmp_path / "report.html").read_text()
    assert "<p>m: SPLIT, version 1 35 %, version 2 35 %, version 3 30 %</p>" in page
    assert "<td>split</td><td>30 %</td>" in page
    assert "rolled back by a call" in page


def test_rest_starts_and_changes_rollouts(make_site: Any, repository: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    site: Site = make_site("--model-control-mode=explicit", "--load-model=m", f"--state-directory={state}")
    assert site.rest("GET").status_code == 404
    write_version(repository, 2, "raise ValueError('no weights')")
    declared = {"rollout": {"candidate": 2, "steps": ["10% 1h"], "keep": "1h"}}
    refused = site.rest("POST", body={"rollout": {"candidate": 3, "steps": ["200% 1h"]}})
    assert (refused.status_code, refused.json()["error"]) == (
        400,
        "the request: rollout.steps[0]: must be a percent from 0.01 to 100 and a duration, such as "
        '"5% 10m" or "shadow 100% 10m", not "200% 1h"',
    )
    assert site.rest("POST", body=declared).json()["state"] in ("LOADING", "FAILED")
    report = site.wait("FAILED")
    assert "no weights" in report.reason
    assert site.shares(20) == {1: 1.0}
    write_version(repository, 2)
    assert site.rest("POST").json()["state"] in ("LOADING", "STEP")  # its files have changed
    site.wait("STEP")
    again = site.rest("POST", body=declared)
    assert (again.status_code, again.json()["error"]) == (
        409,
        "the rollout of 'm' is STEP already; promote or abort it first",
    )
    assert site.rest("POST", "/weight", {"weight": 70}).json()["weight"] == 70.0
    lines = site.http.post("/v2/repository/index").json()
    assert [
        (each["version"], each.get("labels", []), each["traffic"]) for each in lines if "traffic" in each
    ] == [
        ("1", ["stable"], 30.0),
        ("2", [], 70.0),
    ]
    wrong = site.rest("POST", "/hurry")
    assert wrong.json()["error"].startswith("action: 'hurry' is none of pause, resume, advance, weight")
    assert site.http.put("/v2/repository/models/m/labels/best", json={"version": 1}).status_code == 200
    before = site.rest("GET").json()
    second: Site = make_site("--model-control-mode=explicit", "--load-model=m", f"--state-directory={state}")
    second.wait("PAUSED")
    eventually(lambda: second.shares(60).get(2), "the candidate is loaded again")
    after = second.rest("GET").json()
    # The counters, and what looks at them have found, begin anew.
    window = {"seconds": 0, "sides": [], "result": "", "verdict": "", "note": ""}
    assert {**after, **window} == {**before, **window}
    assert second.rest("POST", "/abort").json()["state"] in ("ABORTING", "ABORTED")
    assert second.shares(20) == {1: 1.0}
    second.wait("ABORTED")
    assert second.rest("DELETE").json()["labels"] == {"best": 1}
    assert second.rest("DELETE").status_code == 404

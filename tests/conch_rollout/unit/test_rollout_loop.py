"""The thread of rollouts: actions in their order, looks at counters, state that a restart finds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.clocks import Clock
from tests.support.waiting import PATIENCE_S

from conch.core.errors import FailedPreconditionError, NotFoundError, UnavailableError
from conch_control.events import EventLog
from conch_control.managed_rollouts import Counts
from conch_control.version_phase import Phase
from conch_rollout.rollout_file import Declaration, Rollout, parse_toml
from conch_rollout.rollout_loop import LEAST_LOOK_NS, LOOK_NS, RolloutLoop
from conch_rollout.rollout_state import (
    RolloutCommand,
    Select,
    State,
    Traffic,
    Transition,
    VersionSight,
)
from conch_rollout.state_file import StateDirectory

DECLARED = parse_toml(
    """
    [labels]
    stable = 7
    [rollout]
    steps = ["5% 1m", "50% 1m"]
    keep = "2m"
    [rollout.guard]
    errors = 0.01
    """,
    "rollout.toml",
)
LONG = """
[labels]
stable = 7
[rollout]
steps = ["5% 1h"]
[rollout.guard]
errors = 0.01
"""
STARTED = replace(DECLARED, labels={})


class FakeServer:
    """A server whose versions load as they are selected; it serves requests when the test says so."""

    def __init__(self) -> None:
        self.events = EventLog(lambda: 0.0)
        self.repository: dict[str, set[int]] = {"m": {7}}
        self.serving: dict[str, set[int]] = {"m": {7}}
        self.routes: dict[str, Traffic | None] = {}
        self.labels: dict[str, Mapping[str, int]] = {}
        self.done: list[Any] = []
        self.counts: dict[tuple[str, int], Counts] = {}
        self.broken = 0
        self.transitions: list[Transition] = []
        self.threads: set[str] = set()
        self.condition = threading.Condition()

    def versions(self, model: str, stable: int | None) -> Mapping[int, VersionSight] | None:
        self.threads.add(threading.current_thread().name)
        if model not in self.repository:
            return None
        differences = None if stable is None else ()
        return {
            version: VersionSight("a", "a" if version in self.serving[model] else "", differences=differences)
            for version in self.repository[model]
        }

    def publish(self, model: str, traffic: Traffic | None, rollout: Rollout | None) -> None:
        if self.broken:
            self.broken -= 1
            raise RuntimeError("the registry is broken")
        with self.condition:
            self.routes[model] = traffic
            self.done.append((model, traffic))
            self.condition.notify_all()

    def publish_labels(self, model: str, labels: Mapping[str, int]) -> None:
        self.labels[model] = labels

    def select(self, model: str, selection: Select) -> None:
        with self.condition:
            self.done.append((model, selection))
            self.condition.notify_all()

    def changed(self, model: str, transition: Transition) -> None:
        self.transitions.append(transition)

    def follow(self, model: str, selection: Select) -> bool:
        """Loads and unloads what is selected; returns True if that changed anything."""
        changed = False
        for version in self.repository[model]:
            now, before = version in selection.hold, version in self.serving[model]
            if now != before:
                changed = True
                (self.serving[model].add if now else self.serving[model].discard)(version)
                self.events.append(model, version, Phase.READY if now else Phase.DRAINING)
        return changed

    def serve(self, version: int, requests: int, failures: int = 0, model: str = "m") -> None:
        old = self.counts.get((model, version), Counts())
        self.counts[model, version] = Counts(old.requests + requests, old.failures + failures)

    def requests(self, model: str, version: int) -> Counts:
        return self.counts.get((model, version), Counts())

    def shadows(self, model: str, version: int) -> Counts:
        return Counts()

    def pairs(self, model: str, version: int) -> tuple[int, int]:
        return 0, 0

    def wait_for(self, model: str, done: Traffic | Select) -> None:
        with self.condition:
            assert self.condition.wait_for(lambda: (model, done) in self.done, PATIENCE_S)


class Site:
    """A loop with its server and a clock; `settle` lets the thread do what is due."""

    def __init__(self, server: FakeServer, path: Path | None = None) -> None:
        self.server = server
        self.clock = Clock(1)
        directory = None if path is None else StateDirectory(path)
        self.loop = RolloutLoop(server, server, directory, self.clock)

    def settle(self, model: str = "m") -> Any:
        """The status when all that follows from the present has been done."""
        status = self.loop.status(model)
        while True:
            followed = self.server.follow(model, self.loop.selections.get(model, Select()))
            before = status
            self.loop.status(model)  # the step of this command takes in the events, the next one is after it
            status = self.loop.status(model)
            if not followed and status.progress == before.progress:
                return status

    def look(self, bad: float = 0.0) -> Any:
        """10 s pass, in which both sides serve requests and the candidate fails a share of its own."""
        progress = self.loop.status("m").progress
        under_test = progress.stable if progress.state is State.BAKING else progress.candidate
        self.server.serve(7, 2000, 4)
        self.server.serve(under_test or 0, 300, round(300 * bad))
        self.clock.now += LOOK_NS
        return self.settle()


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def site(server: FakeServer, tmp_path: Path) -> Any:
    site = Site(server, tmp_path)
    yield site
    assert site.loop.stop(PATIENCE_S)


def test_models_without_a_declaration_need_no_thread(site: Site) -> None:
    site.loop.declare("m", Declaration())
    site.loop.end("m", "loaded by others")
    assert not [thread for thread in threading.enumerate() if thread.name == "conch-rollout"]
    for ask in (site.loop.status, lambda model: site.loop.call(model, RolloutCommand.ABORT)):
        with pytest.raises(NotFoundError, match="model 'm' has no rollout and no labels"):
            ask("m")


def test_a_rollout_runs_to_its_end(site: Site, server: FakeServer) -> None:
    site.loop.declare("m", DECLARED)
    server.wait_for("m", Traffic(7))
    server.repository["m"].add(8)
    site.loop.declare("m", DECLARED)  # a load reads the file again
    assert site.loop.selections["m"] == Select(frozenset({7, 8}))
    weights = []
    while (status := site.look()).progress.state is not State.DONE:
        route = server.routes["m"]
        assert route is not None
        weights.append((status.progress.state.value, route.stable, route.weight))
        assert len(weights) < 100
    assert list(dict.fromkeys(weights)) == [("STEP", 7, 500), ("STEP", 7, 5000), ("BAKING", 8, 0)]
    assert (server.labels["m"], server.serving["m"]) == ({"stable": 8}, {8})
    assert server.threads == {"conch-rollout"}


def test_a_failing_candidate_is_aborted_and_its_sentence_kept(site: Site, server: FakeServer) -> None:
    server.repository["m"].add(8)
    site.loop.declare("m", DECLARED)
    assert site.settle().progress.state is State.STEP
    status = site.look(bad=0.1)
    assert status.progress.state is State.ABORTED
    assert status.progress.reason.startswith("errors 10.0 % of 300 against 0.2 % of 2,000, limit 1.0 % more")
    assert (server.routes["m"], server.serving["m"]) == (Traffic(7), {7})


def test_a_candidate_that_fails_all_requests_gets_few(site: Site, server: FakeServer) -> None:
    server.repository["m"].add(8)
    site.loop.declare("m", DECLARED)
    site.settle()
    status = site.loop.status("m")
    while status.progress.state is State.STEP:
        server.serve(7, 19)
        server.serve(8, 1, 1)
        assert server.counts["m", 8].requests < 20
        site.clock.now += LEAST_LOOK_NS
        status = site.settle()
    assert (server.routes["m"], status.progress.state) == (Traffic(7), State.ABORTED)
    assert status.progress.reason.endswith("at any look): fail")


def test_a_candidate_that_fails_late_is_aborted_by_its_last_minute(site: Site, server: FakeServer) -> None:
    server.repository["m"].add(8)
    site.loop.declare("m", parse_toml(LONG, "rollout.toml"))
    site.settle()
    for _ in range(30):
        site.look()
    while site.look(bad=0.1).progress.state is State.STEP:
        failures = server.counts["m", 8].failures / server.counts["m", 8].requests
        assert failures < 0.01, "all together are within the limit"


def test_a_candidate_that_was_loaded_again_is_judged_from_there(site: Site, server: FakeServer) -> None:
    server.repository["m"].add(8)
    site.loop.declare("m", parse_toml(LONG, "rollout.toml"))
    site.settle()
    for _ in range(2):
        site.look()
    site.loop.call("m", RolloutCommand.SET_WEIGHT, 1000)
    site.settle()
    server.counts["m", 8] = Counts()
    requests = site.look().window.candidate.requests
    assert requests in (0, 300), "the look that finds it may come before those of the client"
    assert site.look().window.candidate.requests == requests + 300


def test_while_baking_the_old_versions_last_step_is_the_measure(site: Site, server: FakeServer) -> None:
    server.repository["m"].add(8)
    site.loop.declare("m", DECLARED)
    site.settle()
    site.look()
    site.loop.call("m", RolloutCommand.PROMOTE)
    assert site.settle().progress.state is State.BAKING
    status = site.look(bad=0.1)
    assert (server.routes["m"], status.progress.stable) == (Traffic(7), 7)
    assert "against 0.2 % of 2,000" in status.progress.reason


def test_a_restart_goes_on_from_the_state_files(server: FakeServer, tmp_path: Path) -> None:
    server.repository["m"].add(8)
    first = Site(server, tmp_path)
    first.loop.declare("m", DECLARED, by_call=True)
    first.settle()
    first.loop.call("m", RolloutCommand.SET_WEIGHT, 1234)
    before = first.settle()
    route = server.routes["m"]
    assert first.loop.stop(PATIENCE_S)
    with pytest.raises(UnavailableError, match="Server exiting"):
        first.loop.status("m")
    server.serving["m"] = set()
    versions = server.repository.pop("m")
    second = Site(server, tmp_path)
    second.loop.restore()  # before the repository is read
    assert second.loop.status("m").progress == before.progress
    server.repository["m"] = versions
    second.loop.declare("m", Declaration())  # no file, when the model is loaded
    assert second.loop.selections["m"].hold == {7}
    after = second.settle()
    assert after == replace(before, seconds=after.seconds)
    assert server.routes["m"] == route
    second.loop.declare("m", Declaration(), by_call=True)
    with pytest.raises(NotFoundError):
        second.loop.status("m")
    assert (server.routes["m"], second.loop.selections) == (None, {})
    assert second.loop.stop(PATIENCE_S)


def test_calls_declare_labels_and_rollouts(site: Site, server: FakeServer) -> None:
    with pytest.raises(FailedPreconditionError, match="has no candidate: no version is above version 7"):
        site.loop.start("m", STARTED)
    with pytest.raises(NotFoundError):
        site.loop.status("m")
    site.loop.change("m", lambda each: replace(each, labels={**each.labels, "best": 7}))
    assert (server.labels["m"], server.routes) == ({"best": 7}, {})
    server.repository["m"].add(8)
    site.loop.start("m", STARTED)
    assert site.settle().progress.state is State.STEP
    assert server.labels["m"] == {"best": 7, "stable": 7}
    with pytest.raises(FailedPreconditionError, match="the rollout of 'm' is STEP already"):
        site.loop.start("m", STARTED)
    site.loop.call("m", RolloutCommand.ABORT)
    aborted = site.settle()
    with pytest.raises(
        FailedPreconditionError, match="holds version 8 out: aborted by a call; change its files"
    ):
        site.loop.start("m", STARTED)
    assert site.settle().progress == aborted.progress
    site.loop.start("m", STARTED, again=True)
    assert site.settle().progress.state is State.STEP
    site.loop.change("m", lambda each: Declaration())
    assert (server.labels["m"], server.routes["m"]) == ({}, None)


def test_calls_do_not_change_what_a_file_declares(site: Site) -> None:
    site.loop.declare("m", DECLARED)
    with pytest.raises(FailedPreconditionError, match=r"is declared in rollout\.toml"):
        site.loop.declare("m", Declaration(), by_call=True)
    with pytest.raises(FailedPreconditionError, match=r"is declared in rollout\.toml"):
        site.loop.start("m", STARTED)


def test_actions_that_fail_are_tried_again_in_their_order(
    site: Site, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.repository |= {"m": {7, 8}, "n": {7}}
    server.serving["n"] = {7}
    site.loop.declare("m", DECLARED)
    site.settle()
    server.broken, server.done = 2, []
    with pytest.raises(RuntimeError, match="the registry is broken"):
        site.loop.call("m", RolloutCommand.ABORT)
    site.loop.declare("n", DECLARED)
    server.wait_for("n", Traffic(7))  # other models go on
    site.look()
    assert [what for model, what in server.done if model == "m"] == [
        Traffic(7),
        Select(frozenset({7}), frozenset({8})),
    ]
    assert "the rollout of 'm' has failed; it goes on soon" in caplog.text


def test_models_of_a_group_share_a_number(site: Site, server: FakeServer) -> None:
    assert DECLARED.rollout is not None
    grouped = replace(DECLARED, rollout=replace(DECLARED.rollout, group="ocr"))
    server.repository = {"m": {7, 8}, "n": {7}}
    server.serving["n"] = {7}
    site.loop.declare("m", grouped)
    site.loop.declare("n", grouped)
    site.settle("m")
    site.loop.call("m", RolloutCommand.ABORT)
    site.settle("m")
    site.loop.call("m", RolloutCommand.START, again=True)
    server.repository["n"].add(8)
    site.loop.declare("n", grouped)
    routes = [(site.settle(model), server.routes[model])[1] for model in ("m", "n")]
    assert routes[0] is not None and routes[0].weight == 500
    assert routes[0] == routes[1]


def test_without_a_state_directory_the_log_says_so_once(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.repository["m"].add(8)
    site = Site(server)
    with caplog.at_level(logging.WARNING):
        site.loop.declare("m", DECLARED)
        site.settle()
        site.loop.call("m", RolloutCommand.ABORT)
        site.settle()
        site.loop.call("m", RolloutCommand.START, again=True)
        site.settle()
    assert caplog.text.count("without --state-directory the progress of rollouts ends with this process") == 1
    assert site.loop.stop(PATIENCE_S)


def test_status_tells_what_the_traffic_allows(site: Site, server: FakeServer) -> None:
    server.repository["m"].add(8)
    site.loop.declare("m", DECLARED)
    site.settle()
    for _ in range(2):
        server.serve(7, 100)
        server.serve(8, 5)
        site.clock.now += LOOK_NS
        site.settle()
    assert site.settle().note == "5% of 10.5 requests/s gives 200 requests in 6 min; the step lasts 1m"


def test_the_thread_wakes_when_the_old_version_has_been_kept_long_enough(server: FakeServer) -> None:
    server.repository["m"].add(8)
    server.serving["m"].add(8)
    loop = RolloutLoop(server, server, clock=time.monotonic_ns)
    loop.declare("m", parse_toml('[labels]\nstable = 7\n[rollout]\nkeep = "10ms"', "f"))
    loop.call("m", RolloutCommand.PROMOTE)
    server.wait_for("m", Select(frozenset({8})))
    assert loop.stop(PATIENCE_S)

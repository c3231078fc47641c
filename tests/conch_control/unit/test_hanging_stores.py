"""Agents and planners beside a repository that hangs: loads, the index, and what is followed."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pytest
from tests.support.clocks import PausedClock
from tests.support.servers import eventually
from tests.support.stores import WAIT_S, HangingStore, on_a_thread

from conch.core.errors import ConchError
from conch.core.model_control import IndexEntry
from conch_control.control_options import PlannerOptions
from conch_control.lifecycle.agent import Agent
from conch_control.planner.planner_loop import Planner
from conch_control.repository.local import LocalRepository
from conch_control.repository.repositories import Repositories

if TYPE_CHECKING:
    from tests.support.sites import Site

T = TypeVar("T")

SETTLE_S = 0.1
NEVER_S = 3600.0
ENSEMBLE = """
    platform: "ensemble"
    input { name: "A" data_type: TYPE_UINT8 dims: 1 }
    output { name: "Z" data_type: TYPE_UINT8 dims: 1 }
    ensemble_scheduling { step {
        model_name: "theirs" model_version: -1
        input_map { key: "X" value: "A" } output_map { key: "X" value: "Z" }
    } }
"""
GIVEN: dict[str, str | bytes] = {
    "config": json.dumps(
        {
            "backend": "echo",
            "input": [{"name": "X", "data_type": "TYPE_UINT8", "dims": [1]}],
            "output": [{"name": "X", "data_type": "TYPE_UINT8", "dims": [1]}],
        }
    ),
    "file:1/model.echo": b"ok",
}


class Beside:
    """A local repository with the model `ours` beside a store with the model `theirs`.

    The clock of planners runs while a test waits for what they do.
    """

    def __init__(self, site: Site, root: Path) -> None:
        self.clock = PausedClock()
        self.site = site
        self.second = root / "second"
        site.model("ours")
        self.write("theirs")
        self.store = HangingStore(behind=LocalRepository(self.second))

    def write(self, name: str, behaviour: str = "ok") -> None:
        """Writes a model into the store."""
        self.site.model(name, {1: behaviour}, repository=self.second)

    def repositories(self, timeout_s: float = 0.0) -> Repositories:
        """Both of them."""
        return Repositories([LocalRepository(self.site.repository), self.store], timeout_s=timeout_s)

    def agent(self, mode: Literal["explicit", "poll"] = "explicit") -> Agent:
        """An agent that has seen both, and has loaded nothing."""
        agent = self.site.agent(mode)
        agent.repositories = self.repositories()
        return agent

    def eventually(self, condition: Callable[[], Any], what: str) -> None:
        """Waits until a condition holds, which a planner brings about."""
        with self.clock.running():
            eventually(condition, what)

    def hang(self, agent: Agent) -> None:
        """Has the store hang, after its models were seen."""
        agent.repositories.scan()
        while self.store.begun.acquire(blocking=False):
            pass
        self.store.hang()


@pytest.fixture
def beside(site: Site, tmp_path: Path) -> Iterator[Beside]:
    made = Beside(site, tmp_path)
    yield made
    made.store.go_on()


def load(agent: Agent, name: str, **parameters: str | bytes) -> Future[None]:
    return on_a_thread(lambda: agent.load(name, parameters))


def test_a_load_of_a_local_model_does_not_wait(beside: Beside) -> None:
    agent = beside.agent()
    beside.hang(agent)
    load(agent, "ours").result(WAIT_S)
    assert beside.site.loads() == ["ours:1"]


def test_a_load_waits_for_the_store_if_it_may_have_the_model(beside: Beside) -> None:
    agent = beside.agent()
    beside.hang(agent)
    beside.write("new")
    loads = [load(agent, name) for name in ("theirs", "new", "nowhere")]
    assert beside.store.begun.acquire(timeout=WAIT_S)
    eventually(lambda: agent.repositories.listers[1].requested_number == 3, "all wait for it")
    assert not any(each.done() for each in loads)
    beside.store.go_on()
    for each in loads[:2]:
        each.result(WAIT_S)
    with pytest.raises(ConchError) as caught:
        loads[2].result(WAIT_S)
    assert caught.value.__cause__ is None  # it is nowhere, and will not be there at the next try
    assert sorted(beside.site.loads()) == ["new:1", "theirs:1"]


def test_a_load_of_what_the_store_may_have_fails_with_the_store(
    beside: Beside, caplog: pytest.LogCaptureFixture
) -> None:
    agent = beside.agent()
    beside.hang(agent)
    loading = load(agent, "theirs")
    assert beside.store.begun.acquire(timeout=WAIT_S)
    beside.store.error = OSError("no answer within 10 s")
    beside.store.go_on()
    with pytest.raises(ConchError) as caught:
        loading.result(WAIT_S)
    assert isinstance(caught.value.__cause__, OSError)
    assert "some can not: 's3://bucket': no answer within 10 s" in caplog.text


def test_a_model_that_the_store_has_too_is_not_loaded_behind_its_back(beside: Beside) -> None:
    agent = beside.agent()
    beside.hang(agent)
    beside.site.model("theirs")
    loading = load(agent, "theirs")
    eventually(lambda: hangs(agent.repositories), "it has been given up once")
    assert not loading.done()
    beside.store.go_on()
    with pytest.raises(ConchError):
        loading.result(WAIT_S)
    assert beside.site.loads() == []


def test_files_that_come_with_the_request_do_not_wait(beside: Beside) -> None:
    agent = beside.agent()
    beside.hang(agent)
    load(agent, "theirs", **GIVEN).result(WAIT_S)
    load(agent, "elsewhere", **GIVEN).result(WAIT_S)
    assert sorted(beside.site.loads()) == ["elsewhere:1", "theirs:1"]


@pytest.mark.parametrize("served", [False, True])
def test_an_ensemble_waits_for_parts_that_do_not_serve(beside: Beside, served: bool) -> None:
    agent = beside.agent()
    beside.site.model("whole", {1: ""}, ENSEMBLE)
    if served:
        agent.load("theirs", {})
    beside.hang(agent)
    loading = load(agent, "whole")
    if not served:
        assert beside.store.begun.acquire(timeout=WAIT_S)
        eventually(lambda: agent.repositories.listers[1].requested_number == 3, "it waits")
        assert not loading.done()
        beside.store.go_on()
    loading.result(WAIT_S)
    assert beside.site.loads() == ["theirs:1"]
    assert agent.describe("whole").status.versions[0].phase.value == "READY"


def test_an_ensemble_that_hangs_in_the_store_comes_back_with_its_part(beside: Beside) -> None:
    agent = beside.agent()
    text = ENSEMBLE.replace("theirs", "ours")
    beside.site.model("whole", {1: ""}, text, repository=beside.second)
    agent.load("whole", {})
    agent.unload("ours", False)
    beside.hang(agent)
    loading = load(agent, "ours")
    assert beside.store.begun.acquire(timeout=WAIT_S)
    beside.store.go_on()
    loading.result(WAIT_S)
    assert beside.site.states("whole")[1][0] == "READY"


def test_the_index_shows_what_a_store_that_hangs_had(beside: Beside) -> None:
    agent = beside.agent()
    agent.load("theirs", {})
    beside.hang(agent)
    both = [IndexEntry("ours"), IndexEntry("theirs", "1", "READY")]
    assert on_a_thread(lambda: agent.index(False)).result(WAIT_S) == both
    location = str(beside.second / "theirs")
    assert on_a_thread(lambda: agent.describe("theirs")).result(WAIT_S).status.location == location
    assert [each.location for each in agent.progress(["theirs"])] == [location]
    assert [each.name for each in agent.models().models] == ["ours", "theirs"]
    assert beside.site.send("theirs").error() is None
    assert beside.store.most == 1


@contextmanager
def following(beside: Beside, mode: Literal["poll", "watch"], poll_s: float) -> Iterator[Planner]:
    """A planner, begun when everything was loaded."""
    agent = beside.agent("poll")
    planner = Planner(agent, agent.repositories, PlannerOptions(mode, poll_s, SETTLE_S), beside.clock)
    planner.remember()
    for name in ("ours", "theirs"):
        agent.load(name, {})
    agent.repositories.timeout_ns = 0
    planner.start()
    try:
        yield planner
    finally:
        beside.store.go_on()
        assert planner.stop(WAIT_S)


# In mode watch the store is no place that can be watched, so it is polled.
EVERY = [("poll", 0.05), pytest.param("watch", 0.05, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("mode", "poll_s"), EVERY)
def test_local_models_are_followed_while_the_store_hangs(
    beside: Beside, mode: Literal["poll", "watch"], poll_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    site = beside.site
    with caplog.at_level(logging.INFO), following(beside, mode, poll_s):
        beside.store.hang()
        site.model("new")
        beside.eventually(lambda: "new:1" in site.loads(), "a local model is loaded")
        site.model("ours", {1: "ok again"})
        beside.eventually(lambda: site.loads().count("ours:1") == 2, "it is loaded anew")
        # What happens to the store meanwhile is seen when it answers, and only once.
        beside.write("theirs", "ok again")
        beside.write("more")
        shutil.rmtree(site.repository / "new")
        assert site.send("theirs").error() is None
        assert beside.store.most == 1
        beside.store.go_on()
        beside.eventually(lambda: "more:1" in site.loads(), "the store's new model is loaded")
        beside.eventually(lambda: site.loads().count("theirs:1") == 2, "its changed model is loaded anew")
        beside.eventually(lambda: not site.registry.entries["new"].ready, "what is gone is unloaded")
    assert sorted(site.loads()) == ["more:1", "new:1", "ours:1", "ours:1", "theirs:1", "theirs:1"]
    assert caplog.text.count("is gone: unloading it") == 1
    assert beside.store.most == 1


def test_nothing_is_unloaded_while_the_store_hangs(beside: Beside, caplog: pytest.LogCaptureFixture) -> None:
    site = beside.site
    with caplog.at_level(logging.INFO), following(beside, "poll", 0.05):
        beside.store.hang()
        site.remove("ours")
        for number in range(3):  # each takes several looks
            site.model(f"m{number}")
            beside.eventually(partial(lambda line: line in site.loads(), f"m{number}:1"), "looks are taken")
        assert "unloading it" not in caplog.text
        assert site.send("ours").error() is None
        beside.store.go_on()
        beside.eventually(lambda: not site.registry.entries["ours"].ready, "it is unloaded")
    assert site.send("theirs").error() is None
    assert caplog.text.count("unloading it") == 1


def test_what_comes_late_is_looked_at_without_waiting_for_the_next_poll(beside: Beside) -> None:
    site = beside.site
    with following(beside, "poll", NEVER_S) as planner:
        beside.eventually(lambda: planner.has_polled, "the first look has been taken")
        beside.store.hang()
        planner.poll()
        assert beside.store.begun.acquire(timeout=WAIT_S)
        beside.eventually(lambda: hangs(planner.repositories), "the look goes on without it")
        beside.write("theirs", "ok again")
        beside.store.go_on()
        beside.eventually(lambda: site.loads().count("theirs:1") == 2, "it is loaded anew")


def hangs(repositories: Repositories) -> bool:
    return repositories.listers[1].timed_out(0)


def test_a_planner_that_begins_while_the_store_hangs(beside: Beside) -> None:
    agent = beside.agent("poll")
    for name in ("ours", "theirs"):
        agent.load(name, {})
    beside.hang(agent)
    # As `conch control` does it: it knows what runs, and not from which files.
    repositories = beside.repositories()
    planner = Planner(agent, repositories, PlannerOptions("poll", 0.05, SETTLE_S), beside.clock)
    planner.start()
    try:
        beside.site.model("new")
        beside.eventually(lambda: "new:1" in beside.site.loads(), "a local model is loaded")
        beside.write("more")
        beside.store.go_on()
        beside.eventually(lambda: "more:1" in beside.site.loads(), "the store's new model is loaded")
    finally:
        assert planner.stop(WAIT_S)
        repositories.close()
    assert sorted(beside.site.loads()) == ["more:1", "new:1", "ours:1", "theirs:1"]

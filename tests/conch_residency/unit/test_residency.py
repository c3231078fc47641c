"""Residency on demand, with an agent in process: cold requests, room, evictions, pins and failures."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from tests.support.servers import eventually
from tests.support.sites import CONFIG, WAIT_S, Site, SiteAnswer
from tests.support.waiting import PATIENCE_S

from conch.core.clock import monotonic_ns
from conch.core.cold_models import ColdModelError, resident, when_loaded
from conch.core.errors import (
    ConchError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from conch.core.model_control import IndexEntry
from conch_residency import catalogue
from conch_residency.residency import OnDemandResidency
from conch_residency.residency_settings import ResidencySettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conch.core.request import InferenceRequest
    from conch.core.servable import Servable
    from conch_control.lifecycle.agent import Agent

S = 1_000_000_000
T = TypeVar("T")
MB = 1 << 20
"""Memory of a small model."""


STEP = """step {
    model_name: "%s" model_version: -1
    input_map { key: "X" value: "%s" } output_map { key: "X" value: "%s" }
}"""
ENSEMBLE = f"""
    platform: "ensemble"
    input {{ name: "X" data_type: TYPE_UINT8 dims: 1 }}
    output {{ name: "Y" data_type: TYPE_UINT8 dims: 1 }}
    ensemble_scheduling {{ {STEP % ("a", "X", "M")} {STEP % ("b", "M", "Y")} }}
"""


def parameter(key: str, value: str) -> str:
    return f'{CONFIG} parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def on_demand(
    site: Site, memory: int | str = "80%", state_directory: Path | None = None, **settings: Any
) -> Agent:
    patient = {"min_resident_s": 0.0, "cold_start_timeout_s": PATIENCE_S}
    given = ResidencySettings(memory=memory, **patient | settings)
    agent = site.agent("on-demand", residency=given, load_threads=4, state_directory=state_directory)
    assert agent.start() == []
    return agent


def ask(site: Site, name: str, deadline_s: float | None = None) -> ConchError | None:
    """Sends a request, waits for its model as the Python API does, and returns the error of the answer."""
    ends_ns = None if deadline_s is None else monotonic_ns() + round(deadline_s * S)
    return resident(lambda: site.send(name), lambda: ends_ns).error()


def in_time(act: Callable[[], T]) -> T:
    """Does something again while its model was not loaded within the limit, which a busy machine may exceed.

    Errors other than that of the limit are the caller's.
    """
    found: list[T] = []

    def is_done() -> bool:
        with suppress(UnavailableError):
            found.append(act())
        return bool(found)

    eventually(is_done, "the model is loaded")
    return found[0]


def ask_for(site: Site, name: str) -> ConchError | None:
    """As `ask`, for as long as it takes."""
    return in_time(lambda: resident(lambda: site.send(name))).error()


def wait_until(condition: Callable[[], bool]) -> None:
    eventually(condition, "it comes true")


def in_memory(site: Site) -> set[str]:
    return {name for name, entry in site.registry.entries.items() if entry.ready}


def test_a_model_is_loaded_by_its_first_request(site: Site) -> None:
    for name in "abc":
        site.model(name)
    agent = on_demand(site)
    assert agent.ready()
    assert site.loads() == []
    assert agent.index(False) == [IndexEntry(name, "", "UNAVAILABLE", "not resident") for name in "abc"]
    assert ask(site, "b") is None
    assert ask(site, "b") is None
    assert site.loads() == ["b:1"]
    assert agent.index(True) == [IndexEntry("b", "1", "READY")]
    assert {model.name: model.reason for model in agent.models().models} == {
        "a": "not resident",
        "b": "",
        "c": "not resident",
    }


def test_a_complete_config_describes_a_cold_model(site: Site) -> None:
    site.model(
        "a", {1: "ok", 2: "ok", 3: "ok"}, f"{CONFIG} version_policy {{ latest {{ num_versions: 2 }} }}"
    )
    site.model("incomplete", config='backend: "echo"')
    site.model("wrong", {})
    residency = on_demand(site).residency
    assert isinstance(residency, OnDemandResidency)
    described = residency.describe("a")
    assert residency.describe("incomplete") == residency.describe("wrong") == residency.describe("x") == {}
    assert site.loads() == []
    assert ask(site, "a") is None
    assert described == {version: model.spec for version, model in site.serving("a").items()}
    site.registry.set_labels("a", {"stable": 2}, "api")
    residency.unload("a", False)
    wait_until(lambda: "a" not in site.registry.entries)
    assert residency.describe("a") == {}


def test_many_requests_for_a_cold_model_share_one_load(site: Site) -> None:
    site.model("slow", {1: "slowly"})
    on_demand(site)
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, site, "slow") for _ in range(64)]
        assert site.backend.loading.acquire(timeout=WAIT_S)
        site.backend.gate.set()
        assert [each.result() for each in asked] == [None] * 64
    assert site.loads() == ["slow:1"]


def test_the_oldest_idle_model_makes_room(site: Site) -> None:
    for name in "abcd":
        site.model(name)
    agent = on_demand(site, models=2)
    for name in "abcab":
        assert ask(site, name) is None
        wait_until(lambda: len(in_memory(site)) <= 2)
    assert in_memory(site) == {"a", "b"}
    assert isinstance(agent.residency, OnDemandResidency)
    counts = agent.residency.counts()
    assert (counts.evictions, counts.cold_starts) == ({"room": 3}, {"loaded": 5})
    assert {name: model.cold_starts for name, model in counts.models.items()} == {"a": 2, "b": 2}


def test_a_request_that_runs_keeps_its_model_and_one_in_between_comes_again(site: Site) -> None:
    """The eviction waits for what runs; the evicted model is loaded again for its next request."""
    site.model("a", {1: "slow"})
    site.model("b")
    on_demand(site, models=1)
    running = resident(lambda: site.send("a"))
    assert site.backend.waiting.acquire(timeout=WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[ConchError | None] = pool.submit(ask, site, "b")
        assert in_memory(site) == {"a"}
        assert running.pending
        site.backend.gate.set()
        assert running.error() is None
        assert waiting.result(WAIT_S) is None
    assert in_memory(site) == {"b"}
    assert ask(site, "a") is None


def test_a_live_sequence_keeps_its_model(site: Site) -> None:
    site.model("sequences", config=f"{CONFIG} sequence_batching {{ }}")
    site.model("b")
    on_demand(site, models=1, cold_start_timeout_s=0.2)
    begun = in_time(lambda: resident(lambda: site.send_in_sequence("sequences", 1, start=True)))
    assert begun.error() is None
    with pytest.raises(ResourceExhaustedError, match="no memory for model 'b'"):
        ask_for(site, "b")
    assert site.send_in_sequence("sequences", 1, end=True).error() is None
    assert ask_for(site, "b") is None


@pytest.mark.pure("replaces a method of the registry")
def test_a_sequence_goes_on_where_its_model_is_evicted_at_this_moment(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.model("sequences", config=f"{CONFIG} sequence_batching {{ }}")
    residency = on_demand(site).residency
    assert isinstance(residency, OnDemandResidency)
    assert resident(lambda: site.send_in_sequence("sequences", 1, start=True)).error() is None
    resolve = site.registry.resolve_request

    def evicted_first(request: InferenceRequest) -> Servable:
        assert residency.unload("sequences", False)
        return resolve(request)

    monkeypatch.setattr(site.registry, "resolve_request", evicted_first)
    assert site.send_in_sequence("sequences", 1, end=True).error() is None
    assert site.loads() == ["sequences:1"]


def test_a_model_that_keeps_a_sequence_while_it_is_evicted_blocks_no_other_load(site: Site) -> None:
    """Its room does not count as coming: another model is evicted."""
    idle = "max_sequence_idle_microseconds: 600000000"
    site.model("sequences", config=f"{CONFIG} sequence_batching {{ {idle} }}")
    for name in "ab":
        site.model(name)
    residency = on_demand(site, models=2).residency
    assert isinstance(residency, OnDemandResidency)
    assert resident(lambda: site.send_in_sequence("sequences", 1, start=True)).error() is None
    assert ask(site, "a") is None
    assert residency.unload("sequences", False)
    assert ask(site, "b") is None
    assert in_memory(site) == {"b"}
    assert site.send_in_sequence("sequences", 1, end=True).error() is None
    assert ask(site, "a") is None
    assert in_memory(site) == {"a", "b"}, "the room of the sequence is free again"


def test_models_in_use_are_named_when_there_is_no_room(site: Site) -> None:
    site.model("a", {1: "slow"})
    site.model("b")
    on_demand(site, models=1, cold_start_timeout_s=0.2)
    running = in_time(lambda: resident(lambda: site.send("a")))
    assert site.backend.waiting.acquire(timeout=WAIT_S)
    with pytest.raises(ResourceExhaustedError, match=r"no memory for model 'b' within 0\.2 s .*'a' has 1 MB"):
        ask_for(site, "b")
    with pytest.raises(DeadlineExceededError):
        ask(site, "b", 0.05)
    site.backend.gate.set()
    assert running.error() is None


def test_a_model_larger_than_the_budget_is_refused(site: Site) -> None:
    site.model("large", config=parameter("CONCH_MEMORY_MB", "11"))
    site.model("wrong", config=parameter("CONCH_MEMORY_MB", "x"))
    site.model("small")
    on_demand(site, memory=10_000_000)
    with pytest.raises(ResourceExhaustedError, match=r"model 'large': it needs 11 MB, .* have 10 MB"):
        ask(site, "large")
    with pytest.raises(InvalidArgumentError, match=r"'CONCH_MEMORY_MB' of model 'wrong' must be a number"):
        ask(site, "wrong")
    assert ask(site, "small") is None
    assert site.loads() == ["small:1"]


def test_a_failed_load_is_remembered_until_its_files_change(site: Site) -> None:
    site.model("m", {1: "crash boom"})
    agent = on_demand(site)
    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(ask, site, "m") for _ in range(8)]:
            with pytest.raises(InvalidArgumentError, match="Internal: boom"):
                each.result()
    assert agent.ready()
    assert agent.index(False) == [IndexEntry("m", "1", "UNAVAILABLE", "Internal: boom")]
    site.model("m", {1: "ok"})

    def works() -> bool:
        try:
            return ask(site, "m") is None
        except InvalidArgumentError:
            return False

    wait_until(works)
    assert site.loads() == ["m:1"]


def test_unknown_names_are_refused_without_access_to_storage(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.model("a")
    agent = on_demand(site)
    listings: list[object] = []
    (repository,) = agent.repositories
    models = repository.models

    def listed() -> object:
        listings.append(models())
        return listings[-1]

    monkeypatch.setattr(repository, "models", listed)
    monkeypatch.setattr(catalogue, "RESCAN_NS", 3600 * S)
    for number in range(10_000):
        with pytest.raises(NotFoundError, match=r"Request for unknown model: 'x.*' is not found"):
            site.send(f"x{number}")
    assert len(listings) <= 1
    site.model("new")
    monkeypatch.setattr(catalogue, "RESCAN_NS", 0)
    wait_until(lambda: _is_known(site, "new"))
    assert ask(site, "new") is None


def _is_known(site: Site, name: str) -> bool:
    try:
        site.registry.resolve(name)
    except ColdModelError:
        return True
    except NotFoundError:
        return False
    return True


def test_a_loaded_model_is_pinned_until_it_is_unloaded(site: Site) -> None:
    for name in "ab":
        site.model(name)
    site.model("c", config=parameter("CONCH_PINNED", "true"))
    agent = on_demand(site, models=1, cold_start_timeout_s=0.2)
    in_time(lambda: agent.load("a", {}))
    with pytest.raises(ResourceExhaustedError, match="no memory for model 'b'"):
        ask_for(site, "b")
    agent.unload("a", False)
    assert ask_for(site, "b") is None
    in_time(lambda: agent.load("a", {"conch_pin": False}))
    assert ask_for(site, "b") is None
    assert ask_for(site, "c") is None
    with pytest.raises(ResourceExhaustedError, match="no memory for model 'b'"):
        ask_for(site, "b")
    with pytest.raises(InvalidArgumentError, match="'conch_pin' can't be false with a config"):
        agent.load("b", {"conch_pin": False, "config": "{}"})
    with pytest.raises(InternalError, match="failed to poll from model repository"):
        agent.load("ghost", {})
    agent.unload("c", False)
    assert ask_for(site, "b") is None


def test_a_model_whose_load_failed_is_not_pinned(site: Site) -> None:
    site.model("a", {1: "crash boom"})
    site.model("b")
    agent = on_demand(site, models=1, cold_start_timeout_s=0.2)
    with pytest.raises(InvalidArgumentError, match="Internal: boom"):
        agent.load("a", {})
    site.model("a", {1: "ok"})
    in_time(lambda: agent.load("a", {"conch_pin": False}))
    assert ask_for(site, "b") is None


def test_a_model_stays_while_its_rollout_pins_it(site: Site) -> None:
    for name in "ab":
        site.model(name)
    residency = on_demand(site, models=1, cold_start_timeout_s=0.2).residency
    assert isinstance(residency, OnDemandResidency)
    residency.pin_for_rollout("a", True)
    assert ask_for(site, "a") is None
    with pytest.raises(ResourceExhaustedError, match=r"'a' has 1 MB \(rollout\)"):
        ask_for(site, "b")
    residency.pin_for_rollout("a", False)
    assert ask_for(site, "b") is None


def test_a_restart_brings_back_what_was_in_memory(site: Site, tmp_path: Path) -> None:
    """Up to 80 % of the budget, the most recently used first, without a request; with the sizes measured."""
    for name in "abcdefg":
        site.model(name, config=parameter("CONCH_MEMORY_MB", "2"))
    state = tmp_path / "state"
    first = on_demand(site, models=5, state_directory=state)
    for name in "abcdefg":
        assert ask(site, name) is None
    assert isinstance(first.residency, OnDemandResidency)
    wait_until(lambda: in_memory(site) == set("cdefg"))
    assert first.close(WAIT_S)
    site.remove("f")
    restarted = Site(site.repository.parent)
    try:
        agent = on_demand(restarted, models=5, state_directory=state)
        assert agent.ready()
        assert restarted.loads() == [], "not before the ports are open"
        agent.restore()
        wait_until(lambda: in_memory(restarted) == set("gedc"))
        assert restarted.loads() == ["g:1", "e:1", "d:1", "c:1"]
        assert ask(restarted, "a") is None
        assert ask(restarted, "b") is None
        wait_until(lambda: in_memory(restarted) == set("gedab"))
    finally:
        restarted.close()


def test_a_deadline_earlier_than_the_usual_load_fails_at_once(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "state" / "residency" / "models.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"format": 1, "models": {"slow": [1, 1000000, 300000000000, {}]}, "resident": []}')
    site.model("slow", {1: "slowly"})
    on_demand(site, state_directory=tmp_path / "state")
    with pytest.raises(UnavailableError, match=r"its last load took 300\.0 s") as refused:
        ask(site, "slow", WAIT_S)
    assert refused.value.retry_after_ms == 300_000
    site.backend.gate.set()
    wait_until(lambda: in_memory(site) == {"slow"})


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 2}', '{"format": 1, "models": {"a": [1, -1, 0, {}]}, "resident": []}']
)
def test_state_that_cannot_be_read_is_ignored(
    site: Site, tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "state" / "residency" / "models.json"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    site.model("a")
    on_demand(site, state_directory=tmp_path / "state").restore()
    assert ask(site, "a") is None
    assert "models.json is no state of residency and is ignored" in caplog.text


def test_labels_stay_where_a_model_is_evicted(site: Site) -> None:
    site.model("a", {1: "ok", 2: "ok"}, f"{CONFIG} version_policy {{ all {{ }} }}")
    site.model("b")
    on_demand(site, models=1)
    assert ask(site, "a") is None
    site.registry.set_labels("a", {"champion": 1}, "api")
    assert ask(site, "b") is None
    assert in_memory(site) == {"b"}
    assert resident(lambda: site.registry.resolve("a", "champion")).spec.version == 1


def test_pins_are_for_on_demand_mode(site: Site) -> None:
    site.model("a")
    agent = site.agent("explicit")
    with pytest.raises(InvalidArgumentError, match="only with --model-control-mode=on-demand"):
        agent.load("a", {"conch_pin": True})


def test_an_ensemble_brings_its_parts_and_goes_before_them(site: Site) -> None:
    for name in "abc":
        site.model(name)
    site.model("e", {1: ""}, ENSEMBLE)
    on_demand(site, models=3)
    assert ask(site, "e") is None
    assert in_memory(site) == {"a", "b", "e"}
    assert ask(site, "c") is None
    assert "e" not in in_memory(site)
    assert ask(site, "e") is None
    assert in_memory(site) == {"a", "b", "e"}


def test_requests_are_refused_where_they_shall_not_wait(site: Site) -> None:
    site.model("m")
    on_demand(site, cold_start="reject")
    with pytest.raises(UnavailableError, match=r"'m' is not in memory, and is being loaded") as refused:
        ask(site, "m")
    assert refused.value.retry_after_ms == 1000
    wait_until(lambda: "m" in in_memory(site))
    assert ask(site, "m") is None


def test_idle_models_are_evicted_unless_they_have_their_own_timeout(site: Site) -> None:
    site.model("m")
    site.model("for_ever", config=parameter("CONCH_KEEP_ALIVE_SECONDS", "0"))
    site.model("wrong", config=parameter("CONCH_KEEP_ALIVE_SECONDS", "-1"))
    agent = on_demand(site, idle_s=0.5)
    assert ask(site, "for_ever") is None
    assert ask(site, "m") is None
    with pytest.raises(InvalidArgumentError, match=r"'CONCH_KEEP_ALIVE_SECONDS' of model 'wrong' must be a"):
        ask(site, "wrong")
    wait_until(lambda: in_memory(site) == {"for_ever"})
    residency = agent.residency
    assert isinstance(residency, OnDemandResidency)
    wait_until(lambda: residency.counts().evictions == {"idle": 1})
    assert ask(site, "m") is None


def test_statistics_survive_an_eviction(site: Site) -> None:
    for name in "ab":
        site.model(name)
    agent = on_demand(site, models=1)
    residency = agent.residency
    assert isinstance(residency, OnDemandResidency)
    for _ in range(3):
        assert ask(site, "a") is None
    assert residency.kept_statistics("a") == []
    before = site.serving("a")[1].statistics.snapshot()
    assert ask(site, "b") is None
    (kept,) = residency.kept_statistics("")
    assert (kept.name, kept.version) == ("a", 1)
    assert (kept.snapshot.success, kept.snapshot.queue) == (before.success, before.queue)
    assert ask(site, "a") is None
    (after,) = (model.statistics.snapshot() for model in site.serving("a").values())
    assert (after.success.count, after.inference_count, after.execution_count) == (4, 4, 4)
    assert [each.name for each in residency.kept_statistics("")] == ["b"]


class Purse:
    """A principal that may have a number of models loaded."""

    def __init__(self, loads: int) -> None:
        self.loads = loads

    def pay_load(self) -> None:
        if not self.loads:
            raise ResourceExhaustedError("no loads left")
        self.loads -= 1


def test_the_request_that_begins_a_load_pays_for_it(site: Site) -> None:
    site.model("slow", {1: "slowly"})
    site.model("b")
    on_demand(site)
    purse = Purse(1)

    def wait_for(name: str) -> Future[SiteAnswer]:
        return when_loaded(lambda: site.send(name), payer=purse)

    first, second = wait_for("slow"), wait_for("slow")
    with pytest.raises(ResourceExhaustedError, match="no loads left"):
        wait_for("b").result(WAIT_S)
    site.backend.gate.set()
    first.result(WAIT_S)
    second.result(WAIT_S)
    assert purse.loads == 0
    assert ask(site, "b") is None
    assert site.loads() == ["slow:1", "b:1"]


def test_a_stop_ends_the_requests_that_wait(site: Site) -> None:
    site.model("slow", {1: "slowly"})
    agent = on_demand(site)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, site, "slow") for _ in range(2)]
        assert site.backend.loading.acquire(timeout=WAIT_S)
        agent.stop_loads()
        for each in asked:
            with pytest.raises(UnavailableError, match="Server exiting"):
                each.result(WAIT_S)


def test_a_cancelled_wait_leaves_and_its_load_goes_on(site: Site) -> None:
    site.model("slow", {1: "slowly"})
    on_demand(site)
    with pytest.raises(ColdModelError) as cold:
        site.send("slow")
    future = cold.value.future()
    assert site.backend.loading.acquire(timeout=WAIT_S)
    assert future.cancel()
    site.backend.gate.set()
    wait_until(lambda: in_memory(site) == {"slow"})
    answer: SiteAnswer = site.send("slow")
    assert answer.error() is None

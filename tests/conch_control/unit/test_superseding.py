"""Loads that others overtake, versions that stay, files that are fetched: the lifecycle without an agent."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conch_control.unit.test_model_lifecycle import drained
from tests.support.remote import RemoteModel
from tests.support.servers import eventually
from tests.support.waiting import PATIENCE_S

from conch.core.errors import ConchError, InvalidArgumentError, UnavailableError
from conch.core.model_control import load_cancelled
from conch.core.registry import VersionState
from conch_control.control_options import ControlOptions
from conch_control.events import EventLog
from conch_control.lifecycle.load_queue import LoadQueue, SupersededError
from conch_control.lifecycle.model_definition import PollError
from conch_control.lifecycle.model_lifecycle import ModelLifecycle
from conch_control.lifecycle.model_loader import ModelLoader
from conch_control.lifecycle.version_diff import STALE
from conch_control.lifecycle.version_states import VersionStates
from conch_control.version_phase import Phase

if TYPE_CHECKING:
    from tests.support.sites import Site

    from conch.core.backend import BackendModel
    from conch.core.spec import ModelSpec

ALL = "version_policy { all {} }"
OUTDATED = "Newer operation has been applied to the model lifecycle, current load operation is out-dated."


class Storage:
    """A lifecycle over remote models, with threads to call it from."""

    def __init__(self, site: Site, root: Path, retries: int = 0) -> None:
        options = ControlOptions(repositories=(site.repository,), load_retries=retries)
        self.site = site
        self.root = root
        self.events = EventLog(lambda: 0.0)
        self.states = VersionStates(site.registry, self.events)
        loader = ModelLoader(options, site.get_backend, site.registry)
        self.lifecycle = ModelLifecycle(options, site.registry, loader, self.states, LoadQueue(4))
        self.models: list[RemoteModel] = []
        self._pool = ThreadPoolExecutor(8)

    def model(self, name: str = "m", *config: str, **versions: str) -> RemoteModel:
        model = RemoteModel(name, self.root, self.files(*config, **versions))
        self.models.append(model)
        return model

    def files(self, *config: str, **versions: str) -> dict[str, str]:
        """Versions are given as ``v1="ok"``."""
        files = {f"{name[1:]}/model.echo": text for name, text in (versions or {"v1": "ok"}).items()}
        return {"config.pbtxt": self.site.config(*config), **files}

    def load(self, model: RemoteModel, override: str | None = None) -> None:
        self.lifecycle.load(model, override)

    def start(self, model: RemoteModel, override: str | None = None) -> Future[None]:
        return self._pool.submit(self.lifecycle.load, model, override)

    def start_slow(self, model: RemoteModel, override: str | None = None) -> Future[None]:
        """Starts a load, and waits until it is in the backend."""
        future = self.start(model, override)
        assert self.site.backend.loading.acquire(timeout=PATIENCE_S)
        return future

    def phases(self, name: str = "m") -> dict[int, str]:
        return {version: status.phase.value for version, status in self.states.versions(name).items()}

    def history(self, version: int = 1) -> list[str]:
        return [event.phase.value for event in self.events.after(0) if event.version == version]

    def close(self) -> None:
        self.site.backend.gate.set()
        assert self.lifecycle.close(PATIENCE_S)
        self._pool.shutdown()
        for model in self.models:
            assert sorted(model.staged) == sorted(model.released), "each once"
        assert list(self.root.iterdir()) == []
        assert len(self.site.backend.closed) == len(self.site.backend.placements)


def waiting_for(go: threading.Event) -> Callable[[str], None]:
    def wait(path: str) -> None:
        assert go.wait(PATIENCE_S)

    return wait


@pytest.fixture
def storage(site: Site, tmp_path: Path) -> Iterator[Storage]:
    root = tmp_path / "cache"
    root.mkdir()
    storage = Storage(site, root)
    yield storage
    storage.close()


def test_a_fetched_model_goes_through_all_phases(storage: Storage) -> None:
    model = storage.model(v1="ok")
    seen = []

    def look(path: str) -> None:
        status = storage.states.versions("m")[1]
        seen.append((status.phase, status.done_bytes > 0, status.total_bytes > status.done_bytes))

    model.before_file = look
    storage.load(model)
    assert seen == [(Phase.STAGING, False, True), (Phase.STAGING, True, True)]
    assert storage.states.versions("m")[1].total_bytes == 0
    storage.lifecycle.unload("m")
    drained("m")
    assert storage.history() == ["STAGING", "LOADING", "READY", "DRAINING", "UNLOADED"]
    assert model.released == model.staged


def test_how_far_the_successor_of_a_version_that_serves_is(storage: Storage) -> None:
    model = storage.model()
    storage.load(model)
    model.write(storage.files(v1="changed"))
    seen = []
    model.before_file = lambda path: seen.append(storage.states.versions("m")[1])
    storage.load(model)
    assert {(status.phase, status.total_bytes > 0) for status in seen} == {(Phase.READY, True)}
    assert storage.history() == ["STAGING", "LOADING", "READY", "READY"]


def test_local_models_are_staged_at_once(site: Site) -> None:
    site.model("m")
    agent = site.agent()
    agent.load("m", {})
    assert [event.phase for event in agent.events.after(0)] == [Phase.STAGING, Phase.LOADING, Phase.READY]


def test_warming_is_said(storage: Storage) -> None:
    given = "{ data_type: TYPE_UINT8 dims: 1 zero_data: true }"
    sample = f'model_warmup {{ name: "w" batch_size: 1 inputs {{ key: "X" value {given} }} }}'
    storage.load(storage.model("m", sample, "instance_group { count: 2 }"))
    assert storage.history() == ["STAGING", "LOADING", "WARMING", "READY"]


def test_unmodified_is_not_fetched_again(storage: Storage) -> None:
    model = storage.model()
    storage.load(model)
    storage.load(model)
    assert len(model.staged) == 1


def test_files_go_when_the_last_version_that_needs_them_does(storage: Storage, site: Site) -> None:
    model = storage.model("m", ALL, v1="slow", v2="ok")
    storage.load(model)
    first = site.serving("m")
    running = site.send("m", "1")
    model.write(storage.files(ALL, v2="ok"))
    storage.load(model)
    assert site.serving("m") == {2: first[2]}
    assert model.released == []
    site.backend.gate.set()
    assert running.error() is None
    drained("m")
    assert model.released == [], "version 2 is served from there"
    model.write(storage.files(ALL, v2="changed"))
    storage.load(model)
    drained("m")
    assert sorted(model.released) == model.staged[:2]


@pytest.mark.parametrize("first", [True, False])
def test_storage_that_fails(storage: Storage, caplog: pytest.LogCaptureFixture, first: bool) -> None:
    model = storage.model()
    if not first:
        storage.load(model)
        model.write(storage.files(v1="changed"))

    def broken(path: str) -> None:
        model.error = OSError("503 slow down")

    model.before_file = broken
    for _ in range(2):  # while it is fetched, then at once
        with pytest.raises(PollError) as raised:
            storage.load(model)
        assert raised.value.message == "failed to load 'm', failed to poll from model repository"
    assert "Poll failed for model directory 'm': 503 slow down" in caplog.text
    assert storage.states.failures == {"m": "503 slow down"}
    status = storage.states.versions("m")[1]
    assert (status.phase, status.reason) == ((Phase.FAILED, "503 slow down") if first else (Phase.READY, ""))
    model.error, model.before_file = None, lambda path: None
    storage.load(model)
    assert storage.phases() == {1: "READY"}
    assert storage.states.failures == {}


def test_an_unload_stops_fetching(storage: Storage) -> None:
    model = storage.model(v1="ok")
    go = threading.Event()
    model.before_file = waiting_for(go)
    loading = storage.start(model)
    assert model.fetching.acquire(timeout=PATIENCE_S)
    storage.lifecycle.unload("m")
    assert storage.phases() == {1: "UNLOADED"}
    go.set()
    with pytest.raises(SupersededError):
        loading.result(PATIENCE_S)
    assert storage.phases() == {1: "UNLOADED"}
    assert model.released == model.staged


def test_an_unload_while_the_successor_is_fetched(storage: Storage, site: Site) -> None:
    model = storage.model(v1="slow")
    storage.load(model)
    running = site.send("m")
    model.write(storage.files(v1="ok"))
    go = threading.Event()
    model.before_file = waiting_for(go)
    loading = storage.start(model)
    eventually(lambda: storage.states.versions("m")[1].total_bytes, "it is being fetched")
    storage.lifecycle.unload("m")
    go.set()
    with pytest.raises(SupersededError):
        loading.result(PATIENCE_S)
    assert storage.phases() == {1: "DRAINING"}
    site.backend.gate.set()
    assert running.error() is None
    drained("m")
    assert storage.phases() == {1: "UNLOADED"}


def test_an_unload_while_a_load_hangs(storage: Storage, site: Site) -> None:
    """A version that serves drains at once, and a load that hangs makes no instance any more."""
    model = storage.model()
    storage.load(model)
    model.write(storage.files(v1="slowly"))
    loading = storage.start_slow(model)
    storage.lifecycle.unload("m")
    drained("m")
    assert storage.phases() == {1: "UNLOADED"}
    assert site.backend.closed == ["m:1"]
    assert not loading.done()
    site.backend.gate.set()
    with pytest.raises(UnavailableError) as raised:
        loading.result(PATIENCE_S)
    assert raised.value.message == OUTDATED
    assert site.backend.closed == ["m:1"]  # it stopped before its next step
    assert storage.phases() == {1: "UNLOADED"}
    storage.load(model)
    assert storage.phases() == {1: "READY"}


def test_a_newer_load_with_other_files_overtakes(storage: Storage, site: Site) -> None:
    model = storage.model(v1="slowly")
    older = storage.start_slow(model)
    sharing = storage.start(model)
    model.write(storage.files(v1="newer"))
    newer = storage.start(model)
    with pytest.raises(SupersededError):
        sharing.result(PATIENCE_S)  # it need not wait for the backend
    site.backend.gate.set()
    newer.result(PATIENCE_S)
    with pytest.raises(SupersededError):
        older.result(PATIENCE_S)
    assert [spec.directory for spec in site.backend.loaded] == model.staged[:2]
    assert site.serving("m")[1].spec.directory == model.staged[1]
    assert storage.phases() == {1: "READY"}


def test_a_newer_override_overtakes_and_an_equal_one_shares(storage: Storage, site: Site) -> None:
    def config(size: int) -> str:
        tensor = {"name": "X", "data_type": "TYPE_UINT8", "dims": [1]}
        return json.dumps({"backend": "echo", "max_batch_size": size, "input": [tensor], "output": [tensor]})

    model = storage.model(v1="slowly")
    older = storage.start_slow(model)
    newer = [storage.start(model, config(4))]
    eventually(lambda: storage.lifecycle.queue.newest["m"].override is not None, "it has come in")
    newer += [storage.start(model, config(4)) for _ in range(2)]
    newer += [storage.start(model)]  # leaves it in force
    site.backend.gate.set()
    with pytest.raises(SupersededError):
        older.result(PATIENCE_S)
    for future in newer:
        future.result(PATIENCE_S)
    assert site.serving("m")[1].spec.max_batch_size == 4


@pytest.mark.parametrize("rounds", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_two_loads_and_an_unload_of_one_model(storage: Storage, site: Site, rounds: int) -> None:
    for _ in range(rounds):
        model = storage.model(v1="ok")
        loads = [storage.start(model) for _ in range(2)]
        storage.lifecycle.unload("m")
        for load in loads:
            error = load.exception(PATIENCE_S)
            assert error is None or isinstance(error, SupersededError)
        drained("m")
        last = storage.phases().get(1, "UNLOADED")
        assert last == ("READY" if site.registry.entries.get("m") and site.serving("m") else "UNLOADED")
        storage.lifecycle.unload("m")
        drained("m")


def test_a_version_that_is_deleted_while_it_is_loaded(site: Site) -> None:
    directory = site.model("m", {1: "slowly", 2: "ok"}, site.config(ALL))
    agent = site.agent()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(agent.load, "m", {})
        assert site.backend.loading.acquire(timeout=PATIENCE_S)
        (directory / "2" / "model.echo").unlink()
        (directory / "2").rmdir()
        site.backend.gate.set()
        with pytest.raises(
            InvalidArgumentError, match="version 2 is at UNAVAILABLE state: Unavailable: unable"
        ):
            loading.result(PATIENCE_S)
    assert site.serving("m") == {}
    assert site.backend.closed == ["m:1"]
    agent.load("m", {})
    assert site.states("m") == {1: ("READY", "")}


def test_a_config_that_breaks_while_the_model_serves(site: Site) -> None:
    site.model("m")
    agent = site.agent()
    agent.load("m", {})
    model = site.serving("m")
    site.model("m", {}, "max_batch: 1")
    with pytest.raises(PollError):
        agent.load("m", {})
    assert site.serving("m") == model
    assert agent.ready()
    (status,) = agent.models().models
    assert "did you mean 'max_batch_size'?" in status.reason
    (line,) = agent.index(False)
    assert (line.state, line.reason) == ("READY", STALE + status.reason), (
        "told apart from one without an error"
    )
    site.model("m", {})
    agent.load("m", {})
    assert agent.models().models[0].reason == ""
    assert [line.reason for line in agent.index(True)] == [""]


def test_a_failed_successor_is_in_the_index(storage: Storage) -> None:
    model = storage.model()
    storage.load(model)
    model.write(storage.files(v1="crash boom"))
    with pytest.raises(InvalidArgumentError):
        storage.load(model)
    status = storage.states.versions("m")[1]
    assert (status.phase, status.reason) == (
        Phase.READY,
        "it goes on as it was, as its successor failed to load: Internal: boom",
    )
    assert storage.site.registry.entries["m"].states[1] == VersionState("READY", status.reason), (
        "Triton's index"
    )
    model.write(storage.files())
    storage.load(model)
    assert storage.states.versions("m")[1].reason == ""
    assert storage.site.registry.entries["m"].states[1] == VersionState("READY")


@pytest.mark.parametrize("sequences", [False, True])
def test_versions_that_have_not_changed_stay(storage: Storage, site: Site, sequences: bool) -> None:
    more = [ALL, "sequence_batching { max_sequence_idle_microseconds: 60000000 }" if sequences else ""]
    model = storage.model("m", *more, v1="ok", v2="ok")
    storage.load(model)
    first = site.serving("m")
    if sequences:
        assert site.send_in_sequence("m", 5, start=True).error() is None
    else:
        assert site.send("m").error() is None
    model.write(storage.files(*more, v1="changed", v2="ok", v3="ok"))
    storage.load(model)
    after = site.serving("m")
    assert set(after) == {1, 2, 3}
    assert after[2] is first[2]
    assert after[1] is not first[1]
    assert after[2].statistics.snapshot().inference_count == 1
    assert storage.history(2) == ["STAGING", "LOADING", "READY"]
    model.write(storage.files(*more, v2="ok"))
    storage.load(model)
    assert site.serving("m") == {2: first[2]}
    if sequences:
        assert site.send_in_sequence("m", 5, end=True).error() is None
        assert first[2].statistics.snapshot().inference_count == 2
    assert site.loads() == ["m:1", "m:2", "m:1", "m:3"]
    drained("m")
    assert storage.phases() == {1: "UNLOADED", 2: "READY", 3: "UNLOADED"}


def test_a_policy_that_selects_others_keeps_those_it_selects_still(site: Site) -> None:
    site.model("m", {1: "ok", 2: "ok"}, site.config(ALL))
    agent = site.agent()
    agent.load("m", {})
    first = site.serving("m")
    site.model("m", {}, site.config("version_policy { specific { versions: 1 } }"))
    agent.load("m", {})
    assert site.serving("m") == {1: first[1]}
    site.model(
        "m",
        {3: "ok"},
        site.config("version_policy { specific { versions: [1, 3] } }", "instance_group { count: 2 }"),
    )
    agent.load("m", {})
    assert site.serving("m")[1] is first[1]
    assert len(site.serving("m")[1].spec.instance_groups) == 1
    assert site.serving("m")[1].spec.instance_groups[0].count == 2
    site.model(
        "m",
        {},
        site.config("version_policy { specific { versions: [1, 3] } }", "instance_group { count: 2 }"),
    )
    (site.repository / "m" / "labels.txt").write_text("a")
    agent.load("m", {})
    assert site.serving("m")[1] is not first[1], "what all versions share has changed"
    drained("m")


def test_a_stop_while_files_are_fetched(storage: Storage) -> None:
    model = storage.model()
    go = threading.Event()
    model.before_file = waiting_for(go)
    loading = storage.start(model)
    assert model.fetching.acquire(timeout=PATIENCE_S)
    assert not storage.lifecycle.close(0.01)
    go.set()
    with pytest.raises(UnavailableError, match="Server exiting"):
        loading.result(PATIENCE_S)
    with pytest.raises(UnavailableError, match="Server exiting"):
        storage.load(model)


@pytest.mark.parametrize("retries", [0, 2, 3])
def test_retries(
    site: Site,
    tmp_path: Path,
    retries: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = Storage(site, tmp_path, retries)
    model = storage.model(v1="ok")
    left = [3]  # the fourth try is the first that works
    load = site.backend.load

    def failing(spec: ModelSpec) -> BackendModel:
        left[0] -= 1
        if left[0] >= 0:
            raise UnavailableError("not yet")
        return load(spec)

    monkeypatch.setattr(site.backend, "load", failing)
    try:
        storage.load(model)
        failed = False
    except ConchError:
        failed = True
    tries = caplog.text.count("failed to load 'm' version 1: Unavailable: not yet")
    assert (failed, tries) == {0: (True, 1), 2: (True, 3), 3: (False, 3)}[retries]
    again = ["FAILED", "LOADING"] * (tries - failed)
    assert storage.history() == ["STAGING", "LOADING", *again, "FAILED" if failed else "READY"]
    storage.lifecycle.close(PATIENCE_S)


def test_memory_is_measured_and_given_back(storage: Storage, site: Site) -> None:
    storage.load(storage.model())
    assert storage.states.versions("m")[1].host_bytes is not None
    storage.lifecycle.unload("m")
    drained("m")
    assert storage.states.versions("m")[1].host_bytes is None


def test_loads_side_by_side_are_not_measured(storage: Storage, site: Site) -> None:
    models = [storage.model(name, v1="slowly") for name in ("a", "b")]
    loads = [storage.start_slow(model) for model in models]
    site.backend.gate.set()
    for load in loads:
        load.result(PATIENCE_S)
    assert [storage.states.versions(name)[1].host_bytes for name in ("a", "b")] == [None, None]


def test_what_takes_long_in_a_load_can_ask_whether_to_go_on(
    storage: Storage, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = site.backend.load
    loading = threading.Event()

    def asking(spec: ModelSpec) -> BackendModel:
        stopped = load_cancelled()
        assert not stopped()
        loading.set()
        eventually(stopped, "somebody to stop it")
        raise UnavailableError("stopped in the middle")

    monkeypatch.setattr(site.backend, "load", asking)
    future = storage.start(storage.model(v1="ok"))
    assert loading.wait(PATIENCE_S)
    monkeypatch.setattr(site.backend, "load", load)
    storage.load(storage.model("m", ALL, v1="ok", v2="ok"))
    with pytest.raises(SupersededError):
        future.result(PATIENCE_S)
    assert storage.phases() == {1: "READY", 2: "READY"}

"""Whatever is asked of the lifecycle in whatever order, over slow and failing storage and backends.

Loads run on threads of their own and stand still, in storage and in the backend, until they are let go on;
so the steps of the machine are mixed with theirs in all the ways that Hypothesis thinks of.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.support.machines import run_machine
from tests.support.remote import RemoteModel
from tests.support.sites import CONFIG, EchoBackend, EchoModel, SiteAnswer
from tests.support.waiting import PATIENCE_S

from conch.core.backend import Backend, BackendInstance, BackendModel
from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.execution.placement import Placement
from conch.core.registry import Entry, Registry
from conch.core.request import InferenceRequest
from conch.core.servable import ClosedError, Servable
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor
from conch_control.control_options import ControlOptions
from conch_control.events import EventLog
from conch_control.lifecycle import draining
from conch_control.lifecycle.load_queue import LoadQueue, SupersededError
from conch_control.lifecycle.model_lifecycle import ModelLifecycle
from conch_control.lifecycle.model_loader import ModelLoader
from conch_control.lifecycle.version_states import FORGOTTEN, StatesSnapshot, VersionStates
from conch_control.version_phase import Phase

WAIT_A_MOMENT_S = 0.005
NAMES = ("a", "b")
ALL = "version_policy { all {} }"
CONFIGS = (CONFIG, CONFIG + ALL, CONFIG + ALL + "instance_group { count: 3 }", CONFIG + "max_batch_size: 2")
OVERRIDE = """{"backend": "echo", "max_batch_size": 4, "input": [{"name": "X", "data_type": "TYPE_UINT8",
"dims": [1]}], "output": [{"name": "X", "data_type": "TYPE_UINT8", "dims": [1]}]}"""

SETTLED = {Phase.READY, Phase.UNLOADED, Phase.FAILED}

names = st.sampled_from(NAMES)


class Doors:
    """Barrier for loads: each passes one for each permit."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._permits = 0
        self._open = False
        self._waiting = 0

    def allow(self, permits: int) -> None:
        """Lets some go on who stand here; those who come later have to wait."""
        with self._changed:
            self._permits = min(permits, self._waiting)
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._open, self._permits = False, 0

    def pass_one(self, path: str = "") -> None:
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._open or self._permits > 0, PATIENCE_S)
            self._waiting -= 1
            if not self._open:
                self._permits -= 1

    def crowd(self, timeout_s: float) -> None:
        """Waits until a load stands here."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting > 0, timeout_s)


class CountedModel(EchoModel):
    """A model of the backend that counts how often it and its instances are closed."""

    def __init__(self, backend: CountedBackend, spec: ModelSpec, behaviour: str) -> None:
        super().__init__(backend, spec, behaviour)
        self._counts = backend.counts
        self._counts["models"] += 1
        self._open = True

    def create_instance(self, placement: Placement) -> BackendInstance:
        made = super().create_instance(placement)
        self._counts["instances"] += 1
        return made

    def close(self) -> None:
        assert self._open, "closed twice"
        self._open = False
        self._counts["closed"] += 1


class CountedBackend(EchoBackend):
    def __init__(self, doors: Doors) -> None:
        super().__init__()
        self.doors = doors
        self.counts: Counter[str] = Counter()

    def load(self, spec: ModelSpec) -> BackendModel:
        self.doors.pass_one()
        behaviour = (spec.version_directory / spec.model_file).read_text()
        if behaviour.startswith("bad"):
            raise ValueError("as the file says")
        self.loaded.append(spec)
        return CountedModel(self, spec, "bad instance" if behaviour.startswith("worse") else "ok")


class Watched(Registry):
    """A registry that notices when a model goes without an unload."""

    def __init__(self) -> None:
        super().__init__()
        self.unloading: threading.Thread | None = None
        self.lost: list[str] = []

    def publish(self, name: str, entry: Entry) -> None:
        self._watch(name, entry.ready)
        super().publish(name, entry)

    def remove(self, name: str) -> None:
        self._watch(name, {})
        super().remove(name)

    def _watch(self, name: str, ready: object) -> None:
        before = self.entries.get(name, Entry()).ready
        if before and not ready and self.unloading is not threading.current_thread():
            self.lost.append(name)


class LifecycleMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.doors = Doors()
        self.storage_doors = Doors()
        self.storage_doors.open()
        self.answer_doors = Doors()
        self.backend = CountedBackend(self.doors)
        self.backend.on_execute = lambda batch: self.answer_doors.pass_one()
        self.registry = Watched()
        self.events = EventLog(lambda: 0.0)
        self.states = VersionStates(self.registry, self.events)
        options = ControlOptions(repositories=(), load_threads=2, load_retries=1)
        loader = ModelLoader(options, self.get_backend, self.registry)
        self.lifecycle = ModelLifecycle(options, self.registry, loader, self.states, LoadQueue(2))
        self.models: dict[str, RemoteModel] = {}
        self.pool = ThreadPoolExecutor(64)
        self.loads: list[Future[None]] = []
        self.answers: list[SiteAnswer] = []
        self.number = 0

    def get_backend(self, name: str, runtime: str = "", directory: Path | None = None, /) -> Backend:
        return self.backend

    @initialize(config=st.sampled_from(CONFIGS))
    def begin(self, config: str) -> None:
        for name in NAMES:
            self.models[name] = RemoteModel(name, self.root, {"config.pbtxt": config, "1/model.echo": "ok"})
            self.models[name].before_file = self.storage_doors.pass_one

    @rule(name=names, version=st.integers(1, 3), kind=st.sampled_from(("ok", "ok", "ok", "bad", "worse")))
    def write(self, name: str, version: int, kind: str) -> None:
        self.number += 1
        files = self.models[name].files
        self.models[name].write({**files, f"{version}/model.echo": f"{kind} {self.number}"})

    @rule(name=names, version=st.integers(1, 3))
    def delete(self, name: str, version: int) -> None:
        files = self.models[name].files
        files.pop(f"{version}/model.echo", None)
        self.models[name].write(files)

    @rule(name=names, config=st.sampled_from((*CONFIGS, *CONFIGS, "broken")))
    def configure(self, name: str, config: str) -> None:
        self.models[name].write({**self.models[name].files, "config.pbtxt": config})

    @rule(name=names, error=st.sampled_from((None, None, OSError("503"))))
    def storage(self, name: str, error: OSError | None) -> None:
        self.models[name].error = error

    @rule(permits=st.sampled_from((None, 0, 1, 2)))
    def slow_storage(self, permits: int | None) -> None:
        self.storage_doors.close()
        if permits is None:
            self.storage_doors.open()
        else:
            self.storage_doors.allow(permits)

    @rule(name=names, override=st.sampled_from((None, None, OVERRIDE)))
    def load(self, name: str, override: str | None) -> None:
        asked = threading.Event()

        def run() -> None:
            with self.lifecycle.queue.call() as ticket:
                asked.set()
                self.lifecycle.load(self.models[name], override, ticket)

        self.loads.append(self.pool.submit(run))
        assert asked.wait(PATIENCE_S)  # so that unloads that follow are newer

    @rule()
    def arrive(self) -> None:
        """Lets loads get to where they stand still, as far as they do within a moment."""
        self.doors.crowd(WAIT_A_MOMENT_S)

    @rule(name=names)
    def refresh(self, name: str) -> None:
        self.loads.append(self.pool.submit(self.lifecycle.refresh, name))

    @rule(name=names)
    def unload(self, name: str) -> None:
        self.registry.unloading = threading.current_thread()
        self.lifecycle.unload(name)  # returns whatever else is going on
        self.registry.unloading = None
        assert not self.registry.entries.get(name, Entry()).ready

    @rule(name=names)
    def send(self, name: str) -> None:
        """Sends a request, which is answered when the machine says so."""
        if not self.registry.entries.get(name, Entry()).ready:
            return
        answer = SiteAnswer()
        request = InferenceRequest(name, "", {}, answer, 0)
        try:
            model = self.registry.resolve(name)
            shape = (1, 1) if model.spec.max_batch_size else (1,)
            request.inputs = {"X": Tensor("X", "UINT8", shape, b"\x07")}
            model.submit(request)
        except ClosedError:
            return  # replaced since; front ends would look again
        self.answers.append(answer)

    @rule()
    def answer(self) -> None:
        self.answer_doors.allow(100)

    @rule(permits=st.integers(1, 3))
    def go_on(self, permits: int) -> None:
        self.doors.crowd(WAIT_A_MOMENT_S)
        self.doors.allow(permits)

    @rule()
    def settle(self) -> None:
        """Lets everything that is under way finish."""
        self.answer_doors.open()
        self.doors.open()
        self.storage_doors.open()
        for load in self.loads:
            load.exception(PATIENCE_S)
        for answer in self.answers:
            assert answer.error() is None
        self.lifecycle.drainer.wait(time.monotonic() + PATIENCE_S)
        for statuses in self.states.snapshot().versions.values():
            assert {status.phase for status in statuses.values()} <= SETTLED
        self.doors.close()
        self.answer_doors.close()

    @invariant()
    def the_index_is_what_the_events_say(self) -> None:
        check_replay(self.states.snapshot(), self.events)

    @invariant()
    def nothing_that_served_is_gone(self) -> None:
        assert self.registry.lost == []

    def teardown(self) -> None:
        self.answer_doors.open()
        self.doors.open()
        self.storage_doors.open()
        self.check_results()
        for answer in self.answers:
            assert answer.error() is None
        for model in self.models.values():
            # Whatever has happened before: what is there now can be loaded.
            model.error = None
            model.write({"config.pbtxt": CONFIG, "1/model.echo": "last"}, touch=True)
            self.lifecycle.load(model)
            ready: dict[int, Servable] = dict(self.registry.entries[model.name].ready)
            assert set(ready) == {1}
            served = ready[1].spec.version_directory / "model.echo"
            assert served.read_text() == "last"
        self.nothing_that_served_is_gone()
        assert self.lifecycle.close(PATIENCE_S)
        self.pool.shutdown()
        snapshot = self.states.snapshot()
        assert {each.phase for said in snapshot.versions.values() for each in said.values()} == {
            Phase.UNLOADED
        }
        check_replay(snapshot, self.events)
        check_registry(snapshot, self.registry)
        counts = self.backend.counts
        assert counts["models"] == counts["closed"]
        assert counts["instances"] == len(self.backend.closed)
        for model in self.models.values():
            assert sorted(model.staged) == sorted(model.released)
        assert self.registry.draining == {}
        shutil.rmtree(self.root)

    def check_results(self) -> None:
        for load in self.loads:
            error = load.exception(PATIENCE_S)
            allowed = (SupersededError, InvalidArgumentError, InternalError)  # a failed poll is the last one
            assert error is None or isinstance(error, allowed), error
            assert "can't become" not in str(error)
            assert "said to be ready" not in str(error)


def check_replay(snapshot: StatesSnapshot, events: EventLog) -> None:
    """The events up to a snapshot's revision are legal, and give the snapshot."""
    versions: dict[str, dict[int, tuple[Phase, str]]] = {}
    failures: dict[str, str] = {}
    for event in events.after(0):
        if event.revision > snapshot.revision:
            break
        if not event.version:
            failures[event.model] = event.reason
            if event.phase is Phase.UNLOADED:
                del failures[event.model]
            continue
        said = versions.setdefault(event.model, {})
        if event.version in said:
            before, _ = said[event.version]
            assert before.may_become(event.phase), (before, event)
        said[event.version] = event.phase, event.reason
    assert failures == snapshot.failures
    assert versions == {
        name: {version: (status.phase, status.reason) for version, status in statuses.items()}
        for name, statuses in snapshot.versions.items()
        if statuses
    }


def check_registry(snapshot: StatesSnapshot, registry: Registry) -> None:
    """Triton's index shows the same, where nothing goes on any more."""
    for name, statuses in snapshot.versions.items():
        shown = {
            version: status.phase.index_state
            for version, status in statuses.items()
            if status.reason != FORGOTTEN
        }
        states = registry.entries.get(name, Entry()).states
        assert shown == {version: state.state for version, state in states.items()}


@pytest.fixture(autouse=True)
def collect_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long in a process with all the test tools, and has tests of its own."""
    monkeypatch.setattr(draining, "release_memory", lambda also_frozen=False: None)


TestLifecycle, TestLifecycleForLong = run_machine(LifecycleMachine, 50)

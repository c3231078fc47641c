"""The planner on real directories, with an agent that only takes notes."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.support.clocks import PausedClock
from tests.support.servers import eventually
from tests.support.waiting import PATIENCE_S

from conch.core.errors import ConchError, InvalidArgumentError, UnavailableError
from conch.core.model_control import LoadParameter
from conch_control.agent_api import Index, ModelStatus, VersionStatus
from conch_control.control_options import ControlOptions, PlannerOptions
from conch_control.events import EventLog
from conch_control.planner import planner_loop as driver_module
from conch_control.planner.plan import LoadOutcome
from conch_control.planner.planner_loop import Planner, outcome_of
from conch_control.planner.snapshot import SnapshotReader
from conch_control.planner.watch_paths import file_system, is_silent, resolve
from conch_control.planner.watcher import Watcher
from conch_control.repository.local import LocalModel, LocalRepository
from conch_control.repository.repositories import Repositories
from conch_control.repository.source import ModelSource
from conch_control.version_phase import Phase

SETTLE_S = 0.25
NEVER_S = 3600.0

watched = pytest.mark.skipif(
    is_silent(file_system(os.path.realpath("/tmp"))), reason="the file system of /tmp tells of no changes"
)


class NotedPort:
    """An agent that takes notes of what it is asked, and of the files that it would have loaded."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self.events = EventLog(lambda: 0.0)
        self.running: dict[str, dict[str, str]] = {}
        self.asked: list[str] = []
        self.errors: dict[str, list[BaseException]] = {}
        self.gates: dict[str, threading.Event] = {}

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        assert not parameters
        self.asked.append(f"load {name}")
        if name in self.gates:
            assert self.gates[name].wait(PATIENCE_S)
        if self.errors.get(name):
            raise self.errors[name].pop(0)
        self.running[name] = contents(self._repository / name)

    def unload(self, name: str, unload_dependents: bool) -> None:
        assert not unload_dependents
        self.asked.append(f"unload {name}")
        self.running.pop(name, None)

    def models(self) -> Index:
        found = [ModelStatus(name, "", (VersionStatus(1, Phase.READY),)) for name in self.running]
        return Index(self.events.epoch, self.events.revision, tuple(found))


def contents(directory: Path) -> dict[str, str]:
    """The files of a model."""
    found = {}
    for place, _, files in os.walk(directory, followlinks=True):
        for name in files:
            path = Path(place, name)
            found[str(path.relative_to(directory))] = path.read_text()
    return found


def write(directory: Path, text: str = "one", version: int = 1) -> Path:
    """Writes a model."""
    (directory / str(version)).mkdir(parents=True, exist_ok=True)
    (directory / "config.pbtxt").write_text('backend: "x"')
    (directory / str(version) / "model").write_text(text)
    return directory


class Place:
    """A repository, its agent, and a planner, whose clock runs while the test waits for what it does."""

    def __init__(self, root: Path) -> None:
        self.clock = PausedClock()
        self.repository = root / "models"
        self.repository.mkdir()
        self.port = NotedPort(self.repository)
        self.sources: list[Any] = []

    @contextmanager
    def planner(self, mode: Literal["poll", "watch"], poll_s: float = NEVER_S) -> Iterator[Planner]:
        repositories = Repositories([LocalRepository(self.repository), *self.sources])
        planner = Planner(self.port, repositories, PlannerOptions(mode, poll_s, SETTLE_S), self.clock)
        planner.remember()
        self.port.running = {path.name: contents(path) for path in self.repository.iterdir() if path.is_dir()}
        planner.start()
        try:
            self.eventually(lambda: planner.has_polled, "the first look has been taken")
            yield planner
        finally:
            for gate in self.port.gates.values():
                gate.set()
            assert planner.stop(PATIENCE_S)

    def eventually(self, condition: Callable[[], Any], what: str) -> None:
        """Waits until a condition holds."""
        with self.clock.running():
            eventually(condition, what)

    def runs(self, name: str, text: str | None, file: str = "1/model") -> None:
        """Waits until a model runs with a file that says something, or does not run."""
        self.eventually(
            lambda: self.port.running.get(name, {}).get(file) == text,
            f"{name} runs {text}, not {self.port.running.get(name)}",
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def swap(link: Path, target: str) -> None:
    """Has a link lead elsewhere, at one stroke."""
    new = link.with_name(f"{link.name}_tmp")
    new.symlink_to(target)
    os.replace(new, link)


# The modes differ in when they look only: what is done once everything is still must be the same.
EVERY = [("poll", 0.05), pytest.param("watch", NEVER_S, marks=[watched, pytest.mark.slow])]


@pytest.mark.parametrize(("mode", "poll_s"), [("poll", 0.05), pytest.param("watch", NEVER_S, marks=watched)])
def test_models_come_change_and_go(place: Place, mode: Literal["poll", "watch"], poll_s: float) -> None:
    write(place.repository / "kept")
    with place.planner(mode, poll_s):
        write(place.repository / "m")
        place.runs("m", "one")
        (place.repository / "m" / "1" / "model").write_text("two")
        place.runs("m", "two")
        write(place.repository / "m", "three", version=2)
        place.runs("m", "three", "2/model")
        shutil.rmtree(place.repository / "m" / "1")
        place.runs("m", None)
        os.utime(place.repository / "m" / "config.pbtxt", (1, 1))
        place.eventually(lambda: place.port.asked.count("load m") == 5, "a touched config is a change")
        shutil.rmtree(place.repository / "m")
        place.eventually(lambda: "m" not in place.port.running, "m is unloaded")
    assert place.port.asked == ["load m"] * 5 + ["unload m"]


@pytest.mark.parametrize(("mode", "poll_s"), EVERY)
def test_a_directory_that_is_renamed_over(
    place: Place, tmp_path: Path, mode: Literal["poll", "watch"], poll_s: float
) -> None:
    write(place.repository / "m")
    with place.planner(mode, poll_s):
        for text in ("two", "three"):
            write(tmp_path / text, text)
            os.rename(place.repository / "m", tmp_path / f"before {text}")
            os.rename(tmp_path / text, place.repository / "m")
            place.runs("m", text)
        (place.repository / "m" / "1" / "model").write_text("four")
        place.runs("m", "four")
    assert place.port.asked == ["load m"] * 3


@pytest.mark.parametrize(("mode", "poll_s"), EVERY)
@pytest.mark.parametrize("outside", [True, False], ids=["outside", "inside"])
def test_links_of_a_kubernetes_volume(
    place: Place, tmp_path: Path, outside: bool, mode: Literal["poll", "watch"], poll_s: float
) -> None:
    """Everything is a link to ``..data``, which leads to a directory with a time in its name."""
    volume = tmp_path / "volume" if outside else place.repository
    volume.mkdir(exist_ok=True)

    def publish(number: int) -> str:
        name = f"..2026_01_0{number}_10_00_00.{number}"
        write(volume / name / "m", f"number {number}")
        return name

    (volume / "..data").symlink_to(publish(1))
    (volume / "m").symlink_to("..data/m")
    if outside:
        (place.repository / "m").symlink_to(volume / "m")
    with place.planner(mode, poll_s):
        for number in (2, 3):
            swap(volume / "..data", publish(number))
            shutil.rmtree(volume / f"..2026_01_0{number - 1}_10_00_00.{number - 1}")
            place.runs("m", f"number {number}")
        (volume / "..data" / "m" / "1" / "model").write_text("written behind the link")
        place.runs("m", "written behind the link")
    assert place.port.asked == ["load m"] * 3


@pytest.mark.parametrize(("mode", "poll_s"), EVERY)
def test_links_to_versions_files_and_repositories(
    place: Place, tmp_path: Path, mode: Literal["poll", "watch"], poll_s: float
) -> None:
    store = tmp_path / "store"
    for number in (1, 2, 3):
        write(store / f"v{number}", f"v{number}")
    write(place.repository / "file", "to be a link")
    (place.repository / "file" / "1" / "model").unlink()
    (place.repository / "file" / "1" / "model").symlink_to("../../../store/v1/1/model")
    write(place.repository / "version", version=2)
    (place.repository / "version" / "1").symlink_to(store / "v1" / "1")
    link = tmp_path / "link"
    link.symlink_to(place.repository)
    place.repository = link
    with place.planner(mode, poll_s):
        swap(place.repository / "file" / "1" / "model", str(store / "v2" / "1" / "model"))
        place.runs("file", "v2")
        (store / "v2" / "1" / "model").write_text("in the store")
        place.runs("file", "in the store")
        swap(place.repository / "version" / "1", str(store / "v3" / "1"))
        place.runs("version", "v3")
        (store / "v3" / "1" / "model").write_text("in the store too")
        place.runs("version", "in the store too")
        # All of it at once, by the link that is the repository.
        shutil.copytree(place.repository, tmp_path / "other", symlinks=True)
        write(tmp_path / "other" / "more", "more")
        shutil.rmtree(tmp_path / "other" / "version")
        place.port._repository = tmp_path / "other"
        swap(link, "other")
        place.runs("more", "more")
        place.eventually(lambda: "version" not in place.port.running, "version is unloaded")
        write(tmp_path / "other" / "more", "still more")
        place.runs("more", "still more")
    assert sorted(place.port.asked) == [
        *["load file"] * 3,
        *["load more"] * 2,
        *["load version"] * 2,
        "unload version",
    ]


@pytest.mark.parametrize(("mode", "poll_s"), EVERY)
def test_a_slow_copy_is_loaded_once_and_whole(
    place: Place, mode: Literal["poll", "watch"], poll_s: float
) -> None:
    with place.planner(mode, poll_s) as planner:
        whole = {"config.pbtxt": 'backend: "x"'}
        directory = place.repository / "m"
        (directory / "1").mkdir(parents=True)
        looks, look = [0], planner.step

        def step() -> int:
            looks[0] += 1
            return look()

        planner.step = step  # type: ignore[method-assign]
        for number in range(8):
            (directory / "1" / f"part {number}").write_text(str(number))
            whole[f"1/part {number}"] = str(number)
            before = looks[0]
            planner.poll()
            eventually(lambda: looks[0] > before, "the part is seen")  # noqa: B023
            place.clock.advance(round(SETTLE_S * 1e9) // 3)
        (directory / "config.pbtxt").write_text('backend: "x"')
        place.eventually(lambda: place.port.running.get("m") == whole, "m is whole")
    assert place.port.asked == ["load m"]


@pytest.mark.parametrize(("mode", "poll_s"), EVERY)
def test_a_marker_holds_a_copy_back_for_as_long_as_it_is_there(
    place: Place, mode: Literal["poll", "watch"], poll_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    directory = place.repository / "m"
    directory.mkdir()
    (directory / ".incomplete").touch()
    with place.planner(mode, poll_s) as planner:
        write(directory)
        place.eventually(lambda: "marked as incomplete" in caplog.text, "it says so")
        write(place.repository / "other")
        place.runs("other", "one")
        planner.poll()
        write(place.repository / "other", "two")
        place.runs("other", "two")
        assert "load m" not in place.port.asked
        (directory / ".incomplete").unlink()
        place.runs("m", "one")
    assert place.port.asked.count("load m") == 1
    assert caplog.text.count("marked as incomplete") == 1


@pytest.mark.parametrize(("mode", "poll_s"), EVERY)
def test_a_load_that_fails_waits_for_new_files(
    place: Place, mode: Literal["poll", "watch"], poll_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    write(place.repository / "m")
    place.port.errors["m"] = [InvalidArgumentError("broken")]
    with place.planner(mode, poll_s) as planner:
        (place.repository / "m" / "1" / "model").write_text("broken")
        place.eventually(
            lambda: "failed to load 'm', what served before goes on: broken" in caplog.text, "it fails"
        )
        planner.poll()
        write(place.repository / "other")
        place.runs("other", "one")
        assert place.port.asked.count("load m") == 1
        assert place.port.running["m"]["1/model"] == "one"
        place.port.errors["new"] = [InvalidArgumentError("broken")]
        write(place.repository / "new")
        place.eventually(
            lambda: "failed to load 'new', no version of it serves: broken" in caplog.text, "it fails"
        )
        (place.repository / "m" / "1" / "model").write_text("mended")
        place.runs("m", "mended")
    assert place.port.asked.count("load m") == 2


@pytest.mark.parametrize(("mode", "poll_s"), EVERY)
def test_pythons_caches_are_no_change(place: Place, mode: Literal["poll", "watch"], poll_s: float) -> None:
    directory = write(place.repository / "m")
    with place.planner(mode, poll_s) as planner:
        (directory / "1" / "__pycache__").mkdir()
        (directory / "1" / "__pycache__" / "model.pyc").write_text("x")
        planner.poll()
        write(place.repository / "other")
        place.runs("other", "one")
    assert place.port.asked == ["load other"]


def test_storage_that_fails_for_a_moment_is_tried_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conch_control.planner.plan.FIRST_RETRY_NS", 10_000_000)
    with place.planner("poll", 0.05):
        place.port.errors["m"] = [UnavailableError("later"), OSError(5, "Input/output error")]
        write(place.repository / "m")
        place.runs("m", "one")
    assert place.port.asked == ["load m"] * 3


def test_a_load_that_takes_long_holds_up_no_other_model(place: Place) -> None:
    place.port.gates["slow"] = threading.Event()
    with place.planner("poll", 0.05):
        write(place.repository / "slow")
        place.eventually(lambda: "load slow" in place.port.asked, "slow is loaded")
        write(place.repository / "quick")
        place.runs("quick", "one")
        for text in ("two", "three"):
            write(place.repository / "slow", text)
            write(place.repository / "quick", text)
            place.runs("quick", text)
        assert place.port.asked.count("load slow") == 1
        place.port.gates["slow"].set()
        place.eventually(lambda: place.port.asked.count("load slow") == 2, "slow is loaded again")
    assert place.port.asked.count("load slow") == 2


class HangingRepository:
    """Storage that does not answer."""

    location = "hang://"

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.go = threading.Event()
        self.armed = False

    def check(self) -> None:
        pass

    def models(self) -> Mapping[str, ModelSource]:
        if self.armed:
            self.asked.set()
            assert self.go.wait(PATIENCE_S)
        return {}


def test_storage_that_hangs_holds_up_no_stop(place: Place) -> None:
    storage = HangingRepository()
    place.sources.append(storage)
    with place.planner("poll", 0.05) as planner:
        storage.armed = True
        place.eventually(storage.asked.is_set, "the storage is asked")
        assert not planner.stop(0.1), "it ends before the storage does"
        storage.go.set()


def test_models_are_kept_while_a_repository_can_not_be_read(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    write(place.repository / "m")
    with place.planner("poll", 0.05):
        away = place.repository.with_name("away")
        place.repository.rename(away)
        place.repository.touch()  # it is no directory now
        write(away / "other")
        place.eventually(lambda: caplog.text.count("failed to read model repository") > 10, "it is looked at")
        assert place.port.asked == []
        place.repository.unlink()
        away.rename(place.repository)
        place.runs("other", "one")
    assert place.port.asked == ["load other"]


@watched
@pytest.mark.parametrize("failing", ["the repository", "the model"])
def test_a_change_is_not_missed_by_a_look_that_fails(
    place: Place, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    write(place.repository / "m")
    failures = [OSError("it hiccups")]

    def fails_once(function: Any) -> Any:
        def call(self: Any) -> Any:
            if armed.is_set() and failures:
                raise failures.pop()
            return function(self)

        return call

    armed = threading.Event()
    kind, method = (LocalRepository, "models") if failing == "the repository" else (LocalModel, "fingerprint")
    monkeypatch.setattr(kind, method, fails_once(getattr(kind, method)))
    with place.planner("watch", 0.1):
        armed.set()
        write(place.repository / "m", "two")
        place.eventually(lambda: place.port.running["m"]["1/model"] == "two", "it is loaded")
    assert failures == []


def test_a_planner_that_does_not_know_what_runs_asks_for_everything(place: Place) -> None:
    write(place.repository / "m")
    place.port.running = {"m": {}, "gone": {}}
    repositories = Repositories([LocalRepository(place.repository)])
    planner = Planner(place.port, repositories, PlannerOptions("poll", 0.05, SETTLE_S), place.clock)
    planner.start()
    try:
        place.runs("m", "one")
        place.eventually(lambda: "gone" not in place.port.running, "what is nowhere is unloaded")
    finally:
        assert planner.stop(PATIENCE_S)
    assert sorted(place.port.asked) == ["load m", "unload gone"]


def test_what_others_do_holds_until_the_files_change(place: Place) -> None:
    write(place.repository / "m")
    with place.planner("poll", 0.05):
        del place.port.running["m"]
        place.port.events.append("m", 1, Phase.DRAINING)
        place.port.events.append("m", 1, Phase.UNLOADED, "unloaded")
        place.port.events.append("theirs", 1, Phase.READY)
        write(place.repository / "other")
        place.runs("other", "one")
        assert place.port.asked == ["load other"]
        write(place.repository / "m", "two")
        place.runs("m", "two")
    assert place.port.asked == ["load other", "load m"]


def test_an_agent_that_was_started_anew_is_asked_for_everything(place: Place) -> None:
    write(place.repository / "m")
    with place.planner("poll", 0.05):
        place.port.running = {}
        place.port.events = EventLog(lambda: 0.0)
        place.runs("m", "one")
    assert place.port.asked == ["load m"]


def test_failures_of_the_start_that_may_pass_are_tried_again(place: Place) -> None:
    write(place.repository / "m")
    write(place.repository / "broken")
    repositories = Repositories([LocalRepository(place.repository)])
    planner = Planner(place.port, repositories, PlannerOptions("poll", 0.05, SETTLE_S), place.clock)
    planner.remember()
    planner.start({"m": UnavailableError("503"), "broken": InvalidArgumentError("broken")})
    try:
        place.runs("m", "one")
    finally:
        assert planner.stop(PATIENCE_S)
    assert place.port.asked == ["load m"]


def test_a_model_in_two_repositories_is_unloaded_until_it_is_in_one(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    second = tmp_path / "second"
    second.mkdir()
    place.sources.append(LocalRepository(second))
    write(place.repository / "m")
    with place.planner("poll", 0.05):
        write(second / "m", "two")
        place.eventually(lambda: "m" not in place.port.running, "it is unloaded")
        assert place.port.asked == ["unload m"]
        write(place.repository / "other")
        place.runs("other", "one")
        assert caplog.text.count("'m': not unique across all model repositories") == 1
        shutil.rmtree(second / "m")
        place.runs("m", "one")
    assert place.port.asked == ["unload m", "load other", "load m"]


@watched
def test_watching_nothing_happen_does_nothing(place: Place) -> None:
    for number in range(20):
        write(place.repository / f"m{number}")
    turns: list[int] = []
    with place.planner("watch") as planner:
        turn = planner.step
        planner.step = lambda: (turns.append(1), turn())[1]  # type: ignore[method-assign, func-returns-value]
        before = time.process_time()
        with place.clock.running():
            threading.Event().wait(0.5)
        assert turns == []
        assert time.process_time() - before < 0.1


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "overlay"])
def test_where_no_events_can_be_had_it_polls(
    place: Place, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        driver_module, "Watcher", lambda locations, notify: Watcher(locations, notify, lambda path: kind)
    )
    write(place.repository / "m")
    with place.planner("watch", 0.05):
        for text in ("two", "three"):
            write(place.repository / "m", text)
            place.runs("m", text)
    assert (
        caplog.text.count(
            f"can't be watched, it is polled: '{place.repository}' is on a file system ({kind})"
        )
        == 1
    )


@pytest.mark.parametrize("limit", [0, 3])
def test_where_the_kernel_watches_no_more_it_polls(
    place: Place, limit: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from watchdog.observers.inotify_c import InotifyFD

    add = InotifyFD.add_callback
    added: list[object] = []

    def add_callback(self: Any, *arguments: Any) -> Any:
        added.append(arguments)
        if len(added) > limit:
            raise OSError(28, "inotify watch limit reached")
        return add(self, *arguments)

    monkeypatch.setattr(InotifyFD, "add_callback", add_callback)
    write(place.repository / "m")
    write(place.repository / "n")
    with place.planner("watch", 0.05):
        for text in ("two", "three"):
            write(place.repository / "m", text)
            place.runs("m", text)
    assert caplog.text.count("polled: the limit fs.inotify.max_user_watches of this machine is reached") == 1


def test_without_more_readers_it_polls(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from watchdog.observers.inotify_c import InotifyFD

    def refuse(self: Any) -> None:
        raise OSError(24, "inotify instance limit reached")

    monkeypatch.setattr(InotifyFD, "__init__", refuse)
    with place.planner("watch", 0.05):
        write(place.repository / "m")
        place.runs("m", "one")
    assert caplog.text.count("polled: the limit fs.inotify.max_user_instances") == 1


@watched
def test_a_repository_that_comes_back_is_watched_again(place: Place, tmp_path: Path) -> None:
    write(place.repository / "m")
    with place.planner("watch", 0.2):
        place.repository.rename(tmp_path / "away")
        place.eventually(lambda: not place.repository.exists(), "it is away")
        write(tmp_path / "new" / "m", "two")
        (tmp_path / "new").rename(place.repository)
        place.runs("m", "two")
        write(place.repository / "m", "three")
        place.runs("m", "three")
    assert place.port.asked == ["load m"] * 2


@watched
def test_lost_events_are_made_up_for(place: Place) -> None:
    write(place.repository / "m")
    with place.planner("watch") as planner:
        watcher = planner.watcher
        assert watcher is not None
        assert watcher.directories is not None
        on_event, watcher.directories.on_change = watcher.directories.on_change, lambda identity, name: None
        write(place.repository / "m", "two", version=2)
        write(place.repository / "new")
        watcher.directories.on_change = on_event
        watcher.directories.on_overflow()
        place.runs("m", "two", "2/model")
        place.runs("new", "one")
        write(place.repository / "m", "three", version=2)
        place.runs("m", "three", "2/model")


def test_many_models_are_looked_at_without_reading_them(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(500):
        write(place.repository / f"m{number}")
    reads: list[str] = []

    def read_composing_models(*given: object) -> tuple[str, ...]:
        reads.append("x")
        return ()

    monkeypatch.setattr("conch_control.planner.snapshot.read_composing_models", read_composing_models)
    reader = SnapshotReader(
        Repositories([LocalRepository(place.repository)]), ControlOptions(()), lambda source: None
    )
    first = reader.poll(None, lambda: False)
    assert len(first.models) == len(reads) == 500
    before = time.process_time()
    second = reader.poll(None, lambda: False)
    assert time.process_time() - before < 1
    assert second == first
    assert len(reads) == 500


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UnavailableError("x"), LoadOutcome.TRANSIENT),
        (TimeoutError("x"), LoadOutcome.TRANSIENT),
        (FileNotFoundError("x"), LoadOutcome.FAILED),
        (InvalidArgumentError("x"), LoadOutcome.FAILED),
        (ValueError("x"), LoadOutcome.FAILED),
        (
            ConchError(
                "Newer operation has been applied to the model lifecycle, "
                "current load operation is out-dated."
            ),
            LoadOutcome.DONE,
        ),
    ],
)
def test_what_errors_say_of_another_try(error: BaseException, outcome: LoadOutcome) -> None:
    assert outcome_of(error) is outcome


def test_an_error_of_the_storage_behind_another_error_may_pass() -> None:
    error = ConchError("failed to load")
    error.__cause__ = OSError(5, "Input/output error")
    assert outcome_of(error) is LoadOutcome.TRANSIENT


MOUNTS = r"""
/dev/vda / ext4 rw 0 0
server:/x /models nfs4 rw 0 0
/dev/vdb /models/local ext4 rw 0 0
overlay /with\040space overlay rw 0 0
/dev/vdc /twice ext4 rw 0 0
sshfs#x /twice fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind", "silent"),
    [
        ("/", "ext4", False),
        ("/modelsx", "ext4", False),
        ("/models", "nfs4", True),
        ("/models/m/1", "nfs4", True),
        ("/models/local/m", "ext4", False),
        ("/with space/m", "overlay", True),
        ("/twice", "fuse.sshfs", True),
    ],
)
def test_the_type_of_a_file_system(path: str, kind: str, silent: bool) -> None:
    assert file_system(path, MOUNTS) == kind
    assert is_silent(kind) == silent


def test_paths_are_followed_through_links(tmp_path: Path) -> None:
    root = os.path.realpath(tmp_path)
    (tmp_path / "real" / "m").mkdir(parents=True)
    (tmp_path / "data").symlink_to("real")
    (tmp_path / "m").symlink_to(tmp_path / "data" / "m")
    found = resolve(f"{root}/real/../m")
    assert found.path == f"{root}/real/m"
    assert found.hinges == ((root, "m"), (root, "data"))
    (tmp_path / "away").symlink_to("nowhere/m")
    assert resolve(f"{root}/away").hinges == ((root, "away"), (root, "nowhere"))
    (tmp_path / "round").symlink_to("round")
    assert resolve(f"{root}/round").hinges[0] == (root, "round")


@watched
def test_links_that_lead_nowhere_or_round_in_circles(place: Place, tmp_path: Path) -> None:
    (place.repository / "m").symlink_to(tmp_path / "later" / "m")
    (place.repository / "round").symlink_to("round")
    (tmp_path / "later").mkdir()
    with place.planner("watch"):
        write(tmp_path / "made" / "m")
        (tmp_path / "made" / "m").rename(tmp_path / "later" / "m")
        place.runs("m", "one")
        (tmp_path / "later" / "m" / "1" / "model").write_text("two")
        place.runs("m", "two")
    assert place.port.asked == ["load m"] * 2

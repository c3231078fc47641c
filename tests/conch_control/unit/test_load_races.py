"""Races of the control plane's parts: one of them acts while another one is at work."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.conch_control.unit.test_ensemble_dependencies import chain, send
from tests.support.remote import RemoteModel
from tests.support.servers import eventually
from tests.support.waiting import PATIENCE_S

from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch.protocol import model_control_pb2 as pb
from conch_control.control_options import PlannerOptions
from conch_control.planner.plan import LoadOutcome, Operation
from conch_control.planner.planner_loop import Planner, outcome_of
from conch_control.remote_api.watch_stream import Watch
from conch_control.repository.local import LocalRepository
from conch_control.repository.repositories import Repositories
from conch_control.repository.repository_kinds import open_repository
from conch_control.repository.source import ModelSource
from conch_control.version_phase import Phase
from conch_stores.cache import ModelCache
from conch_stores.connection import Connection, StoreTimeouts
from conch_stores.credentials import CredentialReader
from conch_stores.locations import Location, parse_location
from conch_stores.objects import ObjectRepository
from conch_stores.stager import Stager
from conch_stores.stores import StoredObject, contents_of

if TYPE_CHECKING:
    from tests.support.sites import Site


class Store:
    """A repository elsewhere that may not answer; a `Repository`.

    Attributes:
        found: Its models.
        error: Error that it answers with instead.
    """

    location = "remote://bucket"

    def __init__(self) -> None:
        self.found: dict[str, ModelSource] = {}
        self.error: Exception | None = None

    def check(self) -> None:
        """It is there."""

    def models(self) -> Mapping[str, ModelSource]:
        if self.error is not None:
            raise self.error
        return self.found

    def close(self) -> None:
        """It holds nothing."""


def with_store(site: Site, monkeypatch: pytest.MonkeyPatch, store: Store, mode: str = "explicit") -> Any:
    """An agent with a store besides the repository."""
    monkeypatch.setattr(
        "conch_control.repository.repositories.open_repository",
        lambda location, *rest: store if location == store.location else open_repository(location, *rest),
    )
    return site.agent(mode, repositories=(site.repository, store.location))


def test_a_model_of_a_store_that_does_not_answer_may_be_had_later(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    agent = with_store(site, monkeypatch, store)
    store.error = OSError("503 slow down")
    with pytest.raises(InternalError) as caught:
        agent.load("m", {})
    assert caught.value.message == "failed to load 'm', failed to poll from model repository"
    assert "503 slow down" in caught.value.reason  # type: ignore[attr-defined]
    assert outcome_of(caught.value) is LoadOutcome.TRANSIENT, "it is not known to be gone"
    store.error = None
    with pytest.raises(InternalError) as caught:
        agent.load("m", {})
    assert outcome_of(caught.value) is LoadOutcome.FAILED


def test_credentials_that_become_wrong_harm_no_other_repository(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.model("m")
    store = Store()
    agent = with_store(site, monkeypatch, store)
    store.error = InvalidArgumentError("TRITON_CLOUD_CREDENTIAL_PATH: 'c.json' is not JSON")
    agent.load("m", {})
    assert [line.name for line in agent.index(False)] == ["m"]
    assert [model.name for model in agent.models().models] == ["m"]


def test_an_ensemble_that_could_not_come_back_comes_when_its_part_fits_again(site: Site) -> None:
    site.model("m")
    site.model("e", config=chain("m"))
    agent = site.agent()
    agent.load("e", {})
    agent.unload("m", False)
    site.model("m", config=site.config().replace("dims: 1", "dims: 2"))
    agent.load("m", {})
    assert site.serving("e") == {}
    site.model("m", config=site.config())
    agent.load("m", {})
    assert send(site) == b"\x07"


def test_an_ensemble_does_not_serve_without_a_part_that_was_unloaded_while_it_was_loaded(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.model("m")
    site.model("e", config=chain("m"))
    agent = site.agent()
    agent.load("m", {})
    build = agent.lifecycle.builder.build

    def made(operation: Any, *rest: Any) -> Any:
        result = build(operation, *rest)
        if operation.name == "e":
            thread = threading.Thread(target=agent.unload, args=("m", False))
            thread.start()
            thread.join(PATIENCE_S)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(agent.lifecycle.builder, "build", made)
        with pytest.raises(ConchError):
            agent.load("e", {})
    assert site.serving("e") == {}
    agent.load("m", {})
    assert send(site) == b"\x07", "it was asked for"


def test_an_ensemble_does_not_serve_without_a_part_if_its_load_ends_while_the_part_is_unloaded(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.model("m")
    site.model("e", config=chain("m"))
    agent = site.agent()
    agent.load("m", {})
    unload = agent.lifecycle.unload

    def unloaded(name: str, *rest: Any, **more: Any) -> None:
        if name == "m":
            agent.load("e", {})
        unload(name, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(agent.lifecycle, "unload", unloaded)
        agent.unload("m", False)
    assert site.serving("e") == {}
    agent.load("m", {})
    assert send(site) == b"\x07", "it was asked for"


def test_a_swap_never_looks_as_if_nothing_served(site: Site) -> None:
    site.model("m")
    agent = site.agent()
    agent.load("m", {})
    before = agent.events.revision
    site.model("m", {2: "ok"})
    agent.load("m", {})
    swap = [
        (event.version, event.phase)
        for event in agent.events.after(before)
        if event.phase in (Phase.READY, Phase.DRAINING)
    ]
    assert swap == [(2, Phase.READY), (1, Phase.DRAINING)]


def test_a_model_that_could_not_be_fetched_is_not_remembered_once_it_is_gone(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    agent = with_store(site, monkeypatch, store)
    model = RemoteModel("r", tmp_path / "cache", {"config.pbtxt": "nonsense"})

    def fail(path: str) -> None:
        raise OSError("cut off")

    model.before_file = fail
    store.found = {"r": model}
    with pytest.raises(ConchError):
        agent.load("r", {})
    agent.unload("r", False)
    store.found = {}
    names = [status.name for status in agent.models().models if not status.versions]
    assert names == []


def test_what_a_client_asks_for_during_a_start_is_not_missed_at_the_start(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.model("m", {1: "slowly"})
    site.model("broken", config="nonsense")
    agent = site.agent(startup_models=("m",))
    thread = threading.Thread(target=agent.start)
    thread.start()
    assert site.backend.loading.acquire(timeout=PATIENCE_S)
    with pytest.raises(ConchError):
        agent.load("broken", {})
    site.backend.gate.set()
    thread.join(PATIENCE_S)
    assert agent.ready()


def test_markers_have_no_version_loaded_anew(site: Site) -> None:
    directory = site.model("m", {1: "ok"}, site.config("version_policy { all {} }"))
    (directory / ".complete").touch()
    agent = site.agent()
    agent.load("m", {})
    (directory / ".complete").unlink()
    site.model("m", {2: "ok"}, None)
    (directory / ".complete").touch()
    agent.load("m", {})
    assert site.loads() == ["m:1", "m:2"]


def test_a_model_twice_at_the_start_is_forgotten_when_both_are_gone(site: Site, tmp_path: Path) -> None:
    second = tmp_path / "second"
    for repository in (site.repository, second):
        site.model("m", repository=repository)
    agent = site.agent("poll", repositories=(site.repository, second))
    planner = Planner(agent, agent.repositories, PlannerOptions("poll", 0.02, 0.0))
    planner.remember()
    failures = agent.start()
    planner.start({failure.name: failure.error for failure in failures})
    try:
        assert [model.name for model in agent.models().models] == ["m"]
        for repository in (site.repository, second):
            shutil.rmtree(repository / "m")
        eventually(lambda: not agent.models().models, "it is forgotten", 5.0)
        assert agent.ready()
    finally:
        assert planner.stop(PATIENCE_S)


def test_a_planner_that_has_been_stopped_begins_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.model("m", {1: "ok"})
    agent = site.agent("poll")
    planner = Planner(agent, agent.repositories, PlannerOptions("poll", 0.02, 0.0))
    assert planner.stop(0.0)
    planner.start_operations([Operation("load", "m")])
    assert planner.stop(PATIENCE_S)
    assert site.loads() == []


def test_a_repository_whose_file_system_has_gone_has_not_lost_its_models(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs two file systems")
    mounted = Path(tempfile.mkdtemp(dir=other))
    try:
        (mounted / "m").mkdir()
        unmounted = tmp_path / "empty"
        unmounted.mkdir()
        link = tmp_path / "models"
        link.symlink_to(mounted)
        repositories = Repositories([LocalRepository(link)])
        assert repositories.scan().models.keys() == {"m"}
        link.unlink()
        link.symlink_to(unmounted)
        assert repositories.scan().unreadable.keys() == {str(link)}
        (unmounted / "n").mkdir()
        assert repositories.scan().models.keys() == {"n"}
        (unmounted / "n").rmdir()
        scan = repositories.scan()
        assert (scan.models, scan.unreadable) == ({}, {}), "somebody has removed it"
    finally:
        shutil.rmtree(mounted)


class SlowListing:
    """A store whose listings take some seconds of a clock that the test has; a `Store`."""

    def __init__(self, takes_s: float) -> None:
        self.now = 0.0
        self.listed: list[str] = []
        self._takes_s = takes_s

    async def list(self, prefix: str) -> list[StoredObject]:
        self.listed.append(prefix)
        self.now += self._takes_s
        return [StoredObject(f"m{number}/config.pbtxt", 0, "etag", 0) for number in range(3)]

    def call(self, operation: Callable[[Any], Awaitable[Any]], try_s: float | None = None) -> Any:
        return asyncio.run(operation(self))  # type: ignore[arg-type]


def test_one_listing_serves_all_models_however_long_it_took(tmp_path: Path) -> None:
    store = SlowListing(30.0)
    store.location = "s3://b"  # type: ignore[attr-defined]
    repository = ObjectRepository(
        cast("Connection[Any, Any]", store), ModelCache(tmp_path / "cache"), lambda: store.now
    )
    for model in repository.models().values():
        model.fingerprint()
    assert store.listed == [""]


def test_a_store_that_is_closed_from_two_sides(caplog: pytest.LogCaptureFixture) -> None:
    closing, go = threading.Event(), threading.Event()

    class Closing:
        async def list(self, prefix: str) -> list[StoredObject]:
            return []

        async def close(self) -> None:
            closing.set()
            await asyncio.to_thread(go.wait, PATIENCE_S)

    async def opened(*_: Any) -> Any:
        return Closing()

    location = parse_location("s3://b/p")
    assert isinstance(location, Location)
    connection = Connection(location, opened, CredentialReader({}), StoreTimeouts())

    async def listed(store: Any) -> Any:
        return await store.list("")

    assert connection.call(listed) == []
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(connection.close)
        assert closing.wait(PATIENCE_S)
        second = pool.submit(connection.close)
        done, _ = wait([first, second], 0.2)
        go.set()
        first.result(PATIENCE_S)
        second.result(PATIENCE_S)
    assert not done, "each returns when it is closed"


def test_a_closed_cache_stays_closed(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    cache.open()
    cache.close()
    with pytest.raises(OSError, match="closed"):
        cache.open()
    assert list((tmp_path / "owners").iterdir()) == []


def test_how_far_staging_is_asks_no_storage(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    agent = with_store(site, monkeypatch, store)
    model = RemoteModel("r", tmp_path / "cache", {"config.pbtxt": site.config(), "1/model.echo": "ok"})
    begun, go = threading.Event(), threading.Event()

    def hold(path: str) -> None:
        begun.set()
        assert go.wait(PATIENCE_S)

    model.before_file = hold
    store.found = {"r": model}
    request = pb.WatchRequest(models=["r"], progress_interval_ms=100)
    messages = iter(Watch(agent, request, lambda: False))
    next(messages)
    thread = threading.Thread(target=agent.load, args=("r", {}))
    thread.start()
    try:
        assert begun.wait(PATIENCE_S)
        store.error = OSError("it hangs")
        told = next(message for message in messages if message.progress)
        (status,) = told.progress
        assert (status.name, status.location) == ("r", "remote://bucket/r")
        assert status.versions[0].staging_bytes > 0
    finally:
        go.set()
        thread.join(PATIENCE_S)


def test_a_fetch_that_is_given_up_before_it_begins_is_not_waited_for(tmp_path: Path) -> None:
    """As when the repository is closed just then."""

    class Closed:
        location = parse_location("s3://b")

        def start(self, work: Any) -> Future[None]:
            future: Future[None] = Future()
            future.cancel()
            return future

    item = StoredObject("m/1/x", 1, "etag", 0)
    stager = Stager(cast("Connection[Any, Any]", Closed()), cache := ModelCache(tmp_path))
    end = time.monotonic() + PATIENCE_S
    try:
        with pytest.raises(OSError, match="closed"):
            stager.stage(
                "m", lambda: contents_of("m", [item]), lambda *_: None, lambda: time.monotonic() > end
            )
    finally:
        cache.close()


def test_a_rollout_that_starts_during_a_load_keeps_its_stable_version(site: Site) -> None:
    site.model("m")
    agent = site.agent()
    agent.load("m", {})
    stable = site.serving("m")[1]
    site.model("m", {2: "slowly"}, None)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(agent.load, "m", {})  # of the newest version, in place of the stable one
        assert site.backend.loading.acquire(timeout=PATIENCE_S)
        declaration = {"labels": {"stable": 1}, "rollout": {"candidate": 2, "steps": ["1% 1h"]}}
        assert agent.start_rollout("m", declaration, False).state == "LOADING"
        site.backend.gate.set()
        load.result(PATIENCE_S)
    assert eventually(lambda: agent.rollout("m").state == "STEP", "the rollout begins")
    assert (site.serving("m")[1], site.loads()) == (stable, ["m:1", "m:2"])

"""Where the parts of the control plane meet: what one of them does while another one is at it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.remote import RemoteModel
from tests.unit.control.test_composition import chain, send

from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch_control.planner.driver import outcome_of
from conch_control.planner.plan import Outcome
from conch_control.repository.source import ModelSource
from conch_control.states import Phase
from conch_control.storage import open_repository

if TYPE_CHECKING:
    from tests.unit.control.conftest import Site

WAIT_S = 20.0


class Store:
    """A repository elsewhere that may not answer; a `Repository`.

    Attributes:
        found: Its models.
        error: What it answers with instead.
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
        "conch_control.agent.open_repository",
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
    assert outcome_of(caught.value) is Outcome.TRANSIENT, "it is not known to be gone"
    store.error = None
    with pytest.raises(InternalError) as caught:
        agent.load("m", {})
    assert outcome_of(caught.value) is Outcome.FAILED


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
    make = agent._lifecycle._maker.make

    def made(operation: Any, *rest: Any) -> Any:
        result = make(operation, *rest)
        if operation.name == "e":
            thread = threading.Thread(target=agent.unload, args=("m", False))
            thread.start()
            thread.join(WAIT_S)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(agent._lifecycle._maker, "make", made)
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
    unload = agent._lifecycle.unload

    def unloaded(name: str, *rest: Any, **more: Any) -> None:
        if name == "m":
            agent.load("e", {})
        unload(name, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(agent._lifecycle, "unload", unloaded)
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
    assert site.backend.loading.acquire(timeout=WAIT_S)
    with pytest.raises(ConchError):
        agent.load("broken", {})
    site.backend.gate.set()
    thread.join(WAIT_S)
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

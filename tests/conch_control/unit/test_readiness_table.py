"""Answers to probes in each state: the table of docs/operations.md, line by line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest
from tests.support.core import make_model, make_spec
from tests.support.sites import Site

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.registry import Entry, VersionState
from conch.core.server_state import ServerState
from conch_control.lifecycle.access_policy import GuardedAgent
from conch_control.lifecycle.agent import Agent

DOCUMENT = Path(__file__).parents[3] / "docs" / "operations.md"
READY = VersionState("READY")
LOADING = VersionState("LOADING")
FAILED = VersionState("UNAVAILABLE", "Internal: boom")
UNLOADING = VersionState("UNLOADING")
UNLOADED = VersionState("UNAVAILABLE", "unloaded")


class Never:
    """A check of a model that says no."""

    def start(self) -> None:
        pass

    def result(self) -> bool:
        return False


class Situation:
    """A server to be brought into some state; the model in question is `m`, and `other` is ready."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.agent: Agent = site.agent("none")
        self.cores: list[ServerState] = []
        for strict in (True, False):
            gate = GuardedAgent(self.agent, "none")
            core = ServerState(site.registry, gate, "id", "1.0", self.agent.ready, strict)
            self.cores.append(core)
        self.models = [make_model(make_spec(name="other")), make_model(make_spec(name="m"))]
        self.show("other", {1: READY})

    def show(self, name: str, states: dict[int, VersionState]) -> None:
        """Publishes versions of a model in some states."""
        model = self.models[0 if name == "other" else 1]
        ready = {version: model for version, state in states.items() if state is READY}
        self.site.registry.publish(name, Entry(ready, states))

    def serve(self, *states: VersionState) -> None:
        """Has the server run, with versions of the model in some states."""
        for core in self.cores:
            core.started()
        self.show("m", dict(enumerate(states, 1)))

    def start(self) -> None:
        """Starts with what is in the repository."""
        for core in self.cores:
            core.started()
        self.agent.start()


def starting(at: Situation) -> None:
    at.show("m", {1: LOADING})


def starting_loaded(at: Situation) -> None:
    at.show("other", {1: LOADING})
    at.show("m", {1: READY})


def failed_at_start(at: Situation) -> None:
    at.site.model("m", {1: "crash boom"})
    at.start()


def broken_at_start(at: Situation) -> None:
    at.site.model("m", config="max_batch: 1")
    at.start()


def empty_at_start(at: Situation) -> None:
    at.site.model("m", {}, config=None)
    at.start()


def versionless_at_start(at: Situation) -> None:
    at.site.model("m", {})
    at.start()


def versionless_later(at: Situation) -> None:
    at.start()
    at.site.model("m", {})
    with pytest.raises(InvalidArgumentError, match="at least one version"):
        at.agent.load("m", {})


def versionless_unloaded(at: Situation) -> None:
    versionless_later(at)
    at.agent.unload("m", False)


def without_repository(at: Situation) -> None:
    for core in at.cores:
        core.failed()


def broken_later(at: Situation) -> None:
    at.start()
    at.site.model("m", config="max_batch: 1")
    with pytest.raises(Exception, match="failed to poll"):
        at.agent.load("m", {})


def not_ready_itself(at: Situation) -> None:
    at.serve(READY)
    at.site.registry.publish("m", Entry({1: Checked(at.models[1])}, {1: READY}))  # type: ignore[dict-item]


class Checked:
    """A model with a check that says no."""

    readiness = (Never(),)

    def __init__(self, model: object) -> None:
        self._model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def draining(at: Situation) -> None:
    at.serve(READY)
    for core in at.cores:
        assert core.drain()
        assert not core.drain(), "it is already"
        core.started()  # there is no way back


def stopping(at: Situation) -> None:
    at.serve(READY)
    for core in at.cores:
        core.stopping()
        core.drain()  # there is no way back


SITUATIONS: MappingProxyType[str, Callable[[Situation], None]] = MappingProxyType(
    {
        "the models of the start are being loaded": starting,
        "another model of the start is loaded already": starting_loaded,
        "all models are ready": lambda at: at.serve(READY),
        "a model of the start could not be loaded, the server runs": failed_at_start,
        "the config of a model of the start is broken, the server runs": broken_at_start,
        "a model of the start has neither config nor files, the server runs": empty_at_start,
        "a model of the start has no version directory, the server runs": versionless_at_start,
        "a repository could not be read at the start, the server runs": without_repository,
        "a model is loaded for the first time": lambda at: at.serve(LOADING),
        "a model could not be loaded": lambda at: at.serve(FAILED),
        "a model was to be loaded whose config is broken": broken_later,
        "a model was to be loaded that has no version directory": versionless_later,
        "the same version is loaded anew while the old one serves": lambda at: at.serve(READY),
        "another version is loaded while the old one serves": lambda at: at.serve(READY, LOADING),
        "the same version could not be loaded anew, the old one serves": lambda at: at.serve(READY),
        "another version could not be loaded, the old one serves": lambda at: at.serve(READY, FAILED),
        "a new version serves, the old one finishes its requests": lambda at: at.serve(UNLOADING, READY),
        "a model was unloaded, it finishes its requests": lambda at: at.serve(UNLOADING),
        "a model was unloaded": lambda at: at.serve(UNLOADED),
        "a model that had failed was unloaded": lambda at: at.serve(UNLOADED),
        "a model without a version directory was unloaded": versionless_unloaded,
        "a model says that it is not ready": not_ready_itself,
        "the server is draining": draining,
        "the server is stopping": stopping,
    }
)


def table() -> dict[str, list[str]]:
    """The lines of the table: state, and the answers to probes."""
    _, section = DOCUMENT.read_text().split("\n## Readiness\n")
    lines = re.findall(r"^\| (.*?)(?: \(.*?\))? \| (yes|no|error) \|(.*)\|$", section, re.MULTILINE)
    return {state: [live, *(cell.strip() for cell in rest.split("|")[:3])] for state, live, rest in lines}


TABLE = table()


def test_the_table_has_every_state() -> None:
    assert TABLE.keys() == SITUATIONS.keys()


@pytest.mark.parametrize("state", TABLE)
def test_state(state: str, site: Site) -> None:
    at = Situation(site)
    SITUATIONS[state](at)
    strict, lax = at.cores
    answers = [
        told(lambda: strict.live),
        told(lambda: strict.ready),
        told(lambda: lax.ready),
        told(lambda: strict.model_ready("m", "")),
    ]
    assert answers == TABLE[state]
    assert told(lambda: lax.live) == answers[0]
    assert told(lambda: lax.model_ready("m", "")) == answers[3]
    # The health service and the metrics port have no errors.
    assert strict.alive == (answers[0] == "yes")
    assert [core.serving for core in at.cores] == [answer == "yes" for answer in answers[1:3]]
    for model in at.models:
        model.close()


def told(ask: Callable[[], bool]) -> str:
    """A probe's answer as the table writes it."""
    try:
        return "yes" if ask() else "no"
    except UnavailableError as error:
        assert error.message in ("Server exiting", "Server not ready")
        return "error"

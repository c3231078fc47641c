"""The agent of another process, over real sockets, also when that process is started again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.support.agents import FakeAgent
from tests.support.control_ports import served
from tests.support.servers import WAIT_S, eventually

from conch.core.errors import NotFoundError, OutOfRangeError
from conch_control.agent_api import AgentApi
from conch_control.remote_api.client import After, ModelControlClient, WatchCall
from conch_control.remote_api.connection_options import ConnectionOptions, ControlPortOptions
from conch_control.remote_api.messages import UnreachableError
from conch_control.remote_api.remote_agent import RemoteAgent
from conch_control.version_phase import Phase


@pytest.fixture
def options(tmp_path: Path) -> ControlPortOptions:
    return ControlPortOptions(f"unix:{tmp_path}/control.sock", 0)


@contextmanager
def connected(options: ControlPortOptions) -> Iterator[RemoteAgent]:
    client = ModelControlClient(ConnectionOptions(options.target), timeout_s=WAIT_S)
    with closing(RemoteAgent(client)) as remote:
        remote.start()
        yield remote


def lost(remote: RemoteAgent, revision: int) -> bool:
    """True if the reader has to look at the index again."""
    try:
        remote.events.after(revision)
    except OutOfRangeError:
        return True
    return False


def test_it_is_the_agent(options: ControlPortOptions) -> None:
    agent = FakeAgent()
    with served(agent, options), connected(options) as remote:
        port: AgentApi = remote
        port.load("m", {"config": "{}", "file:1/x": b"x"})
        port.unload("m", False)
        port.drain()
        assert agent.loads == [("m", {"config": "{}", "file:1/x": b"x"})]
        assert (agent.unloads, agent.drains) == ([("m", False)], 1)
        assert port.models() == agent.models()
        assert port.describe("m") == agent.describe("m")
        with pytest.raises(NotFoundError, match="unknown model: 'x'"):
            port.describe("x")


def test_events_have_the_numbers_of_the_server(options: ControlPortOptions) -> None:
    agent = FakeAgent()
    agent.set("before", Phase.READY)
    with served(agent, options), connected(options) as remote:
        eventually(lambda: remote.events.epoch, "it is connected")
        index = remote.models()
        assert (index.epoch, index.revision) == (agent.events.epoch, 1)
        revision = index.revision
        for _ in range(20):
            agent.set("m", Phase.LOADING)
            while revision < agent.events.revision:
                found = remote.events.after(revision, WAIT_S)
                assert found and found == agent.events.after(revision)
                revision = found[-1].revision
        assert remote.events.epoch == agent.events.epoch


def test_an_index_that_is_read_before_the_watch_has_begun(options: ControlPortOptions) -> None:
    """Events between the index and the watch are not lost."""
    agent = FakeAgent()
    client = ModelControlClient(ConnectionOptions(options.target), timeout_s=WAIT_S)
    with served(agent, options), closing(RemoteAgent(client)) as remote:
        watch = client.watch
        asked: list[int] = []

        def late(after: After | None = None) -> WatchCall:
            if not asked:
                revision = remote.models().revision
                agent.set("m", Phase.READY)
                asked.append(revision)
            return watch(after)

        client.watch = late  # type: ignore[method-assign, assignment]
        remote.start()
        (revision,) = eventually(lambda: asked, "the index is read")
        assert [event.revision for event in remote.events.after(revision, WAIT_S)] == [1]


def test_a_server_that_is_away_for_a_while(options: ControlPortOptions) -> None:
    """As the same life of it: the port is closed and opened again. Nothing is lost."""
    agent = FakeAgent()
    with connected(options) as remote:
        with served(agent, options):
            eventually(lambda: remote.events.epoch, "it is connected")
            revision = remote.models().revision
            agent.set("m", Phase.LOADING)
            assert [event.revision for event in remote.events.after(revision, WAIT_S)] == [1]
        with pytest.raises(UnreachableError, match="can't be reached"):
            remote.models()
        agent.set("m", Phase.READY)
        with served(agent, options):
            (event,) = remote.events.after(1, WAIT_S)
            assert (event.revision, event.phase) == (2, Phase.READY)


def test_a_server_that_is_started_again(options: ControlPortOptions) -> None:
    with connected(options) as remote:
        with served(FakeAgent(), options):
            eventually(lambda: remote.events.epoch, "it is connected")
            revision = remote.models().revision
        agent = FakeAgent()
        with served(agent, options):
            eventually(lambda: lost(remote, revision), "the reader is told")
            index = remote.models()
            assert (index.epoch, remote.events.epoch) == (agent.events.epoch, agent.events.epoch)
            agent.set("m", Phase.READY)
            (event,) = remote.events.after(index.revision, WAIT_S)
            assert (event.revision, event.model) == (1, "m")


def test_events_that_were_dropped_while_it_was_away(options: ControlPortOptions) -> None:
    agent = FakeAgent(kept=2)
    with connected(options) as remote:
        with served(agent, options):
            eventually(lambda: remote.events.epoch, "it is connected")
            revision = remote.models().revision
        for _ in range(5):
            agent.set("m", Phase.LOADING)
        with served(agent, options):
            eventually(lambda: lost(remote, revision), "the reader is told")
            revision = remote.models().revision
            agent.set("m", Phase.READY)
            assert [event.revision for event in remote.events.after(revision, WAIT_S)] == [6]


def test_a_server_that_comes_later(options: ControlPortOptions) -> None:
    with connected(options) as remote:
        with pytest.raises(UnreachableError):
            remote.models()
        agent = FakeAgent()
        agent.set("m", Phase.READY)
        with served(agent, options):
            eventually(lambda: remote.events.epoch == agent.events.epoch, "it is connected")
            assert remote.models() == agent.models()


def test_closing_ends_waiting(options: ControlPortOptions) -> None:
    with served(FakeAgent(), options), connected(options) as remote:
        eventually(lambda: remote.events.epoch, "it is connected")
        remote.close()
        assert remote.events.after(0, None) == []


def test_closing_one_that_was_never_started(options: ControlPortOptions) -> None:
    RemoteAgent(ModelControlClient(ConnectionOptions(options.target))).close()

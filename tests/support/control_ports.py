"""Control ports in front of an agent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from tests.support.agents import FakeAgent
from tests.support.servers import WAIT_S

from conch_control.agent_api import AgentApi
from conch_control.remote_api.client import ModelControlClient
from conch_control.remote_api.connection_options import ClientTls, ConnectionOptions, ControlPortOptions
from conch_control.remote_api.server import ControlPort


@contextmanager
def served(
    agent: AgentApi, options: ControlPortOptions | None = None, **limits: Any
) -> Iterator[tuple[ControlPort, str]]:
    """A control port in front of an agent, and its target."""
    options = options or ControlPortOptions(port=0)
    port = ControlPort(agent, options, **limits)
    number = port.start()
    try:
        yield port, options.target if options.is_unix else f"127.0.0.1:{number}"
    finally:
        if isinstance(agent, FakeAgent):
            agent.release.set()
        assert port.stop(WAIT_S)


@contextmanager
def connected(
    target: str, tls: ClientTls | None = None, token: str | None = None
) -> Iterator[ModelControlClient]:
    with closing(ModelControlClient(ConnectionOptions(target, tls, token), timeout_s=WAIT_S)) as client:
        yield client

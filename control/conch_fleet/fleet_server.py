"""One server of a fleet: follows what it shows and runs steps on it.

Whatever happens (an event, the end of a step, a lost connection), the thread reads the server's index anew
and reports it with the steps that have ended before. So reports of one server are in order.
Threads: `conch-fleet-<server>` follows; each step has its own, as in the planner. Locks: `_lock` guards the
ended steps.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from conch.core.errors import ConchError, OutOfRangeError, without_details
from conch_control.agent_api import Index, ModelStatus
from conch_control.remote_api.remote_agent import FIRST_WAIT_S, LONGEST_WAIT_S, RemoteAgent
from conch_control.version_phase import Phase
from conch_fleet.fleet_state import Ended, RollStep, Sight

log = logging.getLogger(__name__)

_RECHECK_S = 60.0
"""Longest time between two looks at a server that sends its events."""


class Observer(Protocol):
    """Gets the reports of a server."""

    def on_seen(self, server: str, sight: Sight, ended: list[Ended]) -> None:
        """The server was reached."""

    def on_lost(self, server: str, reason: str, ended: list[Ended]) -> None:
        """The server can't be reached, or refuses us."""

    def before_load(self, server: str, model: str) -> None:
        """The server is about to load a model. Raises ConchError: it has to wait."""


class FleetMember:
    """Follows one server; closes its agent."""

    def __init__(self, agent: RemoteAgent, observer: Observer) -> None:
        self._agent = agent
        self._observer = observer
        self._lock = threading.Lock()
        self._ended: list[Ended] = []
        self._woken = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"conch-fleet-{self.address}", daemon=True)
        agent.on_change = self._wake

    @property
    def address(self) -> str:
        """Address of the server's control port."""
        return self._agent.target

    def start(self) -> None:
        """Starts following."""
        self._agent.start()
        self._thread.start()

    def close(self) -> None:
        """Stops following and ends all calls."""
        self._closed.set()
        self._wake()
        self._agent.close()
        if self._thread.ident is not None:
            self._thread.join()

    def run(self, step: RollStep) -> None:
        """Starts a step; its end is reported."""
        threading.Thread(
            target=self._work,
            args=(step,),
            name=f"conch-{step.kind}-{step.model}-{self.address}",
            daemon=True,
        ).start()

    def _work(self, step: RollStep) -> None:
        error: BaseException | None = None
        try:
            if step.kind == "load":
                self._observer.before_load(self.address, step.model)
                self._agent.load(step.model, {})
            else:
                self._agent.unload(step.model, False)
        except BaseException as raised:  # boundary: the top of the thread; the error ends the step
            if not isinstance(raised, ConchError):
                log.exception("server %s could not %s model '%s'", self.address, step.kind, step.model)
            error = raised
        with self._lock:
            self._ended.append((step, error))
        self._wake()

    def _wake(self) -> None:
        self._woken.set()
        self._agent.events.wake()

    def _follow(self) -> None:
        wait_s = FIRST_WAIT_S
        while not self._closed.is_set():
            self._woken.clear()
            with self._lock:
                ended, self._ended = self._ended, []
            try:
                index = self._agent.models()
            except Exception as error:  # boundary: the top of the thread, which must go on
                if self._closed.is_set():
                    return
                if not isinstance(error, ConchError):
                    log.exception("server %s could not be looked at", self.address)
                shown = without_details(error, "it could not be looked at")
                self._observer.on_lost(self.address, shown.message, ended)
                self._woken.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                continue
            self._observer.on_seen(self.address, sight_of(index), ended)
            if self._agent.connected:
                wait_s = FIRST_WAIT_S
            self._wait_for_changes(index.revision, _RECHECK_S if self._agent.connected else wait_s)
            if not self._agent.connected:
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _wait_for_changes(self, revision: int, timeout_s: float) -> None:
        try:
            self._agent.events.after(revision, timeout_s, self._woken.is_set)
        except OutOfRangeError:
            pass  # the next index has what was missed


def sight_of(index: Index) -> Sight:
    """State of a server from its index."""
    serving = {model.name: _bytes(model) for model in index.models if _is_served(model)}
    # In modes other than on-demand a model that was never loaded has no reason.
    catalogue = frozenset(model.name for model in index.models if model.versions or model.reason)
    return Sight(index.epoch, serving, index.draining, catalogue)


def _is_served(model: ModelStatus) -> bool:
    return any(version.phase is Phase.READY for version in model.versions)


def _bytes(model: ModelStatus) -> int | None:
    measured = [
        version.host_bytes
        for version in model.versions
        if version.phase is Phase.READY and version.host_bytes is not None
    ]
    return sum(measured) if measured else None

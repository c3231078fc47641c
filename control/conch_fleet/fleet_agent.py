"""Several servers as one agent: a load returns when the model has been rolled to its servers.

Owns: the state of the roll, the rollouts, and an event log that says which models the fleet serves. Threads:
`conch-fleet` lets time pass; the members report on theirs; planner threads and those of calls wait in `load`
and `unload`. Locks: `_changed` guards all but the rollouts, which have their own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conch.core.clock import Clock, monotonic_ns, wall_seconds
from conch.core.errors import (
    ConchError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from conch.core.model_control import LoadParameter
from conch.core.rollouts import RolloutReport, RolloutTransition
from conch_control.agent_api import Index, ModelDescription, ModelStatus, VersionStatus
from conch_control.control_options import ControlOptions
from conch_control.events import EventLog
from conch_control.managed_rollouts import ManagedBy, ManagedReport
from conch_control.remote_api.messages import UnreachableError
from conch_control.remote_api.remote_agent import RemoteAgent
from conch_control.repository.dependency_graph import read_composing_models
from conch_control.repository.repositories import Repositories
from conch_control.repository.source import ModelSource
from conch_control.version_phase import Phase
from conch_fleet.fleet_rollouts import FleetRollouts
from conch_fleet.fleet_server import FleetMember
from conch_fleet.fleet_state import Ended, RollStep, Sight
from conch_fleet.placement_file import PlacementRules
from conch_fleet.roll import Roll

log = logging.getLogger(__name__)

_S = 1_000_000_000
_FIRST_REPORTS_S = 5.0
"""Longest wait of the first index for servers that do not answer, in seconds."""
_VERSION = 1
"""In the fleet's events and index a model has one version, which stands for all copies."""


class Fleet:
    """Implements `AgentApi` for several servers; closes their agents.

    Args:
        agents: The servers, as `rules.servers`.
        repositories: Those of the servers.
        lost_s: Seconds until the models of a lost server are placed elsewhere.
        lease_s: Seconds that a server sends requests to a candidate without hearing of it.
        state_directory: Keeps the progress of rollouts; None to go on from what the servers show.

    Raises:
        InvalidArgumentError: The state directory can't be used.
    """

    def __init__(
        self,
        agents: Sequence[RemoteAgent],
        rules: PlacementRules,
        repositories: Repositories,
        lost_s: float,
        lease_s: float,
        state_directory: Path | None = None,
        clock: Clock = monotonic_ns,
    ) -> None:
        self._rules = rules
        self._repositories = repositories
        self._clock = clock
        self._changed = threading.Condition()
        self._roll = Roll(rules, round(lost_s * _S), clock())
        self._members = {agent.target: FleetMember(agent, self) for agent in agents}
        self._unreported = set(self._members)
        self._stopped = False
        self._events = EventLog(wall_seconds)
        self._agents = {agent.target: agent for agent in agents}
        self.rollout_control = FleetRollouts(agents, self, lease_s, state_directory, clock)
        self._thread = threading.Thread(target=self._pass_time, name="conch-fleet", daemon=True)

    @property
    def events(self) -> EventLog:
        """Events of the models that the fleet serves; a new log if a server began with models of its own."""
        return self._events

    def start(self) -> None:
        """Starts to follow the servers."""
        self.rollout_control.start()
        self._thread.start()
        for member in self._members.values():
            member.start()

    def stop(self) -> None:
        """Starts no more steps, and ends the waiting of loads and unloads."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self.rollout_control.stop()
        self._events.wake()

    def close(self) -> None:
        """Stops following the servers; loads that run there go on."""
        self.stop()
        for member in self._members.values():
            member.close()
        self.rollout_control.close()
        if self._thread.ident is not None:
            self._thread.join()

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Rolls a model out: each of its servers loads it, one after the other.

        Raises:
            ConchError: A server could not load it, or no server can have it.
        """
        if parameters:
            raise InvalidArgumentError("a fleet loads models as they are in their repositories")
        self._refuse_residency(name)
        source = self.source(name)
        parts = () if source is None else read_composing_models(source, ControlOptions(()))
        self.rollout_control.declare(name)
        with self._changed:
            self._act(self._roll.want(name, parts, self._clock()))
            self._wait(lambda: self._roll.load_result(name))

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Unloads a model from all servers, and ends its rollout."""
        self._refuse_residency(name)
        self.rollout_control.drop(name)
        with self._changed:
            self._act(self._roll.drop(name, self._clock()))
            self._wait(lambda: self._roll.unload_result(name))

    def models(self) -> Index:
        """The models that the servers serve.

        Raises:
            UnreachableError: No server can be reached.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._unreported or self._stopped, _FIRST_REPORTS_S)
            if not self._roll.reached:
                raise UnreachableError(f"none of the servers can be reached: {', '.join(self._members)}")
            statuses = [
                ModelStatus(
                    name,
                    "",
                    (VersionStatus(_VERSION, Phase.READY),),
                    labels=self.rollout_control.labels(name),
                    rollout=self.rollout_control.summary(name),
                )
                for name in sorted(self._roll.serving)
            ]
            return Index(self._events.epoch, self._events.revision, tuple(statuses))

    def progress(self, names: Collection[str]) -> Sequence[ModelStatus]:
        """Nothing: servers tell of their staging themselves."""
        return ()

    def describe(self, name: str) -> ModelDescription:
        """As the first server that serves a model describes it.

        Raises:
            NotFoundError: No server that can be reached serves it.
        """
        with self._changed:
            servers = self._roll.serving.get(name, [])
        if not servers:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        return self._agents[servers[0]].describe(name)

    def drain(self) -> None:
        """Refused: servers are drained one by one."""
        raise UnsupportedError("a fleet can't be drained; drain its servers at their control ports")

    @property
    def draining(self) -> bool:
        """True once `conch control` stops."""
        return self._stopped

    def set_label(self, name: str, label: str, version: int | None) -> None:
        """Has a label of a model name a version that its servers serve; None removes it."""
        self._refuse_residency(name)
        self.rollout_control.set_label(name, label, version)

    def rollout(self, name: str) -> RolloutReport:
        """A model's labels and rollout. Raises NotFoundError: it has neither."""
        return self.rollout_control.rollout(name)

    def rollouts(self) -> list[RolloutReport]:
        """Labels and rollouts of all models that have some, by name."""
        return self.rollout_control.rollouts()

    def start_rollout(self, name: str, declaration: Mapping[str, Any], again: bool) -> RolloutReport:
        """Declares and starts a rollout on all servers of a model."""
        self._refuse_residency(name)
        return self.rollout_control.start_rollout(name, declaration, again)

    def update_rollout(self, name: str, action: str, weight: float | None = None) -> RolloutReport:
        """Changes a rollout on all servers."""
        return self.rollout_control.update_rollout(name, action, weight)

    def manage_rollout(
        self, name: str, declaration: Mapping[str, Any], managed_by: ManagedBy
    ) -> ManagedReport:
        """Refused: this process manages the rollouts of its servers."""
        raise UnsupportedError("conch control manages the rollouts of its servers itself")

    def source(self, model: str) -> ModelSource | None:
        """A model in the repositories as they are now."""
        return self._repositories.list_available().source(model)

    def rollout_changed(self, model: str, transition: RolloutTransition) -> None:
        """Appends an event about a rollout, which changes no version."""
        self._events.append(model, 0, Phase.UNLOADED, rollout=transition)

    def _refuse_residency(self, name: str) -> None:
        if not self._rules.loads(name):
            raise FailedPreconditionError(
                f"model '{name}' has residency = true in --placement: its servers load it for its requests, "
                f"and have rollouts of their own; ask one of them"
            )

    def before_load(self, server: str, model: str) -> None:
        """Tells a server of a model's rollout. Raises ConchError: it can't be told."""
        self.rollout_control.deliver(server, model)

    def on_seen(self, server: str, sight: Sight, ended: list[Ended]) -> None:
        """Records what a server has and which steps have ended, and goes on."""
        with self._changed:
            self._unreported.discard(server)
            self._act(self._roll.seen(server, sight, ended, self._clock()))
        self.rollout_control.seen(server)

    def on_lost(self, server: str, reason: str, ended: list[Ended]) -> None:
        """Records that a server can't be reached, and goes on without it."""
        with self._changed:
            self._unreported.discard(server)
            self._act(self._roll.lost(server, reason, ended, self._clock()))
        self.rollout_control.seen(server)

    def _act(self, steps: Iterable[RollStep]) -> None:
        """Carries out what the roll has decided; the lock is held."""
        roll = self._roll
        for note in roll.notes:
            log.log(note.level, "%s", note.text)
        roll.notes.clear()
        if roll.strangers:
            roll.strangers = False
            self._events.close()
            self._events = EventLog(wall_seconds)  # the planner looks at everything anew
        for change in roll.changes:
            phase = Phase.READY if change.serves else Phase.UNLOADED
            self._events.append(change.model, _VERSION, phase)
        roll.changes.clear()
        for step in steps:
            if not self._stopped:
                log.info("server %s: %s model '%s'", step.server, _DOING[step.kind], step.model)
                self._members[step.server].run(step)
        self._changed.notify_all()

    def _wait(self, result: Callable[[], ConchError | bool]) -> None:
        found: ConchError | bool = False

        def ended() -> bool:
            nonlocal found
            found = result()
            return found is not False or self._stopped

        self._changed.wait_for(ended)
        if isinstance(found, ConchError):
            raise found
        if not found:
            raise UnavailableError("conch control stops; the roll goes on when it is started again")

    def _pass_time(self) -> None:
        with self._changed:
            while not self._stopped:
                now = self._clock()
                at = self._roll.wake_at(now)
                self._changed.wait(None if at is None else (at - now) / _S)
                if at is not None and self._clock() >= at:
                    self._act(self._roll.tick(self._clock()))


_DOING = {"load": "loading", "unload": "unloading"}

"""Rollouts of a fleet: one plan for each model, whose progress all servers follow.

`RolloutLoop` runs the plans as a server does; here it acts on a fleet. What a plan publishes and selects is
told to the servers with `manage_rollout`, in which they get its progress, and what they answer makes the
states of versions and the counters (`FleetView`).

Threads: `conch-rollout` decides; `conch-fleet-courier-<server>` tells a server what has changed, repeats it
within the lease, and reads its counters. Loads of a model tell its server first, on their own threads.
Locks: `_changed` guards views and what is to be told; a courier's lock keeps the calls to its server in
order.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from conch.core.clock import Clock, monotonic_ns, wall_seconds
from conch.core.errors import ConchError, FailedPreconditionError, NotFoundError, UnavailableError
from conch.core.rollouts import RolloutReport, RolloutTransition
from conch_control.events import EventLog
from conch_control.managed_rollouts import Counts, ManagedBy
from conch_control.remote_api.messages import UnreachableError
from conch_control.remote_api.remote_agent import RemoteAgent
from conch_control.repository.source import ModelSource
from conch_control.version_phase import Phase
from conch_fleet.fleet_view import FleetView, ServerAnswer, resumed
from conch_rollout.declared_files import VersionDigests, read_declaration
from conch_rollout.rollout_calls import RolloutCalls, check_own_label, transition_of
from conch_rollout.rollout_file import WHOLE, Declaration, Rollout, as_json
from conch_rollout.rollout_loop import RolloutLoop
from conch_rollout.rollout_state import Progress, Select, State, Traffic, Transition, VersionSight
from conch_rollout.state_file import SavedRollout, StateDirectory, decoded, encoded

log = logging.getLogger(__name__)

STATE_DIRECTORY = "rollouts"
_S = 1_000_000_000
_LOOK_S = 5.0
_LEAST_LOOK_S = 0.25
_LOOKS_IN_STEP = 8
_RENEWALS_IN_LEASE = 4
_RETRY_S = 1.0
_STOP_S = 5.0
_WATCHED = frozenset({State.STEP, State.PAUSED, State.BAKING})


class FleetModels(Protocol):
    """The fleet's models as rollouts see them."""

    def source(self, model: str) -> ModelSource | None:
        """A model in the repositories as they are now."""

    def rollout_changed(self, model: str, transition: RolloutTransition) -> None:
        """Shows a transition to operators."""


@dataclass(frozen=True, slots=True)
class _Directive:
    """Rollout of a model on one server; `saved` has the declaration only if a call has made it."""

    declaration: Declaration
    saved: SavedRollout
    files: str


@dataclass
class _Managed:
    """A model with a declaration or versions that are held out, as its plan has it now."""

    declaration: Declaration
    from_file: bool
    progress: Progress


@dataclass
class _Courier:
    """Calls to one server.

    Attributes:
        told: Rollout sent to the server for each model, and its time; None if only known to be managed.
        woken: The server has changed: its answers are of interest.
        retry_at: Time of the next try after a failure.
        refusals: Reasons of the server's refusals, by model, as logged.
    """

    agent: RemoteAgent
    lock: threading.Lock = field(default_factory=threading.Lock)
    told: dict[str, tuple[_Directive, int] | None] = field(default_factory=dict)
    woken: bool = False
    retry_at: int = 0
    refusals: dict[str, str] = field(default_factory=dict)


class FleetRollouts(RolloutCalls):
    """Implements `CanaryServer`, `Counters` and `RolloutControl` for several servers.

    Args:
        agents: The servers, in their order.
        lease_s: A server that hears nothing for so many seconds sends the candidate no requests.
        state_directory: Keeps progress; None to go on from what the servers show.
    """

    def __init__(
        self,
        agents: Sequence[RemoteAgent],
        models: FleetModels,
        lease_s: float,
        state_directory: Path | None,
        clock: Clock = monotonic_ns,
    ) -> None:
        self._fleet = models
        self._lease_s = lease_s
        self._clock = clock
        self._manager = f"conch control on {socket.gethostname()}"
        self._changed = threading.Condition()
        self._couriers = {agent.target: _Courier(agent) for agent in agents}
        self._views: dict[str, FleetView] = {}
        self._managed: dict[str, _Managed] = {}
        self._labelled: dict[str, Mapping[str, int]] = {}  # labels of repositories
        self._labels: dict[str, Mapping[str, int]] = {}  # those that plans publish
        self._declared: set[str] = set()  # so that their absence has a meaning
        self._stopped = False
        self.events = EventLog(wall_seconds)  # wakes the loop
        directory = None if state_directory is None else StateDirectory(state_directory / STATE_DIRECTORY)
        self.loop = RolloutLoop(self, self, directory, clock)
        self._threads = [
            threading.Thread(
                target=self._deliver_all, args=(server,), name=f"conch-fleet-courier-{server}", daemon=True
            )
            for server in self._couriers
        ]

    def start(self) -> None:
        """Goes on from what the state directory and the servers show, then follows the servers."""
        shown: dict[str, list[SavedRollout]] = {}
        for server, courier in self._couriers.items():
            for report in self._reports(courier):
                courier.told[report.model] = None
                try:
                    _, saved = decoded(json.loads(report.managed_state))
                except ValueError as error:
                    log.warning(
                        "server %s: the rollout of '%s' is unreadable: %s", server, report.model, error
                    )
                    continue
                shown.setdefault(report.model, []).append(saved)
        kept = self.loop.saved
        self.loop.adopt(
            {
                model: found
                for model, saved in shown.items()
                if (found := resumed(kept.get(model), saved)) is not None
            }
        )
        for model, saved in list(self.loop.saved.items()):
            if saved.declaration is not None:
                try:
                    self._take_files(model)
                except ConchError as error:
                    log.warning("the rollout of '%s' goes on without its files: %s", model, error.message)
        self.loop.restore()
        for model in list(self.loop.models):
            self._declared.add(model)
            self._direct(model)
        for thread in self._threads:
            thread.start()

    def _reports(self, courier: _Courier) -> Iterable[RolloutReport]:
        try:
            return [each for each in courier.agent.rollouts() if each.managed_by and each.managed_state]
        except ConchError as error:
            log.info("server %s: its rollouts can't be read: %s", courier.agent.target, error.message)
            return ()

    def stop(self) -> None:
        """Tells the servers nothing more; they keep their rollouts, within the lease."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the threads, once the agents' calls have ended."""
        self.stop()
        self.loop.stop(_STOP_S)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self.events.close()

    # --- the fleet's threads

    def declare(self, model: str) -> None:
        """Follows the files of a model, before its servers load it.

        Raises:
            InvalidArgumentError: Its rollout.toml is wrong.
            UnavailableError: It can't be read.
        """
        self.loop.declare(model, self._take_files(model))
        with self._changed:
            self._declared.add(model)
        self._direct(model)

    def drop(self, model: str) -> None:
        """Ends the rollout of a model that was removed."""
        try:
            self.loop.end(model, "the model is gone")
            self.loop.declare(model, Declaration(), by_call=not self.loop.status(model).from_file)
        except NotFoundError:
            pass  # it has none
        with self._changed:
            self._declared.add(model)
            for known in (self._managed, self._views, self._labelled, self._labels):
                known.pop(model, None)
            self._changed.notify_all()

    def deliver(self, server: str, model: str) -> None:
        """Tells a server what holds for a model that it is about to load.

        Raises:
            ConchError: It can't be told, so that the load has to wait.
        """
        self._tell(server, model, self._couriers[server], False)

    def seen(self, server: str) -> None:
        """Something has happened on a server."""
        with self._changed:
            self._couriers[server].woken = True
            self._changed.notify_all()

    def _take_files(self, model: str) -> Declaration:
        """Reads the files of a model as they are now, and its declaration."""
        source = self._fleet.source(model)
        if source is None:
            return Declaration()
        try:
            state = source.fingerprint()
            labels, declaration = read_declaration(source, state)
        except OSError as error:
            raise UnavailableError(f"{source.location} can't be read: {error}") from error
        files = VersionDigests.of(state)
        with self._changed:
            self._labelled[model] = labels
            view = self._views.setdefault(model, FleetView(tuple(self._couriers)))
            view.files = files.name
            view.digests = {version: files.digest(version) for version in files.versions}
        return declaration

    # --- the loop: CanaryServer

    def versions(self, model: str, stable: int | None) -> Mapping[int, VersionSight] | None:
        """See `CanaryServer.versions`."""
        progress = self.loop.progress(model)
        with self._changed:
            view = self._views.get(model)
            return None if view is None or progress is None else view.sights(progress)

    def publish(self, model: str, traffic: Traffic | None, rollout: Rollout | None) -> None:
        """See `CanaryServer.publish`; the servers make their routes of the progress."""
        self._follow(model)

    def publish_labels(self, model: str, labels: Mapping[str, int]) -> None:
        """See `CanaryServer.publish_labels`."""
        with self._changed:
            self._labels[model] = labels
        self._follow(model)

    def select(self, model: str, selection: Select) -> None:
        """See `CanaryServer.select`."""
        self._follow(model)

    def changed(self, model: str, transition: Transition) -> None:
        """See `CanaryServer.changed`; of a pause the servers get nothing but the progress."""
        self._follow(model)
        self._fleet.rollout_changed(model, transition_of(transition))

    def _follow(self, model: str) -> None:
        """Has the servers told what the plan has decided; on the loop's thread."""
        found = self.loop.declared(model)
        self._manage(model, None if found is None else _Managed(*found))

    def _direct(self, model: str) -> None:
        """As `_follow`, on another thread."""
        try:
            status = self.loop.status(model)
        except NotFoundError:
            self._follow(model)
            return
        self._manage(model, _Managed(status.declaration, status.from_file, status.progress))

    def _manage(self, model: str, managed: _Managed | None) -> None:
        with self._changed:
            if managed is None or (managed.declaration == Declaration() and managed.progress.is_over):
                self._managed.pop(model, None)
            else:
                self._managed[model] = managed
            self._changed.notify_all()

    # --- the loop: Counters

    def requests(self, model: str, version: int) -> Counts:
        """See `Counters.requests`."""
        with self._changed:
            return self._views[model].total(version).counts if model in self._views else Counts()

    def shadows(self, model: str, version: int) -> Counts:
        """See `Counters.shadows`."""
        with self._changed:
            return self._views[model].total(version).shadows if model in self._views else Counts()

    def pairs(self, model: str, version: int) -> tuple[int, int]:
        """See `Counters.pairs`."""
        with self._changed:
            return self._views[model].total(version).pairs if model in self._views else (0, 0)

    # --- calls: RolloutCalls

    def start_rollout(self, name: str, declaration: Mapping[str, Any], again: bool) -> RolloutReport:
        """See `RolloutControl.start_rollout`."""
        try:
            return super().start_rollout(name, declaration, again)
        finally:
            if name in self._declared:
                self._direct(name)

    def set_label(self, name: str, label: str, version: int | None) -> None:
        """Has a label of a model name a version, once its servers serve it, or removes it with None.

        Raises:
            InvalidArgumentError: The label is malformed, or has a meaning of its own.
            FailedPreconditionError: A file declares the labels of this model.
            NotFoundError: There is no such model, version or, where it is to be removed, label.
        """
        check_own_label(label)
        self._identifier(name)
        self.declare(name)
        if self._labelled.get(name):
            self._refuse_labels(name)
        with self._changed:
            versions = self._views[name].digests if name in self._views else {}
        if version is not None and version not in versions:
            raise NotFoundError(f"model '{name}' has no version {version} in its repository")
        self._edit_label(name, name, label, version)
        self._direct(name)

    def labels(self, model: str) -> Mapping[str, int]:
        """The labels that a model's servers have, once they serve its versions."""
        with self._changed:
            return self._labels.get(model) or self._labelled.get(model, {})

    def _identifier(self, name: str) -> str:
        if name not in self.loop.models and self._fleet.source(name) is None:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        return name

    def _declare_again(self, identifier: str) -> None:
        self.declare(identifier)
        with self._changed:
            if identifier in self._managed or identifier not in self._views:
                return
            # Servers answer only for what is managed, and the plan begins with what they serve.
            self._managed[identifier] = _Managed(Declaration(), False, Progress())
        for server, courier in self._couriers.items():
            self._try(server, courier, identifier)

    def _with_labels(self, identifier: str, declared: Declaration) -> Declaration:
        named = self._labelled.get(identifier)
        if named and declared.labels:
            self._refuse_labels(identifier)
        return replace(declared, labels=named) if named else declared

    def _refuse_labels(self, model: str) -> None:
        raise FailedPreconditionError(f"labels of '{model}': its repository has them; change them there")

    def _traffic(self, model: str, version: int) -> float:
        progress = self.loop.progress(model)
        if progress is None:
            return 0.0
        weight = progress.weight if version == progress.candidate else WHOLE - progress.weight
        return weight * 100 / WHOLE

    # --- couriers

    def _deliver_all(self, server: str) -> None:
        courier = self._couriers[server]
        while True:
            with self._changed:
                if self._stopped:
                    return
                due = self._due(server, courier)
                if not due:
                    self._changed.wait(self._wait_s(courier))
                    continue
                courier.woken = False
            for model in due:
                if self._stopped or not self._try(server, courier, model):
                    break

    def _try(self, server: str, courier: _Courier, model: str) -> bool:
        """Tells a server of a model; returns False if the server can't be reached."""
        try:
            self._tell(server, model, courier, True)
            courier.refusals.pop(model, None)
        except Exception as error:  # boundary: the top of the thread, which must go on
            if self._stopped:
                return False  # the agent is closed
            refused = isinstance(error, ConchError) and not isinstance(error, UnreachableError)
            if not isinstance(error, ConchError):
                log.exception("server %s could not be sent its rollouts", server)
            elif refused and courier.refusals.get(model) != error.message:
                log.warning("server %s: the rollout of '%s': %s", server, model, error.message)
                courier.refusals[model] = error.message
            self._fail(server, courier, model if refused else None)
            return refused
        return True

    def _fail(self, server: str, courier: _Courier, model: str | None = None) -> None:
        """Takes a server as out of reach, for one model or all, and tries again soon."""
        with self._changed:
            courier.retry_at = self._clock() + round(_RETRY_S * _S)
            if model is None:
                courier.woken = True
            elif model in courier.told:
                courier.told[model] = None
            lost = [each for each, view in self._views.items() if model in (None, each) and view.lost(server)]
            self._changed.notify_all()
        for each in lost:
            self.events.append(each, 0, Phase.UNLOADED)

    def _due(self, server: str, courier: _Courier) -> list[str]:
        """Models whose directive a server has to get now."""
        now = self._clock()
        if now < courier.retry_at:
            return []
        due = [model for model in self._managed if self._is_due(server, model, courier, now)]
        gone = (model for model in courier.told if model not in self._managed)
        return due + [model for model in gone if model in self._declared]

    def _is_due(self, server: str, model: str, courier: _Courier, now: int) -> bool:
        told = courier.told.get(model)
        if told is None or courier.woken or now >= told[1] + self._interval_ns(model):
            return True
        return told[0] != self._directive(server, model)

    def _wait_s(self, courier: _Courier) -> float | None:
        now = self._clock()
        if now < courier.retry_at:
            return (courier.retry_at - now) / _S
        ends = [
            told[1] + self._interval_ns(model)
            for model, told in courier.told.items()
            if told is not None and model in self._managed
        ]
        return None if not ends else max((min(ends) - now) / _S, 0.0)

    def _interval_ns(self, model: str) -> int:
        """Longest time between two calls about a model."""
        managed = self._managed[model]
        seconds = self._lease_s / _RENEWALS_IN_LEASE
        if managed.progress.state in _WATCHED:
            steps = () if managed.declaration.rollout is None else managed.declaration.rollout.steps
            looks = (each.least_ns / _S / _LOOKS_IN_STEP for each in steps)
            seconds = min(seconds, max(min([_LOOK_S, *looks]), _LEAST_LOOK_S))
        return round(seconds * _S)

    def _directive(self, server: str, model: str) -> _Directive | None:
        managed, view = self._managed.get(model), self._views.get(model)
        if managed is None or view is None:
            return None
        declaration = managed.declaration
        by_call = None if managed.from_file else declaration
        return _Directive(declaration, SavedRollout(view.told(server, managed.progress), by_call), view.files)

    def _tell(self, server: str, model: str, courier: _Courier, release: bool) -> None:
        """Tells a server what holds for a model, and takes its answer; raises ConchError."""
        with courier.lock:
            with self._changed:
                directive = self._directive(server, model)
            if directive is None:
                if release and model in courier.told:
                    self._release(courier, model)
                return
            report = courier.agent.manage_rollout(
                model,
                as_json(directive.declaration),
                ManagedBy(self._manager, encoded(model, directive.saved), self._lease_s, directive.files),
            )
            with self._changed:
                courier.told[model] = directive, self._clock()
                view = self._views.get(model)
                news = view is not None and view.answered(server, ServerAnswer.of(report, directive.files))
                if news:
                    self._changed.notify_all()
        if news:
            self.events.append(model, 0, Phase.UNLOADED)

    def _release(self, courier: _Courier, model: str) -> None:
        try:
            courier.agent.update_rollout(model, "delete")
        except NotFoundError:
            pass  # it has been started again
        with self._changed:
            courier.told.pop(model, None)

"""Drives the plan: polls repositories when due and starts the resulting operations on the agent.

Threads: `conch-planner` polls and decides, and may hang with the storage; each operation has its own
thread, `conch-load-<model>` or `conch-unload-<model>`. Locks: `_changed` guards what the threads share.
Owns: plan, snapshot reader, watcher.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import (
    ConchError,
    OutOfRangeError,
    as_conch_error,
)
from conch.core.model_control import LoadParameter
from conch_control.agent_api import Index, is_transient
from conch_control.control_options import ControlOptions, PlannerOptions
from conch_control.events import Event, EventLog
from conch_control.planner.plan import LoadOutcome, Operation, PlannerPlan
from conch_control.planner.snapshot import SnapshotReader
from conch_control.planner.watcher import ChangedModels, Watcher
from conch_control.repository.layout import shortened_paths
from conch_control.repository.local import LocalModel
from conch_control.repository.namespaces import unwrapped
from conch_control.repository.repositories import Repositories
from conch_control.repository.source import ModelSource, SelfManaged
from conch_control.version_phase import Phase

log = logging.getLogger(__name__)


class RunningModels:
    """Models with a ready version, kept current from events."""

    def __init__(self, index: Index) -> None:
        self.epoch = index.epoch
        self.revision = index.revision
        self._ready = {
            model.name: {version.version for version in model.versions if version.phase is Phase.READY}
            for model in index.models
        }

    @property
    def names(self) -> frozenset[str]:
        """Models with a ready version."""
        return frozenset(name for name, versions in self._ready.items() if versions)

    def apply(self, events: Iterable[Event]) -> dict[str, bool]:
        """Processes events; returns the models that started (True) or stopped (False) serving."""
        before = self.names
        for event in events:
            self.revision = event.revision
            versions = self._ready.setdefault(event.model, set())
            if event.phase is Phase.READY:
                versions.add(event.version)
            elif event.version:
                versions.discard(event.version)
        now = self.names
        return {name: name in now for name in before ^ now}


_S = 1_000_000_000
_DEBOUNCE_NS = _S // 10
_REST = 10
"""Pause between polls, as a multiple of the poll's CPU time."""
_RECHECK_S = 300.0
"""Poll interval of watched repositories, as inotify may miss changes."""
_OUTDATED = "Newer operation has been applied to the model lifecycle"


class PlannerAgent(Protocol):
    """The part of `AgentApi` that a planner needs."""

    @property
    def events(self) -> EventLog:
        """Event log."""

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Loads or reloads a model and returns when it is ready; does nothing if nothing has changed."""

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Unpublishes a model."""

    def models(self) -> Index:
        """All models with their states."""


class Planner:
    """Keeps an agent in line with the repositories, but for models that are not `wanted`; None for all."""

    def __init__(
        self,
        agent: PlannerAgent,
        repositories: Repositories,
        options: PlannerOptions,
        clock: Clock = monotonic_ns,
        wanted: Callable[[str], bool] | None = None,
    ) -> None:
        self._agent = agent
        self.repositories = repositories
        self._options = options
        self._clock = clock
        self._plan = PlannerPlan(round(options.settle_s * _S), max(options.operations, 1))
        self._reader = SnapshotReader(
            repositories,
            ControlOptions(
                (), max_config_bytes=options.max_config_bytes, model_config_name=options.model_config_name
            ),
            self._before_snapshot,
            self._on_late,
            editors=options.development,
            wanted=wanted,
        )
        self.watcher: Watcher | None = None
        self._running: RunningModels | None = None
        self._adopted = False
        self._changed = threading.Condition()  # guards the next attributes
        self._stopped = False
        self._asked = False
        self._late = False  # a repository answered after a poll had gone on without it
        self._changed_at: int | None = None
        self._ended: list[tuple[Operation, BaseException | None, int]] = []
        self._workers: set[threading.Thread] = set()
        self._thread = threading.Thread(target=self._run, name="conch-planner", daemon=True)
        # Times of the next regular and the earliest possible poll.
        self._poll_at = 0
        self._rest_until = 0

    def remember(self) -> None:
        """Takes the current content of the repositories as already asked for.

        For servers, which load everything at their start; other planners ask the agent for everything
        once.
        """
        snapshot = self._reader.poll_all(lambda: self._stopped)
        self._plan.adopt(snapshot, self._clock())
        self._adopted = True

    def start(self, failures: Mapping[str, Exception] | None = None) -> None:
        """Starts the thread; `failures` are startup models that failed to load."""
        now = self._clock()
        for name, error in (failures or {}).items():
            if name in self._plan:
                self.start_operations(self._plan.finished(Operation("load", name), outcome_of(error), now))
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Starts no more operations; returns True if the running ones ended in time."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            threads = [*self._workers, self._thread]
        end = self._clock() + round(timeout_s * _S)
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(end - self._clock(), 0) / _S)
        return not any(thread.is_alive() for thread in threads)

    @property
    def has_polled(self) -> bool:
        """True once the first snapshot has been taken."""
        return self._poll_at > 0 and self._rest_until > 0

    def poll(self) -> None:
        """Polls everything now."""
        with self._changed:
            self._asked = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            if self._options.mode == "watch":
                locations = [each.location for each in self.repositories if not isinstance(each, SelfManaged)]
                self.watcher = Watcher(locations, self._on_change)
            while not self._stopped:
                self._wait(self.step())
        finally:
            if self.watcher is not None:
                self.watcher.close(1.0)

    def step(self) -> int:
        """Does what is due; returns the time of the next step."""
        try:
            self._apply_events()
            self._poll_late()
            names, due = self._due(self._clock())
            if due:
                self._poll(names)
            self.start_operations(self._plan.tick(self._clock()))
            return self._next()
        except Exception:  # boundary: the top of the thread
            log.exception("the planner has failed; it goes on later")
            return self._clock() + round(self._options.poll_s * _S)

    def _wait(self, until: int) -> None:
        with self._changed:
            while not (self._stopped or self._asked or self._ended):
                at = min(until, self._rest_until) if self._late else until
                if self._changed_at is not None:
                    at = min(at, max(self._changed_at + _DEBOUNCE_NS, self._rest_until))
                left = at - self._clock()
                if left <= 0:
                    break
                self._changed.wait(left / _S)

    def _apply_events(self) -> None:
        """Processes ended operations and events caused by others."""
        mine = self._plan.in_progress
        with self._changed:
            ended, self._ended = self._ended, []
        for operation, error, took_ns in ended:
            serves = self._running is not None and operation.name in self._running.names
            _log_end(operation, error, took_ns, serves)
            outcome = LoadOutcome.DONE if error is None else outcome_of(error)
            self.start_operations(self._plan.finished(operation, outcome, self._clock()))
        if self._running is None:
            self._attach()
            return
        events = self._agent.events
        try:
            if events.epoch != self._running.epoch:
                raise OutOfRangeError("the agent has been started anew")
            changes = self._running.apply(events.after(self._running.revision))
        except OutOfRangeError as error:
            log.info("reading the whole index again: %s", error.message)
            self._adopted, self._running = False, None
            self._attach()
            return
        except ConchError as error:
            log.warning("can't see what has happened to the models: %s", error.message)
            return
        for name, running in changes.items():
            if name not in mine and name not in self._plan.in_progress:
                log.info("model '%s' was %s by another caller", name, "loaded" if running else "unloaded")
                self.start_operations(self._plan.external_change(name, running, self._clock()))

    def _attach(self) -> None:
        try:
            self._running = RunningModels(self._agent.models())
        except (ConchError, OSError) as error:
            log.warning("can't see what runs: %s", as_conch_error(error).message)
            return
        if not self._adopted:
            self._plan.attach(self._running.names, self._clock())
            self._adopted = True

    def _due(self, now: int) -> tuple[frozenset[str] | None, bool]:
        """Models to poll (None for all), and whether to poll at all."""
        with self._changed:
            asked, self._asked = self._asked, False
        if asked:
            return None, True
        if now < self._rest_until:
            return frozenset(), False
        if now >= self._poll_at:
            return None, True
        touched = self._take_changed(now)
        if touched.everything:
            return None, True
        snapshot_due = self._plan.snapshot_due
        settling = self._plan.settling if snapshot_due is not None and snapshot_due <= now else frozenset()
        return touched.names | settling, bool(touched) or bool(settling)

    def _take_changed(self, now: int) -> ChangedModels:
        with self._changed:
            if self._changed_at is None or now < self._changed_at + _DEBOUNCE_NS:
                return ChangedModels()
            self._changed_at = None
        return ChangedModels() if self.watcher is None else self.watcher.take_changed()

    def _poll(self, names: frozenset[str] | None) -> None:
        began, busy = self._clock(), time.thread_time_ns()
        if names is None:
            self._poll_at = began + self._poll_ns()
            with self._changed:
                self._changed_at = None
            if self.watcher is not None:
                self.watcher.take_changed()
        if self.watcher is not None:
            self.watcher.cover_repositories()
        snapshot = self._reader.poll(names, lambda: self._stopped)
        now = self._clock()
        self._rest_until = now + _REST * (time.thread_time_ns() - busy)
        if self._stopped:
            return
        if self.watcher is not None:
            if not snapshot.partial:
                self.watcher.keep(snapshot.models.keys())
            self._poll_at = min(self._poll_at, began + self._poll_ns())
        if snapshot.failed:  # a missed change is not reported again
            self._poll_at = min(self._poll_at, began + round(self._options.poll_s * _S))
        self.start_operations(self._plan.snapshot_taken(snapshot, began, now))

    def _poll_late(self) -> None:
        began, busy = self._clock(), time.thread_time_ns()
        with self._changed:
            if not self._late or began < self._rest_until:
                return
            self._late = False
        snapshot = self._reader.poll_late(lambda: self._stopped)
        now = self._clock()
        self._rest_until = now + _REST * (time.thread_time_ns() - busy)
        if not self._stopped:
            self.start_operations(self._plan.snapshot_taken(snapshot, began, now))

    def _poll_ns(self) -> int:
        watched = self.watcher is not None and not self.watcher.unwatched
        return round((max(_RECHECK_S, self._options.poll_s) if watched else self._options.poll_s) * _S)

    def _next(self) -> int:
        snapshot_due, wake_at = self._plan.snapshot_due, self._plan.wake_at
        looks = self._poll_at if snapshot_due is None else min(self._poll_at, snapshot_due)
        at = max(looks, self._rest_until)
        return at if wake_at is None else min(at, wake_at)

    def _before_snapshot(self, source: ModelSource) -> None:
        local = unwrapped(source)
        if self.watcher is not None and isinstance(local, LocalModel):
            self.watcher.cover(source.name, str(local.directory))

    def _on_change(self) -> None:
        with self._changed:
            if self._changed_at is None:
                self._changed_at = self._clock()
                self._changed.notify_all()

    def _on_late(self) -> None:
        with self._changed:
            self._late = True
            self._changed.notify_all()

    def start_operations(self, operations: Iterable[Operation]) -> None:
        """Runs operations on the agent, each on its own thread."""
        for operation in operations:
            if self._stopped:
                return
            if operation.kind == "load":
                what = f" ({shortened_paths(operation.changed)})" if operation.changed else ""
                log.info("model '%s' is new or has changed: loading it%s", operation.name, what)
            else:
                log.info("model '%s' is gone: unloading it", operation.name)
            thread = threading.Thread(
                target=self._work,
                args=(operation,),
                name=f"conch-{operation.kind}-{operation.name}",
                daemon=True,
            )
            with self._changed:
                self._workers.add(thread)
            thread.start()

    def _work(self, operation: Operation) -> None:
        error: BaseException | None = None
        began = self._clock()
        try:
            if operation.kind == "load":
                self._agent.load(operation.name, {})
            else:
                self._agent.unload(operation.name, False)
        except BaseException as raised:  # boundary: the top of the thread; the error ends the operation
            error = raised
        with self._changed:
            self._ended.append((operation, error, self._clock() - began))
            self._workers.discard(threading.current_thread())
            self._changed.notify_all()


def outcome_of(error: BaseException) -> LoadOutcome:
    """Classifies the error of an operation."""
    if isinstance(error, ConchError) and _OUTDATED in error.message:
        return LoadOutcome.DONE  # superseded
    return LoadOutcome.TRANSIENT if is_transient(error) else LoadOutcome.FAILED


def _log_end(operation: Operation, error: BaseException | None, took_ns: int, serves: bool) -> None:
    if error is None:
        if operation.changed:
            took = took_ns / _S
            log.info("reloaded '%s' in %.2f s: %s", operation.name, took, shortened_paths(operation.changed))
        return
    shown = as_conch_error(error)
    text = getattr(error, "reason", shown.message)
    known = None if isinstance(error, ConchError | OSError) else error
    if operation.kind == "unload":
        log.error("failed to unload '%s': %s", operation.name, text, exc_info=known)
    else:
        before = "what served before goes on" if serves else "no version of it serves"
        log.error("failed to load '%s', %s: %s", operation.name, before, text, exc_info=known)

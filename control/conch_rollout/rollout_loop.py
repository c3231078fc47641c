"""The thread of rollouts: feeds plans with versions, verdicts and calls, and carries out their actions.

One thread, `conch-rollout`, owns all plans; it exists only while a model has a declaration. Other threads
hand it commands and wait for the result. It wakes for commands, for events of versions, for what a plan waits
for, and every `LOOK_NS`, or a quarter of the shortest step, to look at counters; in between every
`LEAST_LOOK_NS`, for candidates that are so bad that few requests show it.

An action that fails is tried again, with all after it, so their order holds.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import NotFoundError, OutOfRangeError, UnavailableError
from conch_control.events import EventLog
from conch_control.managed_rollouts import Counts
from conch_rollout.guards import Verdict, Window, judge, judge_early, traffic_note
from conch_rollout.managed_plan import ManagedPlan
from conch_rollout.rollout_file import Declaration, Rollout
from conch_rollout.rollout_plan import RolloutPlan
from conch_rollout.rollout_state import (
    LIVE,
    Action,
    Progress,
    Publish,
    PublishLabels,
    RolloutCommand,
    Save,
    Select,
    State,
    Traffic,
    Transition,
    VersionSight,
)
from conch_rollout.state_file import SavedRollout, StateDirectory

log = logging.getLogger(__name__)

_S = 1_000_000_000
LOOK_NS = 10 * _S
"""Longest time between looks at counters."""
LEAST_LOOK_NS = _S // 4
_RECENT_NS = 60 * _S
_LOOKS_IN_STEP = 4
_MOST_HISTORY = 100
_RETRY_NS = _S
_WATCHED = frozenset({State.STEP, State.PAUSED, State.BAKING})

T = TypeVar("T")


class CanaryServer(Protocol):
    """The server as rollouts see it; called on the loop's thread only."""

    @property
    def events(self) -> EventLog:
        """The events of all versions."""

    def versions(self, model: str, stable: int | None) -> Mapping[int, VersionSight] | None:
        """A model's versions in repository and server, with their differences from the stable one.

        None while the repository has not been read or does not answer: a missing version drops progress.
        """

    def publish(self, model: str, traffic: Traffic | None, rollout: Rollout | None) -> None:
        """Publishes a route; `rollout` tells keys, matches and shadows. None for both removes it."""

    def publish_labels(self, model: str, labels: Mapping[str, int]) -> None:
        """Publishes all labels of a model."""

    def select(self, model: str, selection: Select) -> None:
        """Begins to load and release versions, and returns at once."""

    def changed(self, model: str, transition: Transition) -> None:
        """Shows a transition to operators."""


class Counters(Protocol):
    """Requests since a version was loaded."""

    def requests(self, model: str, version: int) -> Counts:
        """Requests of clients."""

    def shadows(self, model: str, version: int) -> Counts:
        """Copies of requests that stable has answered."""

    def pairs(self, model: str, version: int) -> tuple[int, int]:
        """Shadow pairs that were compared, and those of them that differ."""


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """A model's rollout for operators.

    Attributes:
        verdict: The last verdict on the current window; None for none.
        seconds: Age of the state, or of its window.
        note: A sentence if the traffic is too low for the step; else empty.
        window: Counters of the window.
        split: Counters of a split's versions since they were loaded.
        history: Transitions, oldest first.
        managed_by: The process that runs it for a fleet; empty for this one.
    """

    declaration: Declaration
    from_file: bool
    progress: Progress
    verdict: Verdict | None = None
    seconds: float = 0.0
    note: str = ""
    window: Window = field(default_factory=lambda: Window(Counts(), Counts()))
    history: tuple[Transition, ...] = ()
    managed_by: str = ""
    split: Mapping[int, Counts] = field(default_factory=dict)


@dataclass
class _Model:
    """A plan and its counters.

    Attributes:
        pending: Actions to carry out, in order.
        window: The window that the counters below belong to.
        begun: Counters at its begin.
        looks: Counters of the looks of the last minute, oldest first, with their times.
        history: Transitions, oldest first.
        reference: Stable's requests in the last step, with the rollout's number: after a promotion the old
            version gets none.
    """

    plan: RolloutPlan
    pending: deque[Action] = field(default_factory=deque)
    window: int = -1
    begun: Window = field(default_factory=lambda: Window(Counts(), Counts()))
    looks: deque[tuple[int, Window]] = field(default_factory=deque)
    history: deque[Transition] = field(default_factory=lambda: deque(maxlen=_MOST_HISTORY))
    reference: tuple[int, Counts] = (0, Counts())


class RolloutLoop:
    """Runs the rollouts of one server; any thread may call it but its own.

    Attributes:
        selections: Versions to load and not to load, by model; replaced, never changed.
    """

    def __init__(
        self,
        server: CanaryServer,
        counters: Counters,
        directory: StateDirectory | None = None,
        clock: Clock = monotonic_ns,
    ) -> None:
        self._server = server
        self._counters = counters
        self._directory = directory
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._saved: dict[str, SavedRollout] = {} if directory is None else directory.read()
        self._revision = server.events.revision
        self._look_at = clock() + LOOK_NS
        self._told = directory is not None
        self.selections: Mapping[str, Select] = {}
        self._lock = threading.Lock()  # guards the next attributes
        self._commands: deque[tuple[Callable[[int], Any], Future[Any]]] = deque()
        self._thread: threading.Thread | None = None
        self._stopped = False

    # --- any thread

    def restore(self) -> None:
        """Resumes the rollouts that calls had declared; those of files follow with `declare`."""
        for model, saved in list(self._saved.items()):
            if saved.declaration is not None:
                self.declare(model, saved.declaration, by_call=True)

    def declare(self, model: str, declaration: Declaration, by_call: bool = False) -> None:
        """Takes a declaration, and returns when `selections` follows it.

        An empty one of a file, which is a missing file, leaves what a call has declared.

        Raises:
            FailedPreconditionError: A call may not change what a file declares.
        """
        kept = self._saved.get(model)
        begun = model in self._models or (kept is not None and not kept.progress.is_over)
        if begun or declaration != Declaration():
            self._command(partial(self._declare, model, declaration, by_call))

    def change(self, model: str, edit: Callable[[Declaration], Declaration]) -> None:
        """Changes by a call what calls have declared, such as a label.

        Raises:
            FailedPreconditionError: A file declares it.
        """
        self._command(partial(self._edit, model, edit))

    def start(self, model: str, declaration: Declaration, again: bool = False, begun: bool = False) -> None:
        """Declares and starts a rollout by a call; other labels stay. See `RolloutPlan.start_by_call`.

        Raises:
            FailedPreconditionError: One runs, a file declares it, or the candidate is missing or refused.
        """
        self._command(partial(self._start, model, declaration, again, begun))

    def refresh(self, model: str) -> None:
        """Returns when route and labels follow the versions that serve now."""
        if model in self._models:

            def run(now: int) -> None:
                if (found := self._models.get(model)) is not None:
                    self._see(model, found)

            self._command(run)

    @property
    def models(self) -> Collection[str]:
        """Models with a declaration."""
        return self._models.keys()

    def call(self, model: str, call: RolloutCommand, weight: int | None = None, again: bool = False) -> None:
        """Carries out an operator's call; see `RolloutPlan.call`.

        Raises:
            NotFoundError: The model has no rollout.
            FailedPreconditionError: Its state does not allow the call.
        """
        self._on_plan(model, lambda plan, now: plan.call(call, now, weight, again))

    def manage(
        self, model: str, manager: str, declaration: Declaration, progress: Progress, lease_ns: int
    ) -> str:
        """Takes over what the manager of a fleet says of a rollout; returns the plan's alarm."""
        return self._command(partial(self._manage, model, manager, declaration, progress, lease_ns))

    def release(self, model: str) -> bool:
        """Takes a rollout from its manager, if it has one: the server has its own plan again."""
        return model in self._models and self._command(partial(self._release, model))

    def adopt(self, kept: Mapping[str, SavedRollout]) -> None:
        """Takes what is known of rollouts instead of what the state directory has; before `restore`."""
        self._saved.update(kept)
        for model, saved in kept.items():
            self._write(model, saved)  # else another restart might go on from a later step

    @property
    def saved(self) -> Mapping[str, SavedRollout]:
        """Saved rollouts, in the state directory, of models without a declaration."""
        return self._saved

    def declared(self, model: str) -> tuple[Declaration, bool, Progress] | None:
        """A model's declaration, whether a file has it, and its progress; on the loop's thread."""
        found = self._models.get(model)
        return None if found is None else (found.plan.declaration, found.plan.from_file, found.plan.progress)

    def end(self, model: str, reason: str) -> None:
        """Ends the rollout of a model that others have loaded or unloaded, if it has one."""
        if model in self._models:
            self._on_plan(model, lambda plan, now: plan.end_rollout(reason, now))

    def status(self, model: str) -> RolloutStatus:
        """A model's rollout. Raises NotFoundError: it has none."""
        if model not in self._models:
            raise _no_rollout(model)
        return self._command(partial(self._status, model))

    def progress(self, model: str) -> Progress | None:
        """A model's progress as it is at this moment; None without a declaration."""
        found = self._models.get(model)
        return None if found is None else found.plan.progress

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread and leaves routes and states as they are; returns True if it ended in time."""
        with self._lock:
            self._stopped = True
            thread = self._thread
        self._server.events.wake()
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _on_plan(self, model: str, action: Callable[[RolloutPlan, int], list[Action]]) -> None:
        if model not in self._models:
            raise _no_rollout(model)

        def run(now: int) -> None:
            if (found := self._models.get(model)) is None:
                raise _no_rollout(model)
            self._see(model, found)
            found.pending += action(found.plan, now)
            self._carry_out(model, found)

        self._command(run)

    def _command(self, command: Callable[[int], T]) -> T:
        future: Future[T] = Future()
        with self._lock:
            if self._stopped:
                raise UnavailableError("Server exiting")
            self._commands.append((command, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="conch-rollout", daemon=True)
                self._thread.start()
        self._server.events.wake()
        return future.result()

    # --- the loop's thread

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopped or self._server.events.closed or not (self._models or self._commands):
                    self._thread = None
                    for _, future in self._commands:
                        future.set_exception(UnavailableError("Server exiting"))
                    self._commands.clear()
                    return
            self._wait(self.step())

    def step(self) -> int:
        """Does what is due; returns the time of the next step."""
        self._run_commands()
        changed, now = self._changed(), self._clock()
        look = now >= self._look_at
        self._look_at = now + self._look_ns() if look else min(self._look_at, now + self._look_ns())
        wakes = [self._look_at]
        for model, found in list(self._models.items()):
            try:
                if look or model in changed:
                    self._see(model, found)
                self._look(model, found, look)
                found.pending += found.plan.tick(self._clock())
                self._carry_out(model, found)
                wakes += [at for at in (found.plan.wake_at(now),) if at is not None]
                if _looks_early(found.plan):
                    wakes.append(now + LEAST_LOOK_NS)
            except Exception:  # boundary: the top of the thread; other models go on
                log.exception("the rollout of '%s' has failed; it goes on soon", model)
                wakes.append(now + _RETRY_NS)
        return min(wakes)

    def _look_ns(self) -> int:
        """Time to the next look at counters."""
        plans = [found.plan for found in self._models.values()]
        steps = [
            step.least_ns
            for plan in plans
            if plan.progress.state in _WATCHED and plan.declaration.rollout is not None
            for step in plan.declaration.rollout.steps
        ]
        return max(min([LOOK_NS, *(each // _LOOKS_IN_STEP for each in steps)]), LEAST_LOOK_NS)

    def _wait(self, until: int) -> None:
        left = until - self._clock()
        if left > 0:
            try:
                self._server.events.after(
                    self._revision, left / _S, lambda: bool(self._commands) or self._stopped
                )
            except OutOfRangeError:  # the next step looks at all models
                return

    def _run_commands(self) -> None:
        while True:
            with self._lock:
                if not self._commands:
                    return
                command, future = self._commands.popleft()
            try:
                result = command(self._clock())
            except BaseException as error:  # boundary: the caller's thread raises it
                future.set_exception(error)
            else:
                future.set_result(result)

    def _changed(self) -> Collection[str]:
        """Models whose versions have changed."""
        events = self._server.events
        try:
            entries = events.after(self._revision)
        except OutOfRangeError:
            self._revision = events.revision
            return self._models.keys()
        if entries:
            self._revision = entries[-1].revision
        return {entry.model for entry in entries}

    def _declare(self, model: str, declaration: Declaration, by_call: bool, now: int) -> None:
        found = self._models.get(model)
        if found is None:
            found = self._begin(model, declaration, not by_call, now)
        elif declaration != Declaration() or found.plan.from_file or by_call:
            found.pending += found.plan.declare(declaration, now, by_call)
            if by_call and declaration != Declaration():
                found.pending.append(Save(found.plan.progress))  # with the new declaration
        self._carry_out(model, found)
        self._see(model, found)

    def _manage(
        self, model: str, manager: str, declaration: Declaration, progress: Progress, lease_ns: int, now: int
    ) -> str:
        found = self._models.get(model)
        if found is None:
            self._saved.pop(model, None)
            found = _Model(ManagedPlan(model, Declaration()))
            self._models = {**self._models, model: found}
        plan = found.plan
        if not isinstance(plan, ManagedPlan):
            found.plan = plan = ManagedPlan.after(plan)
            self._forget(model)
        found.pending += plan.manage(manager, declaration, progress, lease_ns, now)
        self._carry_out(model, found)
        self._see(model, found)
        return plan.alarm

    def _release(self, model: str, now: int) -> bool:
        found = self._models.get(model)
        if found is None or not isinstance(found.plan, ManagedPlan):
            return False
        found.plan = found.plan.released(partial(self._next_number, model))
        found.pending += found.plan.tick(now)
        self._carry_out(model, found)
        return True

    def _forget(self, model: str) -> None:
        """Removes the state of a rollout that its manager keeps."""
        if self._directory is not None:
            try:
                self._directory.remove(model)
            except OSError as error:
                log.error("the former progress of '%s' can't be removed: %s", model, error.strerror)

    def _edit(self, model: str, edit: Callable[[Declaration], Declaration], now: int) -> None:
        found = self._models.get(model)
        self._declare(model, edit(Declaration() if found is None else found.plan.declaration), True, now)

    def _start(self, model: str, declaration: Declaration, again: bool, begun: bool, now: int) -> None:
        found = self._models.get(model)
        if found is None:
            found = self._begin(model, Declaration(), False, now)
        plan = found.plan
        versions = self._server.versions(model, plan.progress.stable)
        if versions is not None:
            found.pending += plan.take_states(versions, now)
        try:
            labels = {**plan.declaration.labels, **declaration.labels}
            declaration = Declaration(labels, declaration.rollout)
            found.pending += plan.start_by_call(declaration, now, again, begun)
            found.pending.append(Save(plan.progress))  # with the new declaration
        finally:
            self._carry_out(model, found)
        self._see(model, found)

    def _begin(self, model: str, declaration: Declaration, from_file: bool, now: int) -> _Model:
        saved = self._saved.pop(model, SavedRollout(Progress()))
        number = partial(self._next_number, model)
        found = _Model(RolloutPlan(model, declaration, saved.progress, from_file, number))
        found.history.extend(saved.history)
        self._models = {**self._models, model: found}
        found.pending += found.plan.start(now)
        return found

    def _next_number(self, model: str, group: str, last: int) -> int:
        """The number of a model's next rollout: that of a group's running ones, else a new one."""
        if not group:
            return last + 1
        others = [
            each.plan.progress
            for name, each in self._models.items()
            if name != model and (each.plan.declaration.rollout or Rollout()).group == group
        ]
        running = [each.number for each in others if each.state in LIVE or each.state is State.BAKING]
        return max(running) if running else max([last, *(each.number for each in others)]) + 1

    def _see(self, model: str, found: _Model) -> None:
        while True:
            stable = found.plan.progress.stable
            versions = self._server.versions(model, stable)
            if versions is not None:
                found.pending += found.plan.take_states(versions, self._clock())
            self._carry_out(model, found)
            if found.plan.progress.stable == stable:
                return

    def _carry_out(self, model: str, found: _Model) -> None:
        plan = found.plan
        while found.pending:
            action = found.pending[0]
            match action:
                case Publish(traffic):
                    self._server.publish(model, traffic, plan.declaration.rollout)
                case PublishLabels(labels):
                    self._server.publish_labels(model, labels)
                case Save(progress):
                    self._record(model, found, progress)
                    if not isinstance(plan, ManagedPlan):
                        self._save(model, found, progress)
                case Select():
                    self.selections = {**self.selections, model: action}
                    self._server.select(model, action)
            found.pending.popleft()
        for note in plan.notes:
            log.log(note.level, "%s", note.text)
        plan.notes.clear()
        if plan.window != found.window and plan.progress.state in _WATCHED:
            found.window, found.begun = plan.window, self._read(model, plan.progress)
            found.looks.clear()
        over = plan.declaration == Declaration() and plan.progress.is_over
        if over and not isinstance(plan, ManagedPlan):
            self._saved[model] = SavedRollout(plan.progress, None, tuple(found.history))
            self._models = {name: each for name, each in self._models.items() if name != model}
            self.selections = {name: each for name, each in self.selections.items() if name != model}

    def _record(self, model: str, found: _Model, progress: Progress) -> None:
        """Tells operators of a change that they can see."""
        transition = Transition.of(progress, self._server.events.now())
        last = found.history[-1] if found.history else None
        if last is None and progress.state is State.IDLE:
            return
        if last is None or replace(transition, seconds=last.seconds) != last:
            found.history.append(transition)
            self._server.changed(model, transition)

    def _save(self, model: str, found: _Model, progress: Progress) -> None:
        if not self._told and progress.state is State.LOADING:
            self._told = True
            log.warning("without --state-directory the progress of rollouts ends with this process")
        plan = found.plan
        by_call = None if plan.from_file or plan.declaration == Declaration() else plan.declaration
        self._write(model, SavedRollout(progress, by_call, tuple(found.history)))

    def _write(self, model: str, saved: SavedRollout) -> None:
        if self._directory is None:
            return
        try:
            self._directory.write(model, saved)
        except OSError as error:
            log.error("the progress of '%s' can't be saved: %s; a restart goes back", model, error.strerror)

    def _look(self, model: str, found: _Model, whole: bool) -> None:
        """Judges the counters of the current window; without `whole`, only a candidate that is surely bad."""
        plan = found.plan
        progress = plan.progress
        watched = progress.state in _WATCHED if whole else _looks_early(plan)
        if not watched or plan.window != found.window:
            return
        now, counters = self._clock(), self._read(model, progress)
        step = _since(counters, found.begun)
        if min(step.stable.requests, step.candidate.requests, step.compared) < 0:  # loaded again meanwhile
            found.begun = counters
            found.looks.clear()
            return
        looks = found.looks
        while len(looks) > 1 and looks[1][0] <= now - _RECENT_NS:
            looks.popleft()
        recent = _since(counters, looks[0][1]) if looks and looks[0][0] <= now - _RECENT_NS else None
        if whole:
            looks.append((now, counters))
        if progress.state is State.BAKING:
            reference = found.reference[1] if found.reference[0] == progress.number else Counts()
            step = replace(step, stable=reference)
            recent = None if recent is None else replace(recent, stable=reference)
        else:
            found.reference = progress.number, step.stable
        guard = (plan.declaration.rollout or Rollout()).guard
        verdict = (judge if whole else judge_early)(guard, step, recent)
        if verdict is not None:
            found.pending += plan.take_verdict(verdict, plan.window, now)
            self._carry_out(model, found)

    def _read(self, model: str, progress: Progress) -> Window:
        counters = self._counters
        if progress.state is State.BAKING or progress.candidate is None or progress.stable is None:
            return Window(Counts(), counters.requests(model, progress.stable or 0))
        mirrored = progress.shadow and not progress.weight
        candidate = (counters.shadows if mirrored else counters.requests)(model, progress.candidate)
        pairs = counters.pairs(model, progress.candidate) if progress.shadow else (0, 0)
        return Window(counters.requests(model, progress.stable), candidate, *pairs)

    def _status(self, model: str, now: int) -> RolloutStatus:
        if (found := self._models.get(model)) is None:
            raise _no_rollout(model)
        plan = found.plan
        window = found.begun
        if plan.progress.state in _WATCHED and plan.window == found.window:
            window = _since(self._read(model, plan.progress), found.begun)
        split = {version: self._counters.requests(model, version) for version, _ in plan.progress.places}
        return RolloutStatus(
            plan.declaration,
            plan.from_file,
            plan.progress,
            plan.verdict,
            (now - plan.since) / _S,
            self._note(found),
            window,
            tuple(found.history),
            plan.manager if isinstance(plan, ManagedPlan) else "",
            split,
        )

    def _note(self, found: _Model) -> str:
        progress, rollout = found.plan.progress, found.plan.declaration.rollout
        if waiting := found.plan.waiting:
            return f"stable gets the requests of {_versions_text(waiting)}, which can't serve"
        if found.plan.held_out and not isinstance(found.plan, ManagedPlan):
            return f"the rollout {found.plan.held_out}"
        if progress.state is not State.STEP or rollout is None or len(found.looks) < 2 or not progress.weight:
            return ""
        (first, early), (last, late) = found.looks[0], found.looks[-1]
        passed = _since(late, early)
        per_second = (passed.stable.requests + passed.candidate.requests) * _S / (last - first)
        return traffic_note(rollout.guard, progress.weight, per_second, rollout.steps[progress.step].least_ns)


def _looks_early(plan: RolloutPlan) -> bool:
    """True if few requests may show that the version under test is bad."""
    guard = (plan.declaration.rollout or Rollout()).guard
    return plan.progress.state in _WATCHED and not (guard.errors is None and guard.mismatch is None)


def _since(late: Window, early: Window) -> Window:
    return Window(
        late.stable.minus(early.stable),
        late.candidate.minus(early.candidate),
        late.compared - early.compared,
        late.mismatched - early.mismatched,
    )


def _versions_text(versions: Sequence[int]) -> str:
    """Versions as text, such as ``versions 8 and 9``."""
    *others, last = map(str, versions)
    return f"versions {', '.join(others)} and {last}" if others else f"version {last}"


def _no_rollout(model: str) -> NotFoundError:
    return NotFoundError(f"model '{model}' has no rollout and no labels")

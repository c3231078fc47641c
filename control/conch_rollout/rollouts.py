"""Rollouts of one server: connects `RolloutLoop` with repositories, registry and loads.

| what                          | by |
|-------------------------------|---|
| files of a model, declaration | `begins`, at each load of the model and before a rollout is started |
| which versions a load selects | `versions_of`, from `RolloutLoop.selections` |
| what a fleet's manager says   | `manage_rollout` |
| route and labels              | `publish`, `publish_labels`; up to date when a load returns, by `ended` |
| loads of a rollout            | `select`, on a thread `conch-rollout-load` for each model |
| transitions                   | `changed`: events, counters, and pins in on-demand mode |

Threads: storage is read on the threads of loads and calls, never on the loop's. Locks: `_lock` guards which
models are being followed and the counters of transitions; the load queue's is taken to read versions with
what they were loaded from.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from conch.core.errors import (
    ConchError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    as_conch_error,
)
from conch.core.model_statistics import QUEUE_FULL
from conch.core.registry import Entry, Registry
from conch.core.rollouts import RolloutReport
from conch.core.route import Attribute, MatchRule, Route
from conch.core.servable import Servable
from conch_control.control_options import ControlOptions
from conch_control.events import EventLog
from conch_control.lifecycle.load_queue import LoadQueue, SupersededError
from conch_control.lifecycle.rollouts import Rollouts, Saturation
from conch_control.lifecycle.version_diff import STALE, Origin
from conch_control.lifecycle.version_states import VersionStates
from conch_control.managed_rollouts import LONGEST_LEASE_S, Counts, ManagedBy, ManagedReport, ManagedVersion
from conch_control.repository.layout import Fingerprint, split_markers
from conch_control.repository.source import ModelSource
from conch_control.version_phase import Phase
from conch_rollout.declared_files import VersionDigests, read_declaration
from conch_rollout.interface_check import interface_differences
from conch_rollout.rollout_calls import DELETE, RolloutCalls, check_own_label, checked, transition_of
from conch_rollout.rollout_file import Declaration, Rollout
from conch_rollout.rollout_loop import RolloutLoop
from conch_rollout.rollout_metrics import RolloutCounts
from conch_rollout.rollout_state import (
    RESTING,
    Select,
    State,
    Traffic,
    Transition,
    VersionSight,
)
from conch_rollout.shadows.rollout_shadows import RolloutShadows
from conch_rollout.shadows.shadow import Shadow
from conch_rollout.shadows.shadow_service import Shadows
from conch_rollout.state_file import StateDirectory, decoded

log = logging.getLogger(__name__)

STATE_DIRECTORY = "rollouts"
"""Part of the server's state directory."""

_NO_ENTRY = Entry()
_S = 1_000_000_000
_STOP_S = 5.0
_BACKS_OFF_RESTARTS = 3


@dataclass(slots=True)
class _Follower:
    """Loads of one model: `again` if the selection has changed since the running one began."""

    again: bool = False


class ServerRollouts(RolloutCalls, Rollouts):
    """Implements `CanaryServer` and `Counters` of the loop, and the server's `Rollouts`.

    Args:
        registry: The models that serve.
        queue: The loads of the server.
        states: States of versions.
        load: Loads a model as it is selected now.
        source: Finds a model in the repositories as they are now.
        origin: Returns what a model was loaded from; None if it is not loaded.
        pin: Keeps a model in memory while True, in on-demand mode.
        saturation: Saturation of versions.
        options: Settings of the control plane: directories of state and of captured pairs, if any.

    Attributes:
        events: The server's event log.
        loop: The thread that runs them.
        mirrors: All shadows.
    """

    def __init__(
        self,
        registry: Registry,
        queue: LoadQueue,
        states: VersionStates,
        events: EventLog,
        load: Callable[[str], None],
        source: Callable[[str], ModelSource | None],
        origin: Callable[[str], Origin | None],
        pin: Callable[[str, bool], None],
        saturation: Saturation,
        options: ControlOptions,
    ) -> None:
        self._registry = registry
        self._queue = queue
        self._states = states
        self.events = events
        self._load = load
        self._source = source
        self._origin = origin
        self._pin = pin
        self.mirrors = Shadows(saturation, capture=options.rollout_capture_directory)
        self._shadows = RolloutShadows(self.mirrors)
        self._lock = threading.Lock()
        self._files: dict[str, VersionDigests] = {}
        self._served: dict[str, VersionDigests] = {}
        self._failures: dict[str, tuple[str, float]] = {}
        self._followers: dict[str, _Follower] = {}
        self._managed: dict[str, ManagedBy] = {}
        self._labelled: dict[str, Mapping[str, int]] = {}  # labels of repositories
        self._transitions: Counter[tuple[str, str, bool]] = Counter()
        state = options.state_directory
        directory = None if state is None else StateDirectory(state / STATE_DIRECTORY)
        self.loop = RolloutLoop(self, self, directory)

    def stop(self) -> None:
        """Ends the loop; routes stay as they are."""
        if not self.loop.stop(_STOP_S):
            log.warning("the thread of rollouts has not ended within %g s", _STOP_S)

    def close(self) -> None:
        """Stops, and ends all shadows."""
        self.stop()
        if not self.mirrors.stop(_STOP_S):
            log.warning("the threads of shadows have not ended within %g s", _STOP_S)

    # --- loads

    def restore(self) -> None:
        """See `RolloutLoop.restore`."""
        self.loop.restore()

    def end(self, name: str, reason: str) -> None:
        """See `RolloutLoop.end`."""
        self.loop.end(name, reason)

    def begins(self, source: ModelSource, state: Fingerprint) -> None:
        """Takes the files of a model and its declaration."""
        declaration = self._read(source, state)
        try:
            self._declare(source.name, declaration)
        except UnavailableError:
            return  # the server stops: the load is refused with its own error

    def _read(self, source: ModelSource, state: Fingerprint) -> Declaration:
        """Takes the files of a model, and returns its declaration; raises as `begins`."""
        name = source.name
        labels, declaration = read_declaration(source, state)
        files = VersionDigests.of(state)
        known = self._files.get(name)
        if known is None or known.state != files.state:
            self._files[name] = files
        self._labelled[name] = labels
        return declaration

    def _declare(self, name: str, declaration: Declaration) -> None:
        """Hands a declaration of the repository to the loop; labels without one go to the registry."""
        self.loop.declare(name, declaration)
        if declaration != Declaration() or name in self._managed:
            return
        labels = self._labelled[name]
        if labels and name in self.loop.models:  # calls have declared a rollout

            def edit(declared: Declaration) -> Declaration:
                return Declaration() if declared.rollout is None else Declaration(labels, declared.rollout)

            self.loop.change(name, edit)
        if name not in self.loop.models:
            self._registry.follow_labels(name, labels)

    def ended(self, name: str) -> None:
        """Returns when route and labels follow the versions that serve."""
        try:
            self.loop.refresh(name)
        except UnavailableError:
            return  # the server stops

    def versions_of(
        self, name: str, available: Collection[int], policy: Callable[[Collection[int]], Collection[int]]
    ) -> list[int]:
        """See `Rollouts.versions_of`."""
        return self.loop.selections.get(name, _SELECT_ALL).versions(available, policy)

    def held(self, name: str) -> Collection[int]:
        """See `Rollouts.held`."""
        return self.loop.selections.get(name, _SELECT_ALL).hold

    # --- the loop: CanaryServer

    def versions(self, model: str, stable: int | None) -> Mapping[int, VersionSight] | None:
        """See `CanaryServer.versions`; accesses no storage."""
        files = self._files.get(model)
        if files is None:
            return None
        with self._queue.lock:  # no swap in between
            ready = self._registry.entries.get(model, _NO_ENTRY).ready
            origin = self._origin(model)
        statuses = self._states.versions(model)
        whole = self._failures.get(model)
        served = self._served.get(model)
        if origin is not None and (served is None or served.state != origin.state):
            served = self._served[model] = VersionDigests(split_markers(origin.state)[0])
        reference = None if stable is None else ready.get(stable)
        present = set(files.versions)
        found = {}
        for version in present.union(ready):
            serving, status = ready.get(version), statuses.get(version)
            failure, since = "", 0.0
            if status is not None:
                since = status.seconds
                if status.phase is Phase.FAILED:
                    failure = status.reason
                elif status.phase is Phase.READY and status.reason.startswith(STALE):
                    failure = status.reason.removeprefix(STALE)
            if not failure and serving is None and whole is not None:
                failure, since = whole
            found[version] = VersionSight(
                files.digest(version) if version in present else "",
                "" if serving is None or served is None else served.digest(version),
                failure,
                since,
                serving is not None and _backs_off(serving),
                None
                if serving is None or reference is None
                else interface_differences(reference.spec, serving.spec),
            )
        return found

    def publish(self, model: str, traffic: Traffic | None, rollout: Rollout | None) -> None:
        """See `CanaryServer.publish`."""
        shadow = self._shadows.of(model, traffic, rollout)
        self._registry.set_route(model, self._route(model, traffic, rollout, shadow))
        self._shadows.settle(model, shadow)

    def _route(
        self, model: str, traffic: Traffic | None, rollout: Rollout | None, shadow: Shadow | None
    ) -> Route | None:
        if traffic is None or rollout is None:  # the label does it, without a choice for each request
            return None
        if rollout.guard.slower is not None or rollout.guard.p99_ms is not None:
            self._keep_latencies(model, traffic)
        shares = traffic.places
        if not shares and traffic.candidate is not None:
            shares = ((traffic.candidate, traffic.weight),)
        return Route(
            traffic.stable,
            traffic.candidate,
            shares,
            traffic.salt,
            tuple(map(Attribute.parse, rollout.sticky)),
            tuple(map(MatchRule.parse, rollout.match)),
            rollout.override,
            shadow,
            traffic.rollout,
        )

    def _keep_latencies(self, model: str, traffic: Traffic) -> None:
        ready = self._registry.entries.get(model, _NO_ENTRY).ready
        for version in (traffic.stable, traffic.candidate or traffic.stable):
            if version in ready and ready[version].statistics.snapshot().latencies is None:
                ready[version].statistics.keep_latencies()

    def publish_labels(self, model: str, labels: Mapping[str, int]) -> None:
        """See `CanaryServer.publish_labels`."""
        named = self._labelled.get(model)
        if named:
            self._registry.follow_labels(model, labels or named)
        else:
            self._registry.set_labels(model, labels, "api")

    def select(self, model: str, selection: Select) -> None:
        """See `CanaryServer.select`."""
        with self._lock:
            follower = self._followers.get(model)
            if follower is not None:
                follower.again = True
                return
            self._followers[model] = _Follower()
        threading.Thread(target=self._follow, args=(model,), name="conch-rollout-load", daemon=True).start()

    def _follow(self, model: str) -> None:
        while True:
            try:
                if self._origin(model) is not None:
                    self._failures.pop(model, None)
                    self._load(model)
            except SupersededError:
                pass  # by a newer load, which selects the same
            except Exception as error:  # boundary: the top of the thread
                if not self._queue.closed:
                    if not isinstance(error, ConchError):
                        log.exception("model '%s' could not be loaded for its rollout", model)
                    self._failures[model] = as_conch_error(error).message, self.events.now()
                    self.ended(model)
            with self._lock:
                follower = self._followers[model]
                if not follower.again or self._queue.closed:
                    del self._followers[model]
                    return
                follower.again = False

    def changed(self, model: str, transition: Transition) -> None:
        """See `CanaryServer.changed`."""
        with self._lock:
            self._transitions[model, transition.state.value, transition.called] += 1
        self._pin(model, transition.state not in RESTING)
        self._states.rollout_changed(model, transition_of(transition))

    # --- the loop: Counters

    def requests(self, model: str, version: int) -> Counts:
        """See `Counters.requests`."""
        serving = self._registry.entries.get(model, _NO_ENTRY).ready.get(version)
        return Counts() if serving is None else _counts(serving)

    def shadows(self, model: str, version: int) -> Counts:
        """See `Counters.shadows`."""
        return self._shadows.shadows(model, version)

    def pairs(self, model: str, version: int) -> tuple[int, int]:
        """See `Counters.pairs`."""
        return self._shadows.pairs(model, version)

    # --- calls

    def manage_rollout(
        self, name: str, declaration: Mapping[str, Any], managed_by: ManagedBy
    ) -> ManagedReport:
        """Takes over what the manager of a fleet says of a model's rollout; the model need not be loaded.

        Raises:
            InvalidArgumentError: Declaration or state is wrong.
        """
        declared = checked(declaration)
        try:
            _, saved = decoded(managed_by.state)
        except ValueError as error:
            raise InvalidArgumentError(f"managed_by: state_json: {error}") from None
        steps = 1 if declared.rollout is None else max(len(declared.rollout.steps), 1)
        if saved.progress.step >= steps:
            raise InvalidArgumentError(
                f"managed_by: state_json: progress.step: is {saved.progress.step}, of {steps} declared"
            )
        if not 0 < managed_by.lease_s <= LONGEST_LEASE_S:
            raise InvalidArgumentError(
                f"managed_by: lease_seconds: must be more than 0, at most {LONGEST_LEASE_S:g}, not "
                f"{managed_by.lease_s:g}"
            )
        manager = managed_by.manager or "another process"
        if self._managed.get(name, managed_by).files != managed_by.files or name not in self._files:
            self._read_again(name)
        self._managed[name] = managed_by
        alarm = self.loop.manage(name, manager, declared, saved.progress, round(managed_by.lease_s * _S))
        sights = self.versions(name, saved.progress.stable) or {}
        versions = tuple(self._managed_version(name, *each) for each in sorted(sights.items()))
        return ManagedReport(self.rollout(name), alarm, versions)

    def _managed_version(self, model: str, version: int, sight: VersionSight) -> ManagedVersion:
        return ManagedVersion(
            version,
            bool(sight.serves),
            bool(sight.serves) and sight.serves == sight.files,
            sight.failure,
            sight.since,
            sight.differences,
            self.requests(model, version),
            self.shadows(model, version),
            self.pairs(model, version),
        )

    def _read_again(self, identifier: str) -> Declaration | None:
        """Takes the files of a model, and returns what its file declares; None if no repository has it."""
        source = self._source(identifier)
        if source is None:
            return None
        try:
            return self._read(source, source.fingerprint())
        except OSError as error:
            raise UnavailableError(f"{source.location} can't be read: {error}") from error

    def _declare_again(self, identifier: str) -> None:
        # A version that has come since the last load is a candidate, too.
        declaration = self._read_again(identifier)
        if declaration is not None:
            self._declare(identifier, declaration)

    def _with_labels(self, identifier: str, declared: Declaration) -> Declaration:
        named = self._labelled.get(identifier)
        if named and declared.labels:
            self._registry.refuse_label_change(identifier)
        return replace(declared, labels=named) if named else declared

    def _shadow_report(self, model: str) -> Mapping[str, Any]:
        return self._shadows.report(model)

    def counts(self) -> RolloutCounts:
        """The figures for metrics."""
        states = {}
        for model in sorted(self.loop.models):
            progress = self.loop.progress(model)
            if progress is not None and progress.number:
                states[model] = progress.state.value
        with self._lock:
            return RolloutCounts(states, dict(self._transitions))

    def update_rollout(self, name: str, action: str, weight: float | None = None) -> RolloutReport:
        """See `RolloutControl.update_rollout`; "delete" takes a managed rollout from its manager."""
        identifier = self._identifier(name)
        if action == DELETE and self.loop.release(identifier):
            self._managed.pop(identifier, None)
            self._declare_again(identifier)
            return RolloutReport(identifier, "api", 0, State.IDLE.value)
        return super().update_rollout(name, action, weight)

    def _managed_state(self, model: str) -> str:
        managed_by = self._managed.get(model)
        return "" if managed_by is None else json.dumps(managed_by.state)

    def set_label(self, name: str, label: str, version: int | None) -> str:
        """Has a label of a model name a ready version, or removes it with None; returns the identifier.

        Raises:
            InvalidArgumentError: The label is malformed, or has a meaning of its own.
            FailedPreconditionError: A file or the repository declares the labels of this model.
            NotFoundError: There is no such model, version or, where it is to be removed, label.
            UnavailableError: The version is not ready.
        """
        check_own_label(label)
        identifier, _ = self._registry.find(name)
        self._registry.refuse_label_change(identifier)
        if version is not None:
            self._registry.resolve(identifier, str(version))
        if identifier not in self._files:
            source = self._source(identifier)
            if source is None:
                raise NotFoundError(f"model '{name}' is in no repository, so that labels can't be kept")
            self.begins(source, source.fingerprint())

        self._edit_label(name, identifier, label, version)
        return identifier

    def _identifier(self, name: str) -> str:
        """The identifier of a model that has a declaration, or serves."""
        models = self.loop.models
        if name in models:
            return name
        known = [each for each in models if self._registry.name_of(each) == name]
        if len(known) == 1:
            return known[0]
        return self._registry.find(name)[0]

    def _traffic(self, model: str, version: int) -> float:
        route = self._registry.entries.get(model, _NO_ENTRY).route
        return 0.0 if route is None else route.traffic(version)


_SELECT_ALL = Select()


def _backs_off(serving: Servable) -> bool:
    return any(
        worker.state in ("waiting", "starting", "lost") and worker.restarts >= _BACKS_OFF_RESTARTS
        for worker in serving.workers
    )


def _counts(serving: Servable) -> Counts:
    """Requests of a version; cache hits don't count, nor do requests that failed by their clients' doing."""
    seen = serving.statistics.snapshot()
    failures = seen.fail.count - sum(seen.cancelled.values()) - seen.rejected.get(QUEUE_FULL, 0)
    succeeded = seen.success.count - seen.cache_hit.count
    times: tuple[int, ...] = ()
    if seen.latencies is not None:
        # Histograms of whole requests have the hits, too.
        times = tuple(seen.latencies.compute_infer if serving.spec.cached else seen.latencies.request)
    return Counts(succeeded + failures, failures, times)

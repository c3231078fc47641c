"""Rollouts of one server: connects `RolloutLoop` with repositories, registry and loads.

| what                          | by |
|-------------------------------|---|
| files of a model, declaration | `begins`, at each load of the model and before a rollout is started |
| which versions a load selects | `versions_of`, from `RolloutLoop.selections` |
| route and labels              | `publish`, `publish_labels`; up to date when a load returns, by `ended` |
| loads of a rollout            | `select`, on a thread `conch-rollout-load` for each model |
| transitions                   | `changed`: events, counters, and pins in on-demand mode |

Threads: storage is read on the threads of loads and calls, never on the loop's. Locks: `_lock` guards which
models are being followed and the counters of transitions; the load queue's is taken to read versions with
what they were loaded from.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
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
from conch.core.rollouts import (
    ROLLOUT_ACTIONS,
    RolloutCounts,
    RolloutReport,
    RolloutSide,
    RolloutTransition,
)
from conch.core.route import Attribute, MatchRule, Route
from conch.core.servable import Servable
from conch.core.shadows.shadow import Shadow
from conch.core.shadows.shadow_service import Shadows
from conch.core.version_text import check_label
from conch_control.canary.guards import Counts, p99_ns
from conch_control.canary.interface_check import interface_differences
from conch_control.canary.rollout_file import (
    NEWEST,
    WHOLE,
    Declaration,
    Rollout,
    as_json,
    check_declaration,
    parse_json,
    parse_toml,
)
from conch_control.canary.rollout_loop import RolloutLoop, RolloutStatus
from conch_control.canary.rollout_shadows import RolloutShadows
from conch_control.canary.rollout_state import (
    RESTING,
    Call,
    Select,
    State,
    Traffic,
    Transition,
    VersionSight,
)
from conch_control.canary.state_file import StateDirectory
from conch_control.events import EventLog
from conch_control.lifecycle.load_queue import SupersededError
from conch_control.lifecycle.model_lifecycle import ModelLifecycle
from conch_control.lifecycle.version_diff import STALE
from conch_control.lifecycle.version_states import VersionStates
from conch_control.repository.layout import (
    ROLLOUT_FILE,
    Fingerprint,
    has_rollout,
    of_all_versions,
    of_configs,
    of_version,
    split_markers,
    versions_in,
    without_rollout,
)
from conch_control.repository.namespaces import unwrapped
from conch_control.repository.source import Declared, Labelled, ModelSource
from conch_control.residency.residency import Residency
from conch_control.version_phase import Phase

log = logging.getLogger(__name__)

STATE_DIRECTORY = "rollouts"
"""Part of the server's state directory."""

_NO_ENTRY = Entry()
_S = 1_000_000_000
_STOP_S = 5.0
_BACKS_OFF_RESTARTS = 3
_CANDIDATES = ("candidate", "challenger")
"""Labels of repositories whose version is the candidate, the first that there is."""
_OWN_LABELS = frozenset({"candidate", NEWEST})
_WEIGHT = "weight"
_DELETE = "delete"


@dataclass(slots=True)
class _Follower:
    """Loads of one model: `again` if the selection has changed since the running one began."""

    again: bool = False


@dataclass
class _Files:
    """Files of a model in the repository, with the digests of its versions."""

    state: Fingerprint
    digests: dict[int, str] = field(default_factory=dict)

    def digest(self, version: int) -> str:
        """Digest of all that a version is loaded from."""
        found = self.digests.get(version)
        if found is None:
            state = self.state
            parts = of_configs(state), of_all_versions(state), of_version(state, version)
            found = hashlib.blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()
            self.digests[version] = found
        return found


class Rollouts:
    """Implements `CanaryServer`, `Counters`, `LoadObserver` and `conch.core.rollouts.RolloutControl`.

    Args:
        registry: The models that serve.
        lifecycle: Loads and unloads.
        states: States of versions.
        load: Loads a model as it is selected now.
        source: Finds a model in the repositories as they are now.
        residency: Keeps models of rollouts in memory; None but in on-demand mode.
        shadows: Shadows of the server.
        state_directory: Of the server; None to forget progress with the process.

    Attributes:
        events: The server's event log.
        loop: The thread that runs them.
    """

    def __init__(
        self,
        registry: Registry,
        lifecycle: ModelLifecycle,
        states: VersionStates,
        events: EventLog,
        load: Callable[[str], None],
        source: Callable[[str], ModelSource | None],
        residency: Residency | None,
        shadows: Shadows,
        state_directory: Path | None,
    ) -> None:
        self._registry = registry
        self._lifecycle = lifecycle
        self._states = states
        self.events = events
        self._load = load
        self._source = source
        self._residency = residency
        self._shadows = RolloutShadows(shadows)
        self._lock = threading.Lock()
        self._files: dict[str, _Files] = {}
        self._served: dict[str, _Files] = {}
        self._failures: dict[str, tuple[str, float]] = {}
        self._followers: dict[str, _Follower] = {}
        self._labelled: dict[str, Mapping[str, int]] = {}  # labels of repositories
        self._transitions: Counter[tuple[str, str, bool]] = Counter()
        directory = None if state_directory is None else StateDirectory(state_directory / STATE_DIRECTORY)
        self.loop = RolloutLoop(self, self, directory)
        lifecycle.observer = self

    def stop(self) -> None:
        """Ends the loop; routes stay as they are."""
        if not self.loop.stop(_STOP_S):
            log.warning("the thread of rollouts has not ended within %g s", _STOP_S)

    # --- loads: LoadObserver

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
        labels, declaration = _declared(source, state)
        files = without_rollout(split_markers(state)[0])
        known = self._files.get(name)
        if known is None or known.state != files:
            self._files[name] = _Files(files)
        self._labelled[name] = labels
        return declaration

    def _declare(self, name: str, declaration: Declaration) -> None:
        """Hands a declaration of the repository to the loop; labels without one go to the registry."""
        self.loop.declare(name, declaration)
        if declaration != Declaration():
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
        """See `LoadObserver.versions_of`."""
        return self.loop.selections.get(name, _SELECT_ALL).versions(available, policy)

    # --- the loop: CanaryServer

    def versions(self, model: str, stable: int | None) -> Mapping[int, VersionSight] | None:
        """See `CanaryServer.versions`; accesses no storage."""
        files = self._files.get(model)
        if files is None:
            return None
        with self._lifecycle.queue.lock:  # no swap in between
            ready = self._registry.entries.get(model, _NO_ENTRY).ready
            origin = self._lifecycle.origin(model)
        statuses = self._states.versions(model)
        whole = self._failures.get(model)
        served = self._served.get(model)
        if origin is not None and (served is None or served.state != origin.state):
            served = self._served[model] = _Files(split_markers(origin.state)[0])
        reference = None if stable is None else ready.get(stable)
        present = set(versions_in(files.state))
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
        shares = () if traffic.candidate is None else ((traffic.candidate, traffic.weight),)
        return Route(
            traffic.stable,
            traffic.candidate,
            shares,
            traffic.salt,
            tuple(map(Attribute.parse, rollout.sticky)),
            tuple(map(MatchRule.parse, rollout.match)),
            rollout.override,
            shadow,
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
                if self._lifecycle.origin(model) is not None:
                    self._failures.pop(model, None)
                    self._load(model)
            except SupersededError:
                pass  # by a newer load, which selects the same
            except Exception as error:  # boundary: the top of the thread
                if not self._lifecycle.queue.closed:
                    if not isinstance(error, ConchError):
                        log.exception("model '%s' could not be loaded for its rollout", model)
                    self._failures[model] = as_conch_error(error).message, self.events.now()
                    self.ended(model)
            with self._lock:
                follower = self._followers[model]
                if not follower.again or self._lifecycle.queue.closed:
                    del self._followers[model]
                    return
                follower.again = False

    def changed(self, model: str, transition: Transition) -> None:
        """See `CanaryServer.changed`."""
        with self._lock:
            self._transitions[model, transition.state.value, transition.called] += 1
        if self._residency is not None:
            keep = self._residency.release if transition.state in RESTING else self._residency.hold
            keep(model, "rollout")
        self._states.rollout_changed(model, _transition(transition))

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

    # --- calls: RolloutControl

    def rollout(self, name: str) -> RolloutReport:
        """See `RolloutControl.rollout`."""
        identifier = self._identifier(name)
        return self._report(identifier, self.loop.status(identifier))

    def summary(self, model: str) -> RolloutReport | None:
        """A model's rollout without counters and history, from any thread at once; None for none."""
        progress = self.loop.progress(model)
        if progress is None or not progress.number:
            return None
        return RolloutReport(
            model,
            "",
            progress.number,
            progress.state.value,
            progress.step,
            weight=_percent(progress.weight),
            shadow=_percent(progress.shadow),
            stable=progress.stable,
            candidate=progress.candidate,
            previous=progress.previous,
            reason=progress.reason,
        )

    def counts(self) -> RolloutCounts:
        """The figures for metrics."""
        states = {}
        for model in sorted(self.loop.models):
            progress = self.loop.progress(model)
            if progress is not None and progress.number:
                states[model] = progress.state.value
        with self._lock:
            return RolloutCounts(states, dict(self._transitions))

    def rollouts(self) -> list[RolloutReport]:
        """See `RolloutControl.rollouts`."""
        found = []
        for model in sorted(self.loop.models):
            try:
                found.append(self._report(model, self.loop.status(model)))
            except NotFoundError:
                continue  # it has ended since
        return found

    def start_rollout(self, name: str, declaration: Mapping[str, Any], again: bool) -> RolloutReport:
        """See `RolloutControl.start_rollout`."""
        identifier = self._identifier(name)
        declared, problems = check_declaration(declaration, "the request")
        for problem in problems:
            raise problem.error()
        if declared.rollout is None and declared.labels:
            raise InvalidArgumentError("the request: rollout: is missing; labels alone start no rollout")
        before = self.loop.progress(identifier)
        source = self._source(identifier)
        if source is not None:  # a version that has come since the last load is a candidate, too
            try:
                self._declare(identifier, self._read(source, source.fingerprint()))
            except OSError as error:
                raise UnavailableError(f"{source.location} can't be read: {error}") from error
        named = self._labelled.get(identifier)
        if named:
            if declared.labels:
                self._registry.refuse_label_change(identifier)
            declared = replace(declared, labels=named)
        now = self.loop.progress(identifier)
        # A version that was held out until its files change has begun by itself.
        rested = before is not None and before.state in RESTING
        begun = rested and now is not None and now.state is State.LOADING
        if declared.rollout is not None:
            self.loop.start(identifier, declared, again, begun)
        elif not begun:
            self.loop.call(identifier, Call.START, again=again)
        return self._report(identifier, self.loop.status(identifier))

    def update_rollout(self, name: str, action: str, weight: float | None = None) -> RolloutReport:
        """See `RolloutControl.update_rollout`."""
        identifier = self._identifier(name)
        if action not in ROLLOUT_ACTIONS:
            raise InvalidArgumentError(f"action: '{action}' is none of {', '.join(ROLLOUT_ACTIONS)}")
        if action != _WEIGHT and weight is not None:
            raise InvalidArgumentError(f"weight: has no effect with action '{action}'; remove it")
        if action == _DELETE:
            before = self.loop.status(identifier)
            if before.declaration.rollout is None:
                raise NotFoundError(f"model '{name}' has no rollout")
            self.loop.change(identifier, lambda each: Declaration(each.labels))
            try:
                return self._report(identifier, self.loop.status(identifier))
            except NotFoundError:
                return RolloutReport(identifier, "api", before.progress.number, State.IDLE.value)
        call = Call.SET_WEIGHT if action == _WEIGHT else Call(action)
        self.loop.call(identifier, call, None if weight is None else _share(weight))
        return self._report(identifier, self.loop.status(identifier))

    def set_label(self, name: str, label: str, version: int | None) -> str:
        """Has a label of a model name a ready version, or removes it with None; returns the identifier.

        Raises:
            InvalidArgumentError: The label is malformed, or has a meaning of its own.
            FailedPreconditionError: A file or the repository declares the labels of this model.
            NotFoundError: There is no such model, version or, where it is to be removed, label.
            UnavailableError: The version is not ready.
        """
        check_label(label)
        if label in _OWN_LABELS:
            raise InvalidArgumentError(f"label '{label}': this name is the rollout's own; choose another one")
        identifier, _ = self._registry.find(name)
        self._registry.refuse_label_change(identifier)
        if version is not None:
            self._registry.resolve(identifier, str(version))
        if identifier not in self._files:
            source = self._source(identifier)
            if source is None:
                raise NotFoundError(f"model '{name}' is in no repository, so that labels can't be kept")
            self.begins(source, source.fingerprint())

        def edit(declared: Declaration) -> Declaration:
            labels = dict(declared.labels)
            if version is not None:
                labels[label] = version
            elif labels.pop(label, None) is None:
                raise NotFoundError(f"model '{name}' has no label '{label}'")
            return Declaration(labels, declared.rollout)

        self.loop.change(identifier, edit)
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

    def _report(self, model: str, status: RolloutStatus) -> RolloutReport:
        progress, rollout = status.progress, status.declaration.rollout
        fields = as_json(status.declaration)
        verdict = status.verdict
        steps = () if rollout is None else rollout.steps
        lasts_ns = 0
        if progress.state in (State.STEP, State.PAUSED) and progress.step < len(steps):
            lasts_ns = steps[progress.step].least_ns
        elif progress.state is State.BAKING and rollout is not None:
            lasts_ns = rollout.keep_ns
        return RolloutReport(
            model,
            "file" if status.from_file else "api",
            progress.number,
            progress.state.value,
            progress.step,
            tuple(map(str, steps)),
            lasts_ns / _S,
            status.seconds,
            _percent(progress.weight),
            _percent(progress.shadow),
            progress.stable,
            progress.candidate,
            progress.previous,
            "" if verdict is None else verdict.result.value,
            "" if verdict is None else verdict.sentence,
            progress.reason,
            status.note,
            tuple(sorted(each.version for each in progress.refused)),
            tuple(self._sides(model, status)),
            status.window.compared,
            status.window.mismatched,
            dict(status.declaration.labels),
            fields.get("rollout", {}),
            tuple(map(_transition, status.history)),
            self._shadows.report(model),
        )

    def _sides(self, model: str, status: RolloutStatus) -> list[RolloutSide]:
        progress, window = status.progress, status.window
        route = self._registry.entries.get(model, _NO_ENTRY).route
        counts = {"stable": window.stable, "candidate": window.candidate}
        if progress.state is State.BAKING:  # what was the candidate is stable
            counts = {"stable": window.candidate, "candidate": window.stable}
        sides = []
        for role, version in (("stable", progress.stable), ("candidate", progress.candidate)):
            if version is not None:
                each = counts[role]
                traffic = 0.0 if route is None else route.traffic(version)
                p99 = p99_ns(each)
                sides.append(
                    RolloutSide(
                        version,
                        role,
                        traffic,
                        each.requests,
                        each.failures,
                        None if p99 is None else p99 / 1e6,
                    )
                )
        return sides


def _declared(source: ModelSource, state: Fingerprint) -> tuple[Mapping[str, int], Declaration]:
    """Labels of a model's repository, and the declaration of its file or repository.

    Labels alone are none: the registry follows them as it publishes versions, so that no request meets a
    label whose old version has gone.
    """
    if has_rollout(state):
        place = f"{source.location}/{ROLLOUT_FILE}"
        try:
            text = source.read(ROLLOUT_FILE).decode()
        except UnicodeDecodeError:
            raise InvalidArgumentError(f"{place} is not UTF-8; write it as text") from None
        return {}, parse_toml(text, place)
    model = unwrapped(source)
    if not isinstance(model, Labelled):
        return {}, Declaration()
    labels = {label: version for label, version in model.labels().items() if label not in _OWN_LABELS}
    tag = model.rollout_declaration() if isinstance(model, Declared) else None
    if tag is None:
        return labels, Declaration()
    place = f"the rollout declared with {source.location}"
    declared = (parse_json if tag.lstrip().startswith("{") else parse_toml)(tag, place)
    if declared.labels:
        raise InvalidArgumentError(f"{place}: labels: they are those of the repository; remove the table")
    rollout = declared.rollout
    if rollout is not None and not rollout.split:
        candidate = next((model.labels()[each] for each in _CANDIDATES if each in model.labels()), None)
        rollout = None if candidate is None else replace(rollout, candidate=candidate)
    return labels, Declaration() if rollout is None else Declaration(labels, rollout)


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


def _transition(transition: Transition) -> RolloutTransition:
    return RolloutTransition(
        transition.seconds,
        transition.number,
        transition.state.value,
        transition.step,
        _percent(transition.weight),
        transition.stable,
        transition.candidate,
        transition.reason,
        transition.called,
    )


def _percent(share: int) -> float:
    return share * 100 / WHOLE


def _share(weight: float) -> int:
    if not 0 <= weight <= 100:
        raise InvalidArgumentError(f"weight: must be a percentage from 0 to 100, not {weight:g}")
    return round(weight * WHOLE / 100)

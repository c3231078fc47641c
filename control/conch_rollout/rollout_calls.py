"""Calls of operators on the rollouts of a loop, and the reports that they get; for a server and a fleet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from conch.core.errors import InvalidArgumentError, NotFoundError
from conch.core.rollouts import ROLLOUT_ACTIONS, RolloutReport, RolloutSide, RolloutTransition
from conch.core.version_text import check_label
from conch_control.managed_rollouts import Counts
from conch_rollout.guards import p99_ns
from conch_rollout.rollout_file import NEWEST, STABLE, WHOLE, Declaration, as_json, check_declaration
from conch_rollout.rollout_loop import RolloutLoop, RolloutStatus
from conch_rollout.rollout_state import RESTING, RolloutCommand, State, Transition

DELETE = "delete"
_WEIGHT = "weight"
OWN_LABELS = frozenset({"candidate", NEWEST})
"""Names that have a meaning of their own."""
_S = 1_000_000_000


class RolloutCalls(ABC):
    """Implements `conch.core.rollouts.RolloutControl` with a loop."""

    loop: RolloutLoop

    @abstractmethod
    def _identifier(self, name: str) -> str:
        """The identifier of a model. Raises NotFoundError: it has no declaration, and does not serve."""

    @abstractmethod
    def _declare_again(self, identifier: str) -> None:
        """Declares what the repository has of a model now."""

    @abstractmethod
    def _traffic(self, model: str, version: int) -> float:
        """Percent of the requests without a version that a version gets."""

    @abstractmethod
    def _with_labels(self, identifier: str, declared: Declaration) -> Declaration:
        """A call's declaration with the labels of the model's repository, if that has some."""

    def _shadow_report(self, model: str) -> Mapping[str, Any]:
        """Report of the model's newest shadow; empty without one."""
        return {}

    def _managed_state(self, model: str) -> str:
        """State of the rollout as its manager reports it, in JSON; empty without a manager."""
        return ""

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
        declared = checked(declaration)
        if declared.rollout is None and declared.labels:
            raise InvalidArgumentError("the request: rollout: is missing; labels alone start no rollout")
        before = self.loop.progress(identifier)
        self._declare_again(identifier)
        declared = self._with_labels(identifier, declared)
        now = self.loop.progress(identifier)
        # A version that was held out until its files change has begun by itself, and may serve already.
        begun = (
            before is not None and now is not None and before.state in RESTING and now.number != before.number
        )
        if declared.rollout is not None:
            self.loop.start(identifier, declared, again, begun)
        elif not begun:
            self.loop.call(identifier, RolloutCommand.START, again=again)
        return self._report(identifier, self.loop.status(identifier))

    def update_rollout(self, name: str, action: str, weight: float | None = None) -> RolloutReport:
        """See `RolloutControl.update_rollout`."""
        identifier = self._identifier(name)
        if action not in ROLLOUT_ACTIONS:
            raise InvalidArgumentError(f"action: '{action}' is none of {', '.join(ROLLOUT_ACTIONS)}")
        if action != _WEIGHT and weight is not None:
            raise InvalidArgumentError(f"weight: has no effect with action '{action}'; remove it")
        if action == DELETE:
            before = self.loop.status(identifier)
            if before.declaration.rollout is None:
                raise NotFoundError(f"model '{name}' has no rollout")
            self.loop.change(identifier, lambda each: Declaration(each.labels))
            try:
                return self._report(identifier, self.loop.status(identifier))
            except NotFoundError:
                return RolloutReport(identifier, "api", before.progress.number, State.IDLE.value)
        call = RolloutCommand.SET_WEIGHT if action == _WEIGHT else RolloutCommand(action)
        self.loop.call(identifier, call, None if weight is None else _share(weight))
        return self._report(identifier, self.loop.status(identifier))

    def _edit_label(self, name: str, identifier: str, label: str, version: int | None) -> None:
        """Changes a declared label, or removes it with None. Raises NotFoundError: there is no such label."""

        def edit(declared: Declaration) -> Declaration:
            labels = dict(declared.labels)
            if version is not None:
                labels[label] = version
            elif labels.pop(label, None) is None:
                raise NotFoundError(f"model '{name}' has no label '{label}'")
            return Declaration(labels, declared.rollout)

        self.loop.change(identifier, edit)

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
            "fleet" if status.managed_by else "file" if status.from_file else "api",
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
            _shown_labels(status),
            fields.get("rollout", {}),
            tuple(map(transition_of, status.history)),
            self._shadow_report(model),
            status.managed_by,
            self._managed_state(model),
        )

    def _sides(self, model: str, status: RolloutStatus) -> list[RolloutSide]:
        progress, window = status.progress, status.window
        if status.split:
            return [
                self._side(model, version, "stable" if version == progress.stable else "split", counts)
                for version, counts in sorted(status.split.items())
            ]
        counts = {"stable": window.stable, "candidate": window.candidate}
        if progress.state is State.BAKING:  # what was the candidate is stable
            counts = {"stable": window.candidate, "candidate": window.stable}
        versions = {"stable": progress.stable, "candidate": progress.candidate}
        return [
            self._side(model, version, role, counts[role])
            for role, version in versions.items()
            if version is not None
        ]

    def _side(self, model: str, version: int, role: str, counts: Counts) -> RolloutSide:
        p99 = p99_ns(counts)
        traffic = self._traffic(model, version)
        p99_ms = None if p99 is None else p99 / 1e6
        return RolloutSide(version, role, traffic, counts.requests, counts.failures, p99_ms)


def check_own_label(label: str) -> None:
    """Raises InvalidArgumentError: a call can't set this label."""
    check_label(label)
    if label in OWN_LABELS:
        raise InvalidArgumentError(f"label '{label}': this name is the rollout's own; choose another one")


def checked(declaration: Mapping[str, Any]) -> Declaration:
    """The declaration of a call. Raises InvalidArgumentError: a field is wrong."""
    declared, problems = check_declaration(declaration, "the request")
    for problem in problems:
        raise problem.error()
    return declared


def transition_of(transition: Transition) -> RolloutTransition:
    """A transition as operators see it."""
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


def _shown_labels(status: RolloutStatus) -> dict[str, int]:
    """The declared labels; after a promotion ``stable`` names another version than it was declared with."""
    labels, stable = dict(status.declaration.labels), status.progress.stable
    if STABLE in labels and stable is not None:
        labels[STABLE] = stable
    return labels


def _share(weight: float) -> int:
    if not 0 <= weight <= 100:
        raise InvalidArgumentError(f"weight: must be a percentage from 0 to 100, not {weight:g}")
    return round(weight * WHOLE / 100)

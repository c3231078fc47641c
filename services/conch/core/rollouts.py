"""Rollouts between versions, as front ends and operators see and change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

ROLLOUT_ACTIONS = ("pause", "resume", "advance", "weight", "promote", "abort", "rollback", "delete")


@dataclass(frozen=True, slots=True)
class RolloutSide:
    """A version that takes part.

    Attributes:
        role: ``stable``, ``candidate``, or ``split`` for the other versions of a split.
        traffic: Percent of the requests without a version that it gets now.
        requests: Requests in the current window that succeeded or failed, without cache hits; of a split,
            since the version was loaded.
        failures: Those that the server failed.
        p99_ms: Upper bound of their p99; None if unknown.
    """

    version: int
    role: str
    traffic: float = 0.0
    requests: int = 0
    failures: int = 0
    p99_ms: float | None = None


@dataclass(frozen=True, slots=True)
class RolloutTransition:
    """A change of a rollout.

    Attributes:
        seconds: Unix time.
        id: Number of the rollout.
        weight: The candidate's percent of the requests.
        called: By a call.
    """

    seconds: float
    id: int
    state: str
    step: int
    weight: float
    stable: int | None
    candidate: int | None
    reason: str
    called: bool = False


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """A model's labels and rollout.

    Attributes:
        source: ``file`` if rollout.toml declares them, ``api`` if calls do, ``fleet`` if another process
            manages them.
        id: Number of the newest rollout; 0 before the first.
        state: ``IDLE``, ``LOADING``, ``STEP``, ``PAUSED``, ``BAKING``, ``ROLLING_BACK``, ``ABORTING``,
            ``ABORTED``, ``DONE``, ``FAILED`` or ``SPLIT``.
        step: Current step, from 0.
        steps: The steps, as declared.
        step_seconds: Least duration of the current step, or of baking; 0 for none.
        seconds: Age of the state, or of its window of counters.
        weight: The candidate's percent of the requests.
        shadow: Percent of the requests that the candidate gets a copy of.
        stable: The version that an empty version means.
        candidate: The version under test.
        previous: Stable before the last promotion, while a rollback to it is possible.
        result: ``pass``, ``fail`` or ``inconclusive``; empty without a verdict.
        verdict: The last verdict on the window, in a sentence.
        reason: Reason for which the state was entered.
        note: A sentence if the traffic is too low for the step; versions of a split that can't serve.
        refused: Versions that are held out.
        sides: Counters of the window, by version.
        compared: Shadow pairs of the window that were compared.
        mismatched: Those of them that differ.
        labels: Versions by declared label; ``stable`` as it is now.
        declaration: The table ``rollout`` as JSON; empty for labels alone.
        history: Transitions, oldest first.
        shadow_report: Report of the newest shadow, see `Shadow.as_json`; empty without one.
        managed_by: The process that runs the rollout on several servers; empty for the server itself.
        managed_state: Its state of the rollout, as JSON; for that process alone.
    """

    model: str
    source: str
    id: int
    state: str
    step: int = 0
    steps: tuple[str, ...] = ()
    step_seconds: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0
    shadow: float = 0.0
    stable: int | None = None
    candidate: int | None = None
    previous: int | None = None
    result: str = ""
    verdict: str = ""
    reason: str = ""
    note: str = ""
    refused: tuple[int, ...] = ()
    sides: tuple[RolloutSide, ...] = ()
    compared: int = 0
    mismatched: int = 0
    labels: Mapping[str, int] = field(default_factory=dict)
    declaration: Mapping[str, Any] = field(default_factory=dict)
    history: tuple[RolloutTransition, ...] = ()
    shadow_report: Mapping[str, Any] = field(default_factory=dict)
    managed_by: str = ""
    managed_state: str = ""

    @property
    def rolls(self) -> bool:
        """True unless only labels are declared."""
        return bool(self.declaration)

    def as_object(self) -> dict[str, Any]:
        """The report as JSON."""
        found = asdict(self)
        del found["managed_state"]
        return found


class RolloutControl(Protocol):
    """Rollouts of a server; any thread.

    Methods raise NotFoundError for a model without labels and rollout.
    """

    def rollout(self, name: str) -> RolloutReport:
        """A model's labels and rollout."""

    def rollouts(self) -> list[RolloutReport]:
        """Labels and rollouts of all models that have some, by name."""

    def start_rollout(self, name: str, declaration: Mapping[str, Any], again: bool) -> RolloutReport:
        """Declares and starts a rollout.

        Args:
            name: The model.
            declaration: Tables ``rollout`` and, optionally, ``labels``, with the fields of rollout.toml;
                empty to start what is declared.
            again: Also with a candidate that was held out.

        Raises:
            InvalidArgumentError: A field is wrong.
            FailedPreconditionError: One runs, a file declares it, or the candidate is missing or held out.
        """

    def update_rollout(self, name: str, action: str, weight: float | None = None) -> RolloutReport:
        """Changes a rollout by one of `ROLLOUT_ACTIONS`; `weight` is a percentage, for that action.

        ``delete`` ends a rollout that a call has declared, and forgets it but for the versions held out.

        Raises:
            FailedPreconditionError: Its state does not allow the action, or a file declares it.
            InvalidArgumentError: The weight is missing or out of range, or the action is unknown.
        """

"""Data of the plans of rollouts: inputs, saved progress and actions.

Inputs: `VersionSight`, `RolloutCommand`. Kept over restarts: `Progress`. Outputs: the actions, and `Note`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from conch.core.errors import InvalidArgumentError


class State(Enum):
    """State of a model's rollout; `rollout_plan` has the transitions."""

    IDLE = "IDLE"
    LOADING = "LOADING"
    STEP = "STEP"
    PAUSED = "PAUSED"
    BAKING = "BAKING"
    ROLLING_BACK = "ROLLING_BACK"
    ABORTING = "ABORTING"
    ABORTED = "ABORTED"
    DONE = "DONE"
    FAILED = "FAILED"
    SPLIT = "SPLIT"


RESTING = frozenset({State.IDLE, State.FAILED, State.ABORTED, State.DONE})
LIVE = frozenset({State.LOADING, State.STEP, State.PAUSED})


class RolloutCommand(Enum):
    """Call of an operator that changes a rollout."""

    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    ADVANCE = "advance"
    SET_WEIGHT = "set_weight"
    PROMOTE = "promote"
    ABORT = "abort"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class VersionSight:
    """A version as repository and server show it.

    Attributes:
        files: Digest of its files in the repository; empty if it has none.
        serves: Digest of the files that the ready copy was loaded from; empty if none is ready.
        failure: Error of its last load; empty if that did not fail.
        since: Time of its last transition.
        backs_off: Its workers fail again and again.
        differences: Ways in which its interface differs from stable's; None while not compared.
        alarm: Reason for which a server of the fleet has left it by itself; empty if none has.
    """

    files: str = ""
    serves: str = ""
    failure: str = ""
    since: float = 0.0
    backs_off: bool = False
    differences: tuple[str, ...] | None = None
    alarm: str = ""

    @property
    def exists(self) -> bool:
        """True if it has files, or still serves."""
        return bool(self.files or self.serves)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A version that is held out until the digest of its files changes."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a model's rollout, saved for restarts.

    Attributes:
        number: Number of the newest rollout, which names it and its salt; 0 before the first.
        stable: The version that an empty version means; None as in Triton.
        candidate: The version under test, or the one that an abort releases.
        digest: Its files.
        previous: Stable before the last promotion.
        step: Current step, from 0.
        weight: The candidate's share, of `WHOLE`.
        shadow: Share of mirrored requests, of `WHOLE`.
        reason: Reason for which the state was entered.
        called: A call led to the state.
        refused: Versions held out, oldest first.
        declared: Digest of the table ``[rollout]`` that this belongs to; empty for none.
        declared_stable: The label ``stable`` that was followed last.
        places: Places of a split, see `split_places`; empty otherwise.
    """

    state: State = State.IDLE
    number: int = 0
    stable: int | None = None
    candidate: int | None = None
    digest: str = ""
    previous: int | None = None
    step: int = 0
    weight: int = 0
    shadow: int = 0
    reason: str = ""
    called: bool = False
    refused: tuple[Refusal, ...] = ()
    declared: str = ""
    declared_stable: int | None = None
    places: tuple[tuple[int, int], ...] = ()

    @property
    def is_over(self) -> bool:
        """True if it matters only to the number of the next rollout."""
        return self == Progress(number=self.number)

    def refusal(self, version: int) -> Refusal | None:
        """The refusal of a version, if any."""
        return next((each for each in self.refused if each.version == version), None)


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of a rollout's progress.

    Attributes:
        seconds: Unix time.
        number: Number of the rollout.
        weight: The candidate's share, of `WHOLE`.
        reason: Its reason; empty if it follows from the declaration.
        called: By a call.
    """

    seconds: float
    number: int
    state: State
    step: int
    weight: int
    stable: int | None
    candidate: int | None
    reason: str
    called: bool

    @classmethod
    def of(cls, progress: Progress, seconds: float) -> Transition:
        """The transition that has led to a progress."""
        return cls(
            seconds,
            progress.number,
            progress.state,
            progress.step,
            progress.weight,
            progress.stable,
            progress.candidate,
            progress.reason,
            progress.called,
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Division of the requests without a version.

    Attributes:
        weight: The candidate's share, of `WHOLE`.
        shadow_percent: Percent of the requests that the candidate gets a copy of.
        salt: Key of the hash that gives each user a side.
        places: Places of a split, instead of the weight; stable has those of versions that can't serve.
        rollout: Number of the rollout; 0 if stable gets all.
    """

    stable: int
    candidate: int | None = None
    weight: int = 0
    shadow_percent: float = 0.0
    salt: bytes = b""
    places: tuple[tuple[int, int], ...] = ()
    rollout: int = 0


@dataclass(frozen=True, slots=True)
class Publish:
    """Publishes a route, with what the declaration says about keys and matches; None for none."""

    traffic: Traffic | None


@dataclass(frozen=True, slots=True)
class PublishLabels:
    """Publishes all labels of the model; requests for one whose version is not ready fail."""

    labels: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Save:
    """Writes the progress to the state directory."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class Select:
    """Versions to load besides those of the version policy, and versions not to load."""

    hold: frozenset[int] = frozenset()
    out: frozenset[int] = frozenset()

    def versions(
        self, available: Collection[int], policy: Callable[[Collection[int]], Collection[int]]
    ) -> list[int]:
        """Versions to load of the available ones, ascending.

        Args:
            available: Versions that have files.
            policy: The version policy; it may raise InvalidArgumentError if it selects none.

        Raises:
            InvalidArgumentError: The policy selects none, and none is held.
        """
        held = self.hold.intersection(available)
        try:
            selected = policy([version for version in available if version not in self.out])
        except InvalidArgumentError:
            if not held:
                raise
            selected = ()
        return sorted(held.union(selected))


Action = Publish | PublishLabels | Save | Select


@dataclass(frozen=True, slots=True)
class Note:
    """A decision, for the log; `level` as in `logging`."""

    text: str
    level: int = logging.INFO

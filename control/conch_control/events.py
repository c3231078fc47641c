"""Event log of all model versions, numbered, with any number of readers.

A reader continues from the last revision it knows. The log keeps a limited number of events; a reader that
is too late must read the index first. Each server process has an epoch, as revisions restart with it.

Owns: the events. Locks: one condition.
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from conch.core.errors import OutOfRangeError
from conch.core.rollouts import RolloutTransition
from conch_control.version_phase import Phase

KEPT = 10_000
"""Default capacity of the log."""


def never() -> bool:
    """Default of `given_up`."""
    return False


@dataclass(frozen=True, slots=True)
class Event:
    """A transition of a model version.

    Attributes:
        revision: Number of the event, from 1, without gaps.
        version: The version; 0 for the whole model.
        reason: Text for operators; may be empty.
        seconds: Unix time.
        rollout: A transition of the model's rollout; version, phase and reason repeat then what holds for the
            whole model.
    """

    revision: int
    model: str
    version: int
    phase: Phase
    reason: str
    seconds: float
    rollout: RolloutTransition | None = None


class EventLog:
    """The log of one server; thread-safe.

    `epoch` identifies this process's log, at random; `entries` are the `kept` newest events, oldest first.
    """

    def __init__(self, wall_clock: Callable[[], float], kept: int = KEPT) -> None:
        self.epoch = uuid.uuid4().hex
        self._wall_clock = wall_clock
        self._changed = threading.Condition()
        self.entries: deque[Event] = deque(maxlen=kept)
        self._revision = 0
        self._closed = False

    @property
    def revision(self) -> int:
        """Revision of the newest event, 0 before the first."""
        return self._revision

    def now(self) -> float:
        """Unix time of the log's clock."""
        return self._wall_clock()

    def append(
        self,
        model: str,
        version: int,
        phase: Phase,
        reason: str = "",
        rollout: RolloutTransition | None = None,
    ) -> Event:
        """Adds an event and wakes the readers."""
        with self._changed:
            self._revision += 1
            event = Event(self._revision, model, version, phase, reason, self._wall_clock(), rollout)
            self.entries.append(event)
            self._changed.notify_all()
        return event

    def after(
        self, revision: int, timeout_s: float | None = 0.0, given_up: Callable[[], bool] = never
    ) -> list[Event]:
        """The events after a revision, oldest first; waits for the first one.

        Empty after a timeout, `close` or `given_up`, which is evaluated after each `wake`.

        Raises:
            OutOfRangeError: Events were dropped, or the revision is not from this log.
        """
        with self._changed:
            self._check(revision)
            self._changed.wait_for(lambda: self._revision > revision or self._closed or given_up(), timeout_s)
            self._check(revision)
            return self._newer_than(revision)

    def wake(self) -> None:
        """Makes all readers evaluate `given_up`."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all waits; events can still be added and read."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def _newer_than(self, revision: int) -> list[Event]:
        # Revisions have no gaps, so only new events are visited, however long the log is.
        return list(islice(reversed(self.entries), max(self._revision - revision, 0)))[::-1]

    def _check(self, revision: int) -> None:
        oldest = self._revision - len(self.entries)
        if not oldest <= revision <= self._revision:
            raise OutOfRangeError(
                f"events after revision {revision} can't be had: the log has those from {oldest + 1} to "
                f"{self._revision}; read the index and go on from its revision"
            )

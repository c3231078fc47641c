"""What happens to models, as a numbered log that any number of readers follow.

A reader that has read up to a revision goes on from there, also after it was away. The log keeps a limited
number of events: a reader that comes too late is told to look at the whole state first. Revisions of another
life of the server say nothing in this one, so each life has an epoch.
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from conch.core.errors import OutOfRangeError
from conch_control.lifecycle.version_phase import Phase

KEPT = 10_000
"""Most events that a log keeps."""


def never() -> bool:
    """Says no."""
    return False


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a model version.

    Attributes:
        revision: Number of the event, from 1, without gaps.
        model: Model name.
        version: The version; 0 for what concerns the model as a whole.
        phase: What the version is in from now on.
        reason: Why, where there is something to say.
        seconds: When, in seconds since 1970, for people to read.
    """

    revision: int
    model: str
    version: int
    phase: Phase
    reason: str
    seconds: float


class EventLog:
    """The log of one server; any thread may write or read.

    Args:
        wall_clock: Seconds since 1970.
        kept: Most events kept.

    Attributes:
        epoch: Name of this life of the server.
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
        """The revision of the newest event, 0 before the first."""
        return self._revision

    def now(self) -> float:
        """Seconds since 1970, as events tell them."""
        return self._wall_clock()

    def append(self, model: str, version: int, phase: Phase, reason: str = "") -> Event:
        """Adds an event and wakes those who wait for one."""
        with self._changed:
            self._revision += 1
            event = Event(self._revision, model, version, phase, reason, self._wall_clock())
            self.entries.append(event)
            self._changed.notify_all()
        return event

    def after(
        self, revision: int, timeout_s: float | None = 0.0, given_up: Callable[[], bool] = never
    ) -> list[Event]:
        """The events after a revision, waiting for one if there is none yet.

        Args:
            revision: The last revision that the caller knows.
            timeout_s: How long to wait for an event, in seconds; None for ever.
            given_up: Says that the caller does not want to wait any longer; asked after each `wake`.

        Returns:
            The events, oldest first; none after the timeout, or once the log is closed or the wait given up.

        Raises:
            OutOfRangeError: Some of them have been dropped, or the revision is not from this log.
        """
        with self._changed:
            self._check(revision)
            self._changed.wait_for(lambda: self._revision > revision or self._closed or given_up(), timeout_s)
            self._check(revision)
            return self._newer_than(revision)

    def wake(self) -> None:
        """Has all who wait look whether they still want to."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all waiting; events can still be added and read."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether nobody waits any more."""
        return self._closed

    def _newer_than(self, revision: int) -> list[Event]:
        # There are no gaps; every watch asks after every event, and the log may be long.
        return list(islice(reversed(self.entries), max(self._revision - revision, 0)))[::-1]

    def _check(self, revision: int) -> None:
        oldest = self._revision - len(self.entries)
        if not oldest <= revision <= self._revision:
            raise OutOfRangeError(
                f"events after revision {revision} can't be had: the log has those from {oldest + 1} to "
                f"{self._revision}; read the index and go on from its revision"
            )

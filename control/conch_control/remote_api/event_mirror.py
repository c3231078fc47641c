"""The event log of a server in another process, as its readers would see it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from conch.core.errors import OutOfRangeError
from conch_control.events import KEPT, Event, EventLog, never
from conch_control.lifecycle.version_phase import Phase


class EventMirror(EventLog):
    """A copy of another process's log, with its epoch and its numbers.

    Until it is known what that log is, `epoch` is empty and its reader waits. When events have been missed,
    or the other server has been started again, the reader gets OutOfRangeError until it has read the index.
    There should be one reader: when somebody has read the index, that stands for all.

    Args:
        kept: Most events kept.
    """

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__(lambda: 0.0, kept)
        self.epoch = ""
        # Whether nobody has read the index since the log was lost sight of. The numbers alone can't tell: the
        # other server may have been started again and have got just as far.
        self._unseen = False

    @property
    def position(self) -> tuple[str, int]:
        """The epoch, and the revision of the newest event."""
        with self._changed:
            return self.epoch, self._revision

    def append(self, model: str, version: int, phase: Phase, reason: str = "") -> NoReturn:
        """Refuses: events come from the other process only."""
        raise TypeError("a mirror takes its events from the log that it mirrors")

    def begin(self, epoch: str, revision: int) -> None:
        """Takes in where a stream of events begins; readers are told if something was missed before."""
        with self._changed:
            known = self.epoch
            if epoch == known and revision <= self._revision:
                return
            self._move(epoch, revision)
            self._unseen = bool(known)

    def index_read(self, epoch: str, revision: int) -> None:
        """Takes in that the reader has got an index, and goes on from there."""
        with self._changed:
            if epoch != self.epoch:
                self._move(epoch, revision)
            self._unseen = False

    def extend(self, epoch: str, events: Sequence[Event]) -> bool:
        """Takes in events that follow; those that are known already are left out.

        Returns:
            Whether they do follow; if not, the rest was not taken in.
        """
        with self._changed:
            if epoch != self.epoch:
                return False
            for event in events:
                if event.revision <= self._revision:
                    continue
                if event.revision > self._revision + 1:
                    return False
                self._revision = event.revision
                self.entries.append(event)
            self._changed.notify_all()
            return True

    def after(
        self, revision: int, timeout_s: float | None = 0.0, given_up: Callable[[], bool] = never
    ) -> list[Event]:
        """The events after a revision, waiting for one if there is none yet; see `EventLog.after`.

        A revision that is ahead of what has come is no error: an index may be faster than the events.
        """
        with self._changed:
            epoch = self.epoch
            self._check(revision)
            self._changed.wait_for(
                lambda: (
                    self._revision > revision
                    or self._unseen
                    or (epoch and self.epoch != epoch)
                    or self._closed
                    or given_up()
                ),
                timeout_s,
            )
            if epoch and self.epoch != epoch:
                # Another reader has read the index already; this one has not.
                raise self._lost()
            self._check(revision)
            return self._newer_than(revision)

    def _check(self, revision: int) -> None:
        if self._unseen:
            raise self._lost()
        if revision <= self._revision:
            super()._check(revision)

    def _lost(self) -> OutOfRangeError:
        return OutOfRangeError(
            "events of the server have been missed, or it has been started again: read the index and go on "
            "from its revision"
        )

    def _move(self, epoch: str, revision: int) -> None:
        self.epoch, self._revision = epoch, revision
        self.entries.clear()
        self._changed.notify_all()

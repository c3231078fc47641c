"""A copy of another process's event log, for local readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from conch.core.errors import OutOfRangeError
from conch_control.events import KEPT, Event, EventLog, never
from conch_control.lifecycle.version_phase import Phase


class EventMirror(EventLog):
    """An event log with the epoch and revisions of another process.

    States: `epoch` is empty until the first message; then the mirror is current, or stale after missed
    events or a restart of the server. While stale, the reader gets OutOfRangeError until `index_read`.
    There must be one reader, as one `index_read` clears the state for all.

    Args:
        kept: Capacity in events.
    """

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__(lambda: 0.0, kept)
        self.epoch = ""
        # No index was read since events were missed. Revisions alone can't tell: a restarted server
        # may have reached the same number.
        self._stale = False

    @property
    def position(self) -> tuple[str, int]:
        """Epoch and newest revision."""
        with self._changed:
            return self.epoch, self._revision

    def append(self, model: str, version: int, phase: Phase, reason: str = "") -> NoReturn:
        """Not supported: events come only from the other process."""
        raise TypeError("a mirror takes its events from the log that it mirrors")

    def begin(self, epoch: str, revision: int) -> None:
        """Records where a stream starts; the mirror becomes stale if events are missing before."""
        with self._changed:
            known = self.epoch
            if epoch == known and revision <= self._revision:
                return
            self._reset(epoch, revision)
            self._stale = bool(known)

    def index_read(self, epoch: str, revision: int) -> None:
        """Records that the reader has read an index and continues from it."""
        with self._changed:
            if epoch != self.epoch:
                self._reset(epoch, revision)
            self._stale = False

    def extend(self, epoch: str, events: Sequence[Event]) -> bool:
        """Adds events, skipping known ones; returns False if they leave a gap or are of another epoch."""
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
        """See `EventLog.after`.

        A revision beyond the newest event is valid: an index may arrive before the events.
        """
        with self._changed:
            epoch = self.epoch
            self._check(revision)
            self._changed.wait_for(
                lambda: (
                    self._revision > revision
                    or self._stale
                    or (epoch and self.epoch != epoch)
                    or self._closed
                    or given_up()
                ),
                timeout_s,
            )
            if epoch and self.epoch != epoch:
                # Another reader has read the index, this one has not.
                raise self._lost_events()
            self._check(revision)
            return self._newer_than(revision)

    def _check(self, revision: int) -> None:
        if self._stale:
            raise self._lost_events()
        if revision <= self._revision:
            super()._check(revision)

    def _lost_events(self) -> OutOfRangeError:
        return OutOfRangeError(
            "events of the server have been missed, or it has been started again: read the index and go on "
            "from its revision"
        )

    def _reset(self, epoch: str, revision: int) -> None:
        self.epoch, self._revision = epoch, revision
        self.entries.clear()
        self._changed.notify_all()

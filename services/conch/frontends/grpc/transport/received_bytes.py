"""`ReceivedBytes`: bytes of received messages that no handler has yet, over all connections of a port.

Theory of operation. A call counts with the message that is being received, with messages that wait for
`read_next`, and with a compressed message until it is decompressed. Above half of the bound the port is
crowded until a quarter is left: only the oldest message's stream has its window enlarged, as on one
connection. Above the bound a call that brings more is refused, unless it has the oldest message and a handler
that waits for it. So the oldest one always ends, and the total passes the bound by that message at most.

A stream whose messages wait for `read_next` is not in line for the oldest: its window stays shut until its
handler reads, and others must not wait for that.

What the server holds besides, see `HeldBytes`, leaves less room for calls, but makes no port crowded.

Threads and locks: the loop's thread.
"""

from __future__ import annotations

from typing import Protocol

from conch.core.admission import HeldBytes


class Holder(Protocol):
    """A connection."""

    def release_crowded(self) -> None:
        """Enlarges the windows that may be again."""


class HoldingCall(Protocol):
    """A call.

    Attributes:
        stream_id: Its stream.
        counted: Its bytes in the total.
    """

    stream_id: int
    counted: int

    @property
    def wanted(self) -> bool:
        """True if the next message goes to a handler at once."""


class ReceivedBytes:
    """The bytes of one port.

    Attributes:
        held: Those of the server, which has these, too.
        total: The bytes.
        crowded: True if only the oldest message's stream has its window enlarged.
    """

    def __init__(self, held: HeldBytes) -> None:
        self.held = held
        self.total = 0
        self.crowded = False
        self._partial: dict[HoldingCall, Holder] = {}  # oldest first
        self._waiting: set[Holder] = set()  # connections with windows that are not enlarged
        self._released: HoldingCall | None = None  # the oldest, whose window has been enlarged

    def count(self, call: HoldingCall, holder: Holder, held: int, in_line: bool) -> None:
        """Sets the bytes of a call; `in_line` tells whether it receives a message and may be the oldest."""
        change = held - call.counted
        call.counted = held
        if in_line:
            self._partial.setdefault(call, holder)
        else:
            self._partial.pop(call, None)
            if call is self._released:
                self._released = None  # it may come back
        self.add(change)

    def add(self, change: int) -> None:
        """Changes the total."""
        self.total += change
        self.held.add(change)
        if self.total * 2 > self.held.most:
            self.crowded = True
        elif self.crowded and self.total * 4 <= self.held.most:
            self.crowded = False
        if self._waiting:
            self._release()

    def wait(self, holder: Holder) -> None:
        """Adds a connection, whose windows are enlarged again once there is room."""
        self._waiting.add(holder)
        self._release()

    def forget(self, holder: Holder) -> None:
        """Removes a connection that is closed; its calls have been set to no bytes."""
        self._waiting.discard(holder)

    def is_oldest(self, call: HoldingCall) -> bool:
        """True if the call has the oldest incomplete message of the port."""
        return next(iter(self._partial), None) is call

    def oldest_stream_of(self, holder: Holder) -> int:
        """Stream of the oldest message of all, if that connection has it; else 0."""
        oldest = next(iter(self._partial), None)
        return 0 if oldest is None or self._partial[oldest] is not holder else oldest.stream_id

    def refuses(self, call: HoldingCall) -> bool:
        """True if too much is held and the call is not the one that may complete its message."""
        return self.held.total > self.held.most and not (call.wanted and self.is_oldest(call))

    def _release(self) -> None:
        if not self.crowded:
            waiting, self._waiting = self._waiting, set()
            self._released = None
            for holder in waiting:
                holder.release_crowded()
            return
        oldest = next(iter(self._partial), None)
        if oldest is not self._released:
            self._released = oldest
            if oldest is not None:
                self._partial[oldest].release_crowded()

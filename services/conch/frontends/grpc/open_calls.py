"""The open calls of a port: how a stop waits for them, and drains streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from conch.frontends.unread_bytes import Backlog, UnreadBytes

MOST_UNREAD_BYTES = 64 << 20
"""Bytes that a stream's client has yet to read, above which models wait and no further message is taken."""


class Drained(Protocol):
    """A stream; `on_drain` as in `StreamRpc`."""

    on_drain: Callable[[int, str], None]


class OpenCalls:
    """The calls that are not answered yet; changed from any thread.

    Args:
        most_unread_bytes: Unread bytes of one stream above which its client is behind.

    Attributes:
        unary: The unary calls; each adds itself, atomic and without a lock.
        unread: Bytes that the clients of all streams have yet to read.
    """

    def __init__(self, most_unread_bytes: int = MOST_UNREAD_BYTES) -> None:
        self.unread = UnreadBytes()
        self._most_unread_bytes = most_unread_bytes
        self.unary: set[Any] = set()
        self._streams: set[Drained] = set()
        self._changed = threading.Condition()
        self._awaited = False
        self._drain: tuple[int, str] | None = None

    def new_backlog(self) -> Backlog:
        """The backlog of a further stream."""
        return Backlog(self.unread, self._most_unread_bytes)

    def add_stream(self, stream: Drained) -> None:
        """Adds a stream; drains it if streams are being drained."""
        self._streams.add(stream)
        if self._drain is not None:
            stream.on_drain(*self._drain)

    def discard(self, call: object) -> None:
        """Removes a call that has ended; takes a lock only once the server waits for the end of calls."""
        self.unary.discard(call)
        if self._awaited:
            self._notify()

    def discard_stream(self, stream: Drained) -> None:
        """Removes a stream that has ended."""
        self._streams.discard(stream)
        if self._awaited:
            self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def drain_streams(self, status: int, details: str, timeout_s: float) -> bool:
        """Drains all streams, also later ones: each closes when it has nothing in flight.

        Waits for their ends; returns whether there were any streams.
        """
        self._drain = (status, details)
        streams = list(self._streams)
        for stream in streams:
            stream.on_drain(status, details)
        with self._changed:
            self._awaited = True
            self._changed.wait_for(lambda: not self._streams, timeout_s)
        return bool(streams)

    def wait_until_none(self, timeout_s: float) -> bool:
        """Waits until no call is open; returns False after the timeout."""
        with self._changed:
            self._awaited = True
            return self._changed.wait_for(lambda: not (self.unary or self._streams), timeout_s)

"""Queue of responses from model threads to the event loop, with backpressure for slow readers."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import NamedTuple

from conch.frontends.unread_bytes import UnreadBytes

MOST_BYTES = 16 << 20
"""Bytes queued before `put` blocks; fewer if all queues together have too many."""


class Item(NamedTuple):
    """One response.

    Attributes:
        body: Encoded body; None for a final marker.
        status: HTTP status.
        final: True for the last response.
        retry_after_ms: When another try makes sense, for an error of which that is known.
    """

    body: bytes | None
    status: int
    final: bool
    retry_after_ms: int | None = None


class ResponseQueue:
    """Responses of one request, in order.

    Args:
        loop: The consuming event loop.
        unread: Counts what all queues of the front end hold.
        most_bytes: Bytes queued before `put` blocks.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, unread: UnreadBytes, most_bytes: int = MOST_BYTES
    ) -> None:
        self._loop = loop
        self._unread = unread
        self._most_bytes = most_bytes
        self._room = threading.Condition()
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._closed = False
        self._there: asyncio.Event = asyncio.Event()
        self._woken = False
        self._loop_thread = threading.get_ident()

    def put(self, item: Item) -> None:
        """Adds a response from any thread; blocks while the queue is full unless it is final."""
        size = len(item.body or b"")
        with self._room:
            if self._closed:
                return
            self._items.append(item)
            self._set_bytes(self._bytes + size)
            wake, self._woken = not self._woken, True
        if wake:
            try:
                self._loop.call_soon_threadsafe(self._there.set)
            except RuntimeError:  # the loop is closed
                return
        if item.final or threading.get_ident() == self._loop_thread:
            return
        with self._room:
            self._room.wait_for(lambda: self._closed or not self._behind())

    def _behind(self) -> bool:
        return self._unread.behind(self._bytes, self._most_bytes)

    def _set_bytes(self, size: int) -> None:
        """Sets what is queued; the caller has the lock."""
        self._unread.change(self._bytes, size)
        self._bytes = size

    async def take(self) -> Item | None:
        """Waits for the next response; None once the queue is closed."""
        while True:
            with self._room:
                if self._closed:
                    return None
                if self._items:
                    item = self._items.popleft()
                    self._set_bytes(self._bytes - len(item.body or b""))
                    if not self._behind():
                        self._room.notify_all()
                    return item
                self._there.clear()
                self._woken = False
            await self._there.wait()

    def close(self) -> None:
        """Drops queued and later responses; on the loop."""
        with self._room:
            self._closed = True
            self._items.clear()
            self._set_bytes(0)
            self._room.notify_all()
        self._there.set()

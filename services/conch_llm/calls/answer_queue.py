"""Queue from the threads of models to the event loop, which takes all that has come at once.

Race of a put and a take: `_woken` changes with the lock held, and is cleared only when nothing is queued.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Generic, TypeVar

from conch.frontends.unread_bytes import UnreadBytes

MOST_BYTES = 1 << 20
"""Bytes queued before `put` blocks, if it may; fewer if all queues together have too many."""

T = TypeVar("T")


class AnswerQueue(Generic[T]):
    """What one call has been answered and its consumer has not taken, in order.

    Args:
        unread: Counts what all queues of the front end hold.
        blocks: Whether `put` waits while the consumer is behind.
    """

    def __init__(self, unread: UnreadBytes, blocks: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._unread = unread
        self._blocks = blocks
        self._room = threading.Condition()
        self._items: list[T] = []
        self._bytes = 0
        self._closed = False
        self._woken = False
        self._there = asyncio.Event()
        self._loop_thread = threading.get_ident()

    def put(self, item: T, size: int, final: bool) -> None:
        """Adds an item, from any thread; dropped once the queue is closed. A final one does not wait."""
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
        if final or not self._blocks or threading.get_ident() == self._loop_thread:
            return
        with self._room:
            self._room.wait_for(lambda: self._closed or not self._behind())

    async def take(self) -> list[T]:
        """Waits for items and takes all there are; empty once the queue is closed."""
        while True:
            with self._room:
                if self._items or self._closed:
                    items, self._items = self._items, []
                    self._set_bytes(0)
                    self._room.notify_all()
                    return items
                self._there.clear()
                self._woken = False
            await self._there.wait()

    def close(self) -> None:
        """Drops queued and later items; on the loop."""
        with self._room:
            self._closed = True
            self._items.clear()
            self._set_bytes(0)
            self._room.notify_all()
        self._there.set()

    def _behind(self) -> bool:
        return self._unread.behind(self._bytes, MOST_BYTES)

    def _set_bytes(self, size: int) -> None:
        """Sets what is queued; the caller has the lock."""
        self._unread.change(self._bytes, size)
        self._bytes = size

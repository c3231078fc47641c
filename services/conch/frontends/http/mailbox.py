"""Carries the responses of many requests from model threads and the I/O loop to the event loop of a port.

A responder puts a response into the queue of its request and returns. The first put wakes the event loop;
those that follow until it runs, such as the other responses of a worker's frame, only add their queues to the
mailbox. The coroutine of a request takes all responses for one write. A queue is the `Reader` of its request:
a model waits while it holds too much, and taken responses count until the coroutine takes the next ones.

Race of a put and a delivery: `put` adds its queue before it looks whether the loop is woken, and `_deliver`
says that it is not before it looks at the queues. One of the two finds the queue.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from conch.core.reader import Reader
from conch.frontends.unread_bytes import Backlog, UnreadBytes

MOST_BYTES = 16 << 20
"""Bytes queued before a queue is behind; fewer if all queues together have too many."""


WRITE_BYTES = 64 << 10
"""Bytes of responses that are taken, and so written, at once, unless a single one has more."""

T = TypeVar("T")


class Mailbox:
    """Wakes the coroutines of an event loop whose queues have got something.

    Args:
        loop: The event loop.
        unread: Counts what all queues of the front end hold.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, unread: UnreadBytes) -> None:
        self.loop = loop
        self.unread = unread
        self._changed: deque[ResponseQueue[Any]] = deque()
        self._woken = False

    def changed(self, queue: ResponseQueue[Any]) -> None:
        """Notes that a queue has got something; any thread."""
        self._changed.append(queue)
        if not self._woken:
            self._woken = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                pass  # the loop is closed

    def _deliver(self) -> None:
        self._woken = False
        changed = self._changed
        while changed:
            changed.popleft().wake()


class ResponseQueue(Reader, Generic[T]):
    """Responses of one call, in order, in the form that its front end gives them.

    Args:
        mailbox: Wakes the event loop.
        most_bytes: Bytes queued before it is behind.
    """

    def __init__(self, mailbox: Mailbox, most_bytes: int = MOST_BYTES) -> None:
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._items: deque[tuple[T, int]] = deque()
        self._backlog = Backlog(mailbox.unread, most_bytes)
        self._taken = 0
        self._closed = False
        self._taker: asyncio.Future[None] | None = None  # of the event loop

    def put(self, item: T, size: int) -> None:
        """Adds a response of so many bytes, from any thread; dropped once the queue is closed."""
        with self._lock:
            if self._closed:
                return
            first = not self._items
            self._items.append((item, size))
            if size:
                self._backlog.resize(self._backlog.size + size)
        if first:
            self._mailbox.changed(self)

    @property
    def backpressure(self) -> bool:
        """True if it holds more bytes than its bound."""
        return self._backlog.backpressure

    def when_writable(self, work: Callable[[], object]) -> None:
        """See `Reader.when_writable`."""
        with self._lock:
            waits = self._backlog.defer_until_writable(work)
        if not waits:
            work()

    async def take_all(self) -> list[T] | None:
        """Waits for responses and takes all there are, about `WRITE_BYTES` at most.

        Those of the call before count as read.

        Returns:
            One or more responses; None once the queue is closed.
        """
        while True:
            read: list[Callable[[], object]] = []
            taken: list[T] | None = None
            with self._lock:
                if self._taken:
                    self._backlog.resize(self._backlog.size - self._taken)
                    self._taken = 0
                    read = self._backlog.take_ready()
                taker: asyncio.Future[None] | None = None
                if self._items:
                    taken = self._take()
                elif not self._closed:
                    taker = self._taker = self._mailbox.loop.create_future()
            for work in read:
                work()
            if taker is None:
                return taken
            await taker

    def _take(self) -> list[T]:
        """Takes what goes into one write; the caller has the lock."""
        items = self._items
        if self._backlog.size <= WRITE_BYTES:
            taken = [item for item, _ in items]
            items.clear()
            self._taken = self._backlog.size
            return taken
        taken = []
        while items and self._taken <= WRITE_BYTES:
            item, size = items.popleft()
            taken.append(item)
            self._taken += size
        return taken

    def close(self) -> None:
        """Drops queued and later responses; on the loop."""
        with self._lock:
            self._closed = True
            self._items.clear()
            self._taken = 0
            self._backlog.resize(0)
            read = self._backlog.close()
        for work in read:
            work()
        self.wake()

    def wake(self) -> None:
        """Wakes `take_all`; on the loop."""
        taker = self._taker
        if taker is not None:
            self._taker = None
            if not taker.done():  # else its task was cancelled
                taker.set_result(None)

"""From threads that have answers back to the loop, in few wake-ups."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any, Protocol

from conch.frontends.http.http_loop import LoopThread


class Recipient(Protocol):
    """Who gets something on the loop."""

    def deliver(self, item: Any) -> None:
        """Takes it."""


class ResponseMailbox:
    """Hands items from any thread to recipients on the loop; those that come close together in one wake-up.

    Args:
        thread: The loop's thread.
    """

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._filled: deque[tuple[Recipient, Any]] = deque()
        self._waking = False

    def put(self, recipient: Recipient, item: Any) -> None:
        """Hands an item over; from any thread, without a lock."""
        self._filled.append((recipient, item))
        if not self._waking:
            self._waking = True
            with suppress(RuntimeError):  # the loop has been closed: nobody waits
                self._thread.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._waking = False  # before looking: what comes from here on wakes the loop again
        filled = self._filled
        while filled:
            recipient, item = filled.popleft()
            recipient.deliver(item)

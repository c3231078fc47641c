"""Passes responses from model threads to the event loop; batches wake-ups. Used by: `infer_route`."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any, Protocol

from conch.frontends.http.http_loop import LoopThread


class Recipient(Protocol):
    """Receives items on the event loop."""

    def deliver(self, item: Any) -> None:
        """Handles one item."""


class ResponseMailbox:
    """Delivers items from any thread on the event loop; items close together share a wake-up.

    Lock-free: `_empty` clears `_waking` before it reads the queue, so an item that is
    added later wakes the loop again.
    """

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._filled: deque[tuple[Recipient, Any]] = deque()
        self._waking = False

    def put(self, recipient: Recipient, item: Any) -> None:
        """Queues an item; any thread."""
        self._filled.append((recipient, item))
        if not self._waking:
            self._waking = True
            with suppress(RuntimeError):  # the loop is closed
                self._thread.loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._waking = False  # first: later items wake the loop again
        filled = self._filled
        while filled:
            recipient, item = filled.popleft()
            recipient.deliver(item)

"""Completes batches one after the other on each thread: a completion never nests in another one.

A response may be followed by a request of the same thread, to another model that is done at once, and so on.
`complete` queues such work while the thread completes something, so that chains do not grow the stack.

Owns: a queue for each thread. Used by: `Runner`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)


class _Thread(threading.local):
    queue: deque[Callable[[], None]] | None = None


_thread = _Thread()


def complete(work: Callable[[], None]) -> None:
    """Calls a function, after the completion that the calling thread is in, if any."""
    if _thread.queue is None:
        complete_within(work)
    else:
        _thread.queue.append(work)


def complete_within(work: Callable[[], None]) -> None:
    """Calls a function, then what it has queued, also within a completion.

    For a thread that waits for an outcome: what it waits for may be among the queued work.
    """
    outer = _thread.queue
    queue = _thread.queue = deque([work])
    try:
        while queue:
            try:
                queue.popleft()()
            except Exception:  # must not keep the others from running
                log.exception("a batch that was done could not be finished")
    finally:
        _thread.queue = outer

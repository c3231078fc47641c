"""A batch in flight on an instance that runs it asynchronously.

`PendingBatch` is the callback of the instance. Its outcome may come on any thread: on the one that starts the
batch, before `start` returns, or on one that finishes another batch. `defer` queues such work on the calling
thread instead of nesting it, so that chains of short batches do not grow the stack.

Theory of operation. A batch frees its instance after two steps, in either order:

    ========================  ===========================  ====================
    event                     thread                       effect
    ========================  ===========================  ====================
    `start` has returned      the one that started it      steps - 1
    outcome settled           any, by `__call__`           `on_complete`
    `finish` has returned     the deferring queue          steps - 1
    steps == 0                the later of the two         the instance is free
    ========================  ===========================  ====================

Guarantees: the first outcome wins and later ones are dropped; `on_complete` is called once.
Assumes: the runner calls `finish` once, then `release`, and guards `steps` and `has_waiter` by its own lock.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from conch.core.backend import AwaitableOutcome, BackendInstance, Outcome
from conch.core.errors import as_conch_error
from conch.core.execution.response_tracker import ExecutionRecord
from conch.core.request import RunTimes
from conch.core.scheduling.scheduler import Batch

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
Finish = Callable[[Batch, RunTimes | None, ExecutionRecord | None, Outcome], None]


class PendingBatch:
    """One batch in flight.

    Args:
        instance: The instance.
        batch: The batch.
        times: Run times shared with the request log; None if no request is logged.
        execution: Record of a decoupled model's execution.
        finish: Completes the requests.
        on_complete: Called with the first outcome; later ones are dropped.

    Attributes:
        awaited: The handle to wait for the outcome; None if it comes to another thread by itself.
        has_waiter: True if a waiting thread will start the instance's next batch.
        steps: Steps until the instance is free: `start` returns, and the batch is finished.
    """

    __slots__ = (
        "_execution",
        "_finish",
        "_first",
        "_on_complete",
        "_outcome",
        "_times",
        "awaited",
        "batch",
        "has_waiter",
        "instance",
        "steps",
    )

    def __init__(
        self,
        instance: BackendInstance,
        batch: Batch,
        times: RunTimes | None,
        execution: ExecutionRecord | None,
        finish: Finish,
        on_complete: Callable[[PendingBatch], None],
    ) -> None:
        self.instance = instance
        self.batch: Batch | None = batch
        self.awaited: AwaitableOutcome | None = None
        self.has_waiter = False
        self.steps = 2
        self._times = times
        self._execution = execution
        self._finish = finish
        self._on_complete = on_complete
        self._first = threading.Lock()  # never released
        self._outcome: Outcome = None

    def __call__(self, outcome: Outcome) -> None:
        """Takes the outcome."""
        self.settle(outcome)

    def settle(self, outcome: Outcome) -> bool:
        """Takes the outcome; False if there was one before."""
        if not self._first.acquire(blocking=False):
            return False
        self._outcome = outcome
        self._on_complete(self)
        return True

    def finish(self) -> None:
        """Completes the requests, with an error if all else fails; called once, after `on_complete`."""
        assert self.batch is not None
        outcome, self._outcome = self._outcome, None
        try:
            self._finish(self.batch, self._times, self._execution, outcome)
        except Exception as error:  # must not keep the instance from its next batch
            log.exception("a batch that was done could not be finished")
            _fail(self.batch, error)

    def release(self) -> Batch:
        """Drops and returns the batch: the instance may keep its callback for longer."""
        batch, self.batch = self.batch, None
        assert batch is not None
        self._execution = self._times = None
        return batch


def _fail(batch: Batch, error: Exception) -> None:
    """Fails all requests of a batch that are not complete."""
    for request in batch.requests:
        request.rescheduled = False
        try:
            request.fail(as_conch_error(error))
        except Exception:
            log.exception("a request of a batch that could not be finished could not be answered")


class _Current(threading.local):
    """The calling thread's queue of deferred work, and whether its requests bypass claims."""

    work: deque[Callable[[], None]] | None = None
    bypasses: bool = False


_current = _Current()


@contextmanager
def bypassing_claims() -> Iterator[None]:
    """Lets requests submitted within start at once, without waiting for a claimant.

    The claimant may be the submitting thread, or a thread that waits for it.
    """
    outer, _current.bypasses = _current.bypasses, True
    try:
        yield
    finally:
        _current.bypasses = outer


def bypasses_claims() -> bool:
    """Whether the calling thread is within `bypassing_claims`."""
    return _current.bypasses


def run_deferring(work: Callable[[], _Result]) -> _Result:
    """Calls a function, then what it deferred, unless an outer call does that."""
    if _current.work is not None:
        return work()
    queue = _current.work = deque()
    try:
        return work()
    finally:
        _run_all(queue, None)


def defer(work: Callable[[], None]) -> None:
    """Calls a function once the thread's current deferrable work has returned."""
    if _current.work is None:
        run_nested(work)
    else:
        _current.work.append(work)


def run_nested(work: Callable[[], None]) -> None:
    """Calls a function, then what it deferred, also within another deferrable call."""
    outer = _current.work
    queue = _current.work = deque([work])
    _run_all(queue, outer)


def _run_all(queue: deque[Callable[[], None]], outer: deque[Callable[[], None]] | None) -> None:
    """Calls what is in the thread's queue, then restores the outer queue."""
    try:
        while queue:
            try:
                queue.popleft()()
            except Exception:  # must not keep the others from running
                log.exception("a batch that was done could not be finished")
    finally:
        _current.work = outer

"""A batch that an instance has begun and that is finished when, and where, its outcome comes.

The outcome may come on any thread: on the one that begins the batch, before it has returned, and on one that
finishes another batch and begins the next. `soon` keeps that from nesting: what one thread has to finish,
it finishes one after the other.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from conch.core.backend import Awaited, BackendInstance, Outcome
from conch.core.errors import as_conch_error
from conch.core.execution.answers import Execution
from conch.core.scheduling.base import Batch
from conch.core.watch import RunTimes

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
Finish = Callable[[Batch, RunTimes | None, Execution | None, Outcome], None]


class Begun:
    """One batch; what its instance calls when it is done.

    Args:
        instance: The instance.
        batch: The batch.
        times: What those who log its requests see.
        execution: Of a decoupled model.
        finish: Answers the requests.
        then: Called with the first outcome; others come too late and are dropped.

    Attributes:
        awaited: How the outcome is waited for; None where it comes by itself.
        led: Whether somebody waits, who will also see to what the instance runs next.
        steps: What has still to happen before the instance is free again: `begin` returns, and the batch
            is finished. For whoever drives the instance, under a lock of its own.
    """

    __slots__ = (
        "_execution",
        "_finish",
        "_first",
        "_outcome",
        "_then",
        "_times",
        "awaited",
        "batch",
        "instance",
        "led",
        "steps",
    )

    def __init__(
        self,
        instance: BackendInstance,
        batch: Batch,
        times: RunTimes | None,
        execution: Execution | None,
        finish: Finish,
        then: Callable[[Begun], None],
    ) -> None:
        self.instance = instance
        self.batch: Batch | None = batch
        self.awaited: Awaited | None = None
        self.led = False
        self.steps = 2
        self._times = times
        self._execution = execution
        self._finish = finish
        self._then = then
        self._first = threading.Lock()  # never let go
        self._outcome: Outcome = None

    def __call__(self, outcome: Outcome) -> None:
        """Takes the outcome."""
        self.settle(outcome)

    def settle(self, outcome: Outcome) -> bool:
        """Takes the outcome; False if there was one before."""
        if not self._first.acquire(blocking=False):
            return False
        self._outcome = outcome
        self._then(self)
        return True

    def finish(self) -> None:
        """Answers the requests, with an error if all else fails; to be called once, after `then`."""
        assert self.batch is not None
        outcome, self._outcome = self._outcome, None
        try:
            self._finish(self.batch, self._times, self._execution, outcome)
        except Exception as error:  # must not keep the instance from its next batch
            log.exception("a batch that was done could not be finished")
            _fail(self.batch, error)

    def release(self) -> Batch:
        """Gives the batch up: an instance may keep what it calls when it is done for longer than that."""
        batch, self.batch = self.batch, None
        assert batch is not None
        self._execution = self._times = None
        return batch


def _fail(batch: Batch, error: Exception) -> None:
    """Answers all requests of a batch that have no answer."""
    for request in batch.requests:
        request.rescheduled = False
        try:
            request.fail(as_conch_error(error))
        except Exception:
            log.exception("a request of a batch that could not be finished could not be answered")


class _Here(threading.local):
    """What the calling thread has still to do, and whether what it submits must not wait for that."""

    work: deque[Callable[[], None]] | None = None
    urgent = False


_here = _Here()


@contextmanager
def urgently() -> Iterator[None]:
    """Has what is submitted within wait for nobody who has promised to see to it: that may be who submits."""
    outer, _here.urgent = _here.urgent, True
    try:
        yield
    finally:
        _here.urgent = outer


def is_urgent() -> bool:
    """Whether the calling thread is within `urgently`."""
    return _here.urgent


def now(work: Callable[[], _Result]) -> _Result:
    """Calls something, then what it put off with `soon`, unless whoever called it does that later."""
    if _here.work is not None:
        return work()
    queue = _here.work = deque()
    try:
        return work()
    finally:
        _empty(queue, None)


def soon(work: Callable[[], None]) -> None:
    """Calls something when nothing else runs on this thread that was passed here."""
    if _here.work is None:
        nested(work)
    else:
        _here.work.append(work)


def nested(work: Callable[[], None]) -> None:
    """Calls something, then what it put off with `soon`, whoever called it."""
    outer = _here.work
    queue = _here.work = deque([work])
    _empty(queue, outer)


def _empty(queue: deque[Callable[[], None]], outer: deque[Callable[[], None]] | None) -> None:
    """Calls what is in the calling thread's queue, and has it go on with the outer one."""
    try:
        while queue:
            try:
                queue.popleft()()
            except Exception:  # must not keep the others from being done
                log.exception("a batch that was done could not be finished")
    finally:
        _here.work = outer

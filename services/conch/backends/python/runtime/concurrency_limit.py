"""Limits how many coroutine executions run at once on one instance (``CONCH_MAX_INFLIGHT``).

Locks: one condition per instance; waited on by the instance's thread, notified on its event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from conch.backends.python.python_settings import Settings
from conch.backends.python.runtime.event_loop import EventLoop, TaskEnd
from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec

_PARAMETER = "CONCH_MAX_INFLIGHT"


class ConcurrencyLimit:
    """Runs the coroutines of one instance.

    `run` blocks until another execution fits, so the instance takes its next batch only when that can run at
    once.
    """

    def __init__(self, loop: EventLoop, limit: int | None) -> None:
        self._loop = loop
        self._limit = limit
        self._count = 0
        self._changed = threading.Condition()

    def run(self, awaitable: Awaitable[Any], on_late_outcome: Callable[[TaskEnd], None]) -> TaskEnd | None:
        """Starts a coroutine; returns when there is room for the next.

        Returns the outcome; or None, and the event loop passes the outcome to `on_late_outcome` later.
        """
        coroutine = _RunningCoroutine()
        with self._changed:
            self._count += 1

        def ended(future: Future[TaskEnd]) -> None:
            try:
                coroutine.outcome = future.result()
            except BaseException as error:  # cancelled before it started
                coroutine.outcome = None, error
            try:
                if not self._deliver(coroutine):
                    on_late_outcome(coroutine.outcome)
            finally:
                with self._changed:
                    self._count -= 1
                    self._changed.notify_all()

        self._loop.run(awaitable).add_done_callback(ended)
        with self._changed:
            self._changed.wait_for(lambda: coroutine.delivered or self._has_room())
            coroutine.detached = not coroutine.delivered
            return coroutine.outcome if coroutine.delivered else None

    def wait(self) -> None:
        """Waits until no execution is running."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count)

    def _deliver(self, coroutine: _RunningCoroutine) -> bool:
        """Hands the outcome to the thread in `run`; False if that has returned."""
        with self._changed:
            coroutine.delivered = not coroutine.detached
            self._changed.notify_all()
            return coroutine.delivered

    def _has_room(self) -> bool:
        return self._limit is None or self._count < self._limit


class _RunningCoroutine:
    """One running coroutine: `delivered` if it ended before `run` returned, else `detached`."""

    __slots__ = ("delivered", "detached", "outcome")

    def __init__(self) -> None:
        self.detached = False
        self.delivered = False
        self.outcome: TaskEnd | None = None


def max_concurrency(spec: ModelSpec, concurrent: bool) -> int | None:
    """Batches that may run at once on one instance, whose `execute` may be concurrent; None for no limit.

    Raises:
        InvalidArgumentError: The config asks for more than the model supports.
    """
    wanted = Settings.of(spec).max_inflight
    usual = None if spec.decoupled else 1
    if wanted is None:
        return usual
    reason = None if wanted == 1 else _one_at_a_time(spec, concurrent)
    if reason is None:
        return wanted
    if _PARAMETER in spec.parameters:
        raise InvalidArgumentError(
            f"model '{spec.name}': parameter '{_PARAMETER}' must be 1, not {wanted}, as {reason}"
        )
    return usual  # an option applies to all models, so those without support ignore it


def _one_at_a_time(spec: ModelSpec, concurrent: bool) -> str | None:
    """Reason for which an instance runs one batch at a time, for the log; None if it can run more."""
    if not concurrent:
        return "'execute' is no coroutine: declare it with 'async def', or have more instances"
    if spec.decoupled:
        return None
    if spec.sequence is not None:
        return "the next request of a sequence must not run before the one before it has ended"
    if any(group.resources for group in spec.instance_groups):
        return "the instance holds rate limiter resources for one batch at a time"
    return None

"""Coroutines of batches under way: how many of them may run at the same time on one instance."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from conch.backends.python.python_settings import Settings
from conch.backends.python.runtime.event_loop import EventLoop, Outcome
from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec

_PARAMETER = "CONCH_MAX_INFLIGHT"


class ConcurrencyLimit:
    """The coroutines of one instance.

    Whoever starts one waits until there is room for another, so a batch is taken from the queue only when it
    can run at once; with room for one, that is until the coroutine has ended.

    Args:
        loop: Runs them.
        limit: How many may be under way; None for any number.
    """

    def __init__(self, loop: EventLoop, limit: int | None) -> None:
        self._loop = loop
        self._limit = limit
        self._count = 0
        self._changed = threading.Condition()

    def run(self, awaitable: Awaitable[Any], goes_on: Callable[[Outcome], None]) -> Outcome | None:
        """Starts a coroutine, and returns when there is room for the next.

        Args:
            awaitable: The coroutine.
            goes_on: Called with its outcome, on the event loop, if it ends after this has returned.

        Returns:
            Its outcome; None if it has not ended yet.
        """
        flight = _RunningCoroutine()
        with self._changed:
            self._count += 1

        def ended(future: Future[Outcome]) -> None:
            try:
                flight.outcome = future.result()
            except BaseException as error:  # cancelled before it began
                flight.outcome = None, error
            try:
                if not self._land(flight):
                    goes_on(flight.outcome)
            finally:
                with self._changed:
                    self._count -= 1
                    self._changed.notify_all()

        self._loop.run(awaitable).add_done_callback(ended)
        with self._changed:
            self._changed.wait_for(lambda: flight.landed or self._has_room())
            flight.left_alone = not flight.landed
            return flight.outcome if flight.landed else None

    def wait(self) -> None:
        """Waits until none is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count)

    def _land(self, flight: _RunningCoroutine) -> bool:
        """Hands an outcome to whoever still waits for it; False if nobody does."""
        with self._changed:
            flight.landed = not flight.left_alone
            self._changed.notify_all()
            return flight.landed

    def _has_room(self) -> bool:
        return self._limit is None or self._count < self._limit


class _RunningCoroutine:
    """One coroutine.

    Attributes:
        left_alone: Whether nobody waits for it any more.
        landed: Whether it ended before that.
        outcome: How it ended.
    """

    __slots__ = ("landed", "left_alone", "outcome")

    def __init__(self) -> None:
        self.left_alone = False
        self.landed = False
        self.outcome: Outcome | None = None


def max_concurrency(spec: ModelSpec, concurrent: bool) -> int | None:
    """How many batches may be under way on one instance; None for any number.

    Args:
        spec: The model version.
        concurrent: Whether its `execute` is a coroutine function or an async generator function.

    Raises:
        InvalidArgumentError: Its config asks for more than it can have.
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
    return usual  # an option is for all models, those that can't do it too


def _one_at_a_time(spec: ModelSpec, concurrent: bool) -> str | None:
    """Why an instance can run no more than one batch at a time; None if it can."""
    if not concurrent:
        return "'execute' is no coroutine: declare it with 'async def', or have more instances"
    if spec.decoupled:
        return None
    if spec.sequence is not None:
        return "the next request of a sequence must not run before the one before it has ended"
    if any(group.resources for group in spec.instance_groups):
        return "the instance holds rate limiter resources for one batch at a time"
    return None

"""How the responses to one request come from its model to whoever reads them, on whatever thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from conch.core.errors import (
    ERRORS_BY_CODE,
    ConchError,
    DeadlineExceededError,
    InternalError,
    UnavailableError,
)
from conch.core.request import InferenceRequest, InferenceResponse

MOST_KEPT = 16
"""Responses that may wait to be read; the model waits while there are so many."""


class ResponseQueue:
    """Responses on their way; its `put` is the responder of their request.

    Args:
        on_put: Called, from any thread, when there is something to take.
    """

    def __init__(self, on_put: Callable[[], None] = lambda: None) -> None:
        self._on_put = on_put
        self._changed = threading.Condition()
        self._kept: deque[InferenceResponse] = deque()
        self._ended = False
        self._closed = False
        self._stopped = False

    def put(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Takes a response; waits while too many are kept that nobody has read."""
        with self._changed:
            while len(self._kept) >= MOST_KEPT and not self._closed:
                self._changed.wait()
            if response is not None and not self._closed:
                self._kept.append(response)
            if self._closed and not final:
                request.cancelled = True  # a model that has no end by itself learns that nobody reads
            self._ended = self._ended or final
            self._changed.notify_all()
        self._on_put()

    def try_take(self) -> tuple[InferenceResponse | None, bool]:
        """The next response, if it is there; and whether none will come any more.

        Raises:
            UnavailableError: None will, as the server has been stopped.
        """
        with self._changed:
            return self._taken()

    def take(self, timeout_s: float | None = None) -> InferenceResponse | None:
        """The next response; None if there is none any more.

        Raises:
            DeadlineExceededError: None came in time.
            UnavailableError: None will, as the server has been stopped.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._kept or self._ended or self._closed, timeout_s):
                raise DeadlineExceededError(f"no answer within {timeout_s} s")
            return self._taken()[0]

    def close(self) -> None:
        """Says that nobody reads any more: the model is not held up, and what it says is dropped."""
        with self._changed:
            self._closed = True
            self._kept.clear()
            self._changed.notify_all()
        self._on_put()

    def stop(self) -> None:
        """Says that the server has been stopped: as `close`, but a reader is told if that was not the end."""
        with self._changed:
            if self._ended:
                return  # what has come can still be read
            self._stopped |= not self._closed
        self.close()

    @property
    def over(self) -> bool:
        """Whether the last response has been put."""
        return self._ended

    def _taken(self) -> tuple[InferenceResponse | None, bool]:
        if self._kept:
            response = self._kept.popleft()
            self._changed.notify_all()
            return response, False
        if self._stopped:
            raise UnavailableError("the server has been stopped")
        return None, self._ended or self._closed


class AsyncResponseQueue(ResponseQueue):
    """The same for a coroutine; to be made on its loop."""

    def __init__(self) -> None:
        super().__init__(self._wake)
        self._loop = asyncio.get_running_loop()
        self._there = asyncio.Event()

    async def get(self, timeout_s: float | None = None) -> InferenceResponse | None:
        """As `take`."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._there.clear()
                    response, over = self.try_take()
                    if response is not None or over:
                        return response
                    await self._there.wait()
        except TimeoutError:
            raise DeadlineExceededError(f"no answer within {timeout_s} s") from None

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._there.set)
        except RuntimeError:
            pass  # the loop is closed, and nobody waits there


def raise_error(response: InferenceResponse) -> None:
    """Raises what a response has in place of outputs, if it has."""
    if response.error is not None:
        given: ConchError = response.error
        # The same error may be that of other requests of the batch: each caller gets one of its own.
        error = ERRORS_BY_CODE.get(given.code, InternalError)(given.message)
        error.retry_after_ms = given.retry_after_ms
        raise error

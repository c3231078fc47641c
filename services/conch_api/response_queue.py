"""Carries the responses of one request from its model to a reader on another thread or event loop.

Locks: one condition per queue.
"""

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
from conch.core.reader import Reader
from conch.core.request import InferenceRequest, InferenceResponse

MOST_KEPT = 16
"""Responses in a queue for which the model waits."""


class ResponseQueue(Reader):
    """A queue of responses; `put` is the request's responder, and the queue its `Reader`.

    Args:
        on_put: Called from any thread when there is something to take.
    """

    def __init__(self, on_put: Callable[[], None] = lambda: None) -> None:
        self._on_put = on_put
        self._changed = threading.Condition()
        self._kept: deque[InferenceResponse] = deque()
        self._ended = False
        self._closed = False
        self._stopped = False
        self._deferred: list[Callable[[], object]] = []

    def put(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Adds a response."""
        with self._changed:
            if response is not None and not self._closed:
                self._kept.append(response)
            if self._closed and not final:
                request.cancelled = True  # lets an endless model notice that nothing reads
            self._ended = self._ended or final
            self._changed.notify_all()
        self._on_put()

    @property
    def backpressure(self) -> bool:
        """True if the queue is full."""
        return len(self._kept) >= MOST_KEPT

    def when_writable(self, work: Callable[[], object]) -> None:
        """See `Reader.when_writable`."""
        with self._changed:
            waits = self.backpressure and not self._closed
            if waits:
                self._deferred.append(work)
        if not waits:
            work()

    def try_take(self) -> tuple[InferenceResponse | None, bool]:
        """Returns the next response, or None, and whether the stream is over."""
        with self._changed:
            taken = self._taken()
        self._call_read()
        return taken

    def take(self, timeout_s: float | None = None) -> InferenceResponse | None:
        """Returns the next response; None after the last."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._kept or self._ended or self._closed, timeout_s):
                raise DeadlineExceededError(f"no answer within {timeout_s} s")
            response = self._taken()[0]
        self._call_read()
        return response

    def close(self) -> None:
        """Ends reading: drops all responses, so the model does not block."""
        with self._changed:
            self._closed = True
            self._kept.clear()
            self._changed.notify_all()
        self._call_read()
        self._on_put()

    def stop(self) -> None:
        """Closes the queue because the server stops; a reader before the end gets an error."""
        with self._changed:
            if self._ended:
                return  # queued responses can still be read
            self._stopped |= not self._closed
        self.close()

    @property
    def over(self) -> bool:
        """True once the last response was put."""
        return self._ended

    def _call_read(self) -> None:
        """Lets the model go on, unless the queue is full."""
        if not self._deferred or self.backpressure:
            return
        with self._changed:
            read, self._deferred = self._deferred, []
        for work in read:
            work()

    def _taken(self) -> tuple[InferenceResponse | None, bool]:
        if self._kept:
            return self._kept.popleft(), False
        if self._stopped:
            raise UnavailableError("the server has been stopped")
        return None, self._ended or self._closed


class AsyncResponseQueue(ResponseQueue):
    """A queue read by a coroutine; created on its loop."""

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
            pass  # nothing waits on a closed loop


def raise_error(response: InferenceResponse) -> None:
    """Raises the error of a response, if it has one."""
    if response.error is not None:
        given: ConchError = response.error
        # An error may be shared by requests of a batch; each caller gets its own.
        error = ERRORS_BY_CODE.get(given.code, InternalError)(given.message)
        error.retry_after_ms = given.retry_after_ms
        raise error

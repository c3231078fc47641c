"""Iterates over the responses of a decoupled call as they arrive."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from conch.backends.python.api.pb_response import InferenceResponse
from conch.backends.python.calls.bls_call import MAX_POLL_S, BlsAnswer, BlsRequest, WaitingCall
from conch.backends.python.calls.call_context import CallContext
from conch.backends.python.runtime.event_loop import in_coroutine

log = logging.getLogger(__name__)

_Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


class _StreamCall(WaitingCall):
    """A call whose responses an iterator waits for, on a thread or in a coroutine."""

    __slots__ = ("_waiter", "unread")

    def __init__(self, caller: CallContext, request: BlsRequest) -> None:
        self._waiter: _Waiter | None = None
        self.unread = False
        super().__init__(caller, request, True)

    def receive(self, answer: BlsAnswer) -> None:
        """See `Call.receive`."""
        if self.unread:
            return
        super().receive(answer)
        waiter = self._waiter
        if waiter is not None:
            call_in_loop(waiter[0], partial(_wake, waiter[1]))

    async def next_in_coroutine(self) -> BlsAnswer:
        """The next response, without blocking the loop."""
        loop = asyncio.get_running_loop()
        while (answer := self.next_nowait()) is None:
            came: asyncio.Future[None] = loop.create_future()
            self._waiter = loop, came
            timer = loop.call_later(MAX_POLL_S, _wake, came)
            try:
                # Re-check: a response that arrived before `_waiter` was set woke nothing; each later one
                # wakes this.
                if (answer := self.next_nowait()) is not None:
                    return answer
                await came
            finally:
                self._waiter = None
                timer.cancel()
            self.check_abandoned()
        return answer


class ResponseIterator:
    """The responses to a request as they arrive, for `for` and `async for`.

    As in Triton, a final flag without a response yields a response without tensors. The iterator keeps all
    responses: after the end a new loop starts at the first response, a loop that was left early continues.
    """

    def __init__(self, caller: CallContext, request: BlsRequest) -> None:
        self._call = _StreamCall(caller, request)
        self._responses: list[InferenceResponse] = []
        self._position = 0
        self._over = False
        self._first: BlsAnswer | None = None
        self._call.start(may_claim=False)

    async def _wait_first(self) -> ResponseIterator:
        """Waits for the first response without blocking the loop and keeps it for the iteration.

        Cancelling this cancels the request.
        """
        try:
            self._first = await self._call.next_in_coroutine()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self

    def cancel(self) -> None:
        """Cancels the request; the model may still send responses."""
        if not self._over:
            self._call.cancel()

    def __iter__(self) -> ResponseIterator:
        if self._over and self._position >= len(self._responses):
            self._position = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._over:
            response = self._next_kept()
            if response is None:
                raise StopIteration("Iteration is done for the responses.")
            return response
        answer = self._take_first() or self._call.next_nowait()
        if answer is None:
            self._warn_of_blocking()
            answer = self._call.next()
        return self._keep(answer)

    def __aiter__(self) -> ResponseIterator:
        return self.__iter__()

    async def __anext__(self) -> InferenceResponse:
        if self._over:
            response = self._next_kept()
            if response is None:
                raise StopAsyncIteration("Iteration is done for the responses.")
            return response
        return self._keep(self._take_first() or await self._call.next_in_coroutine())

    def _take_first(self) -> BlsAnswer | None:
        """The first response if only `_wait_first` has taken it."""
        first, self._first = self._first, None
        return first

    def _warn_of_blocking(self) -> None:
        caller = self._call.caller
        if caller.warned_of_blocking or not in_coroutine():
            return
        caller.warned_of_blocking = True
        log.warning(
            "model instance '%s' loops over the responses of model '%s' with 'for' in a coroutine, which "
            "blocks its event loop until the next one comes: use 'async for'",
            caller.name,
            self._call.core.model_name,
        )

    def _next_kept(self) -> InferenceResponse | None:
        """The next kept response."""
        if self._position >= len(self._responses):
            return None
        self._position += 1
        return self._responses[self._position - 1]

    def _keep(self, answer: BlsAnswer) -> InferenceResponse:
        response, self._over = answer
        if response is None:
            response = InferenceResponse()
        self._responses.append(response)
        self._position = len(self._responses)
        return response

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is not None:
            call.unread = True  # the model goes on, as in Triton; its responses are dropped


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def call_in_loop(loop: asyncio.AbstractEventLoop, what: Any) -> None:
    """Calls a function on a loop soon, unless the loop is closed."""
    try:
        loop.call_soon_threadsafe(what)
    except RuntimeError:
        pass  # nothing waits on a closed loop

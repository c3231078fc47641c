"""The responses to a call that may have any number of them, as they come."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from conch.backends.python.api.pb_response import InferenceResponse
from conch.backends.python.calls.bls_call import LONGEST_LOOK_S, Answer, BlsRequest, WaitingCall
from conch.backends.python.calls.call_context import CallContext

log = logging.getLogger(__name__)

_Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


class _StreamCall(WaitingCall):
    """A call whose answers an iterator waits for, on a thread or in a coroutine."""

    __slots__ = ("_waiter", "unread")

    def __init__(self, caller: CallContext, request: BlsRequest) -> None:
        self._waiter: _Waiter | None = None
        self.unread = False
        super().__init__(caller, request, True)

    def take(self, answer: Answer) -> None:
        """See `Call.take`."""
        if self.unread:
            return
        super().take(answer)
        waiter = self._waiter
        if waiter is not None:
            tell(waiter[0], partial(_wake, waiter[1]))

    async def next_in_coroutine(self) -> Answer:
        """The next answer, without holding up the loop."""
        loop = asyncio.get_running_loop()
        while (answer := self.next_if_there()) is None:
            came: asyncio.Future[None] = loop.create_future()
            self._waiter = loop, came
            look = loop.call_later(LONGEST_LOOK_S, _wake, came)
            try:
                # One that has come before there was anybody to wake is found now, each later one wakes.
                if (answer := self.next_if_there()) is not None:
                    return answer
                await came
            finally:
                self._waiter = None
                look.cancel()
            self.look()
        return answer


class ResponseIterator:
    """The responses to a request, as they come; for `for` and `async for`.

    A final flag that comes without a response is a response without tensors, as in Triton. Responses are kept
    as long as the iterator: a loop after one that has reached the end begins with the first response again, a
    loop after one that was left goes on where that was.
    """

    def __init__(self, caller: CallContext, request: BlsRequest) -> None:
        self._call = _StreamCall(caller, request)
        self._responses: list[InferenceResponse] = []
        self._position = 0
        self._over = False
        self._first: Answer | None = None
        self._call.begin(may_claim=False)

    async def _begun(self) -> ResponseIterator:
        """Waits for the first response without holding up the loop; a loop over the responses finds it there.

        Cancelling this cancels the request.
        """
        try:
            self._first = await self._call.next_in_coroutine()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self

    def cancel(self) -> None:
        """Cancels the request: nobody waits for further responses. The model may still send some."""
        if not self._over:
            self._call.cancel()

    def __iter__(self) -> ResponseIterator:
        if self._over and self._position >= len(self._responses):
            self._position = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._over:
            response = self._again()
            if response is None:
                raise StopIteration("Iteration is done for the responses.")
            return response
        answer = self._taken() or self._call.next_if_there()
        if answer is None:
            self._warn_of_blocking()
            answer = self._call.next()
        return self._keep(answer)

    def __aiter__(self) -> ResponseIterator:
        return self.__iter__()

    async def __anext__(self) -> InferenceResponse:
        if self._over:
            response = self._again()
            if response is None:
                raise StopAsyncIteration("Iteration is done for the responses.")
            return response
        return self._keep(self._taken() or await self._call.next_in_coroutine())

    def _taken(self) -> Answer | None:
        """The first answer, where `_begun` has taken it and nothing else has."""
        first, self._first = self._first, None
        return first

    def _warn_of_blocking(self) -> None:
        caller = self._call.caller
        if asyncio._get_running_loop() is None or caller.warned_of_blocking:
            return
        caller.warned_of_blocking = True
        log.warning(
            "model instance '%s' loops over the responses of model '%s' with 'for' in a coroutine, which "
            "blocks its event loop until the next one comes: use 'async for'",
            caller.name,
            self._call.core.model_name,
        )

    def _again(self) -> InferenceResponse | None:
        """The next one of those that are kept."""
        if self._position >= len(self._responses):
            return None
        self._position += 1
        return self._responses[self._position - 1]

    def _keep(self, answer: Answer) -> InferenceResponse:
        response, self._over = answer
        if response is None:
            response = InferenceResponse()
        self._responses.append(response)
        self._position = len(self._responses)
        return response

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is not None:
            call.unread = True  # the model goes on, as in Triton, but nothing is kept any more


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def tell(loop: asyncio.AbstractEventLoop, what: Any) -> None:
    """Has a loop call something soon, unless it has been closed."""
    try:
        loop.call_soon_threadsafe(what)
    except RuntimeError:
        pass  # with the loop went whoever waited

"""The responses to a call that may have any number of them, as they come."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from conch.backends.python.call import LONGEST_LOOK_S, Answer, WaitingCall
from conch.backends.python.caller import Caller
from conch.backends.python.response import InferenceResponse

if TYPE_CHECKING:
    from conch.backends.python.request import InferenceRequest

_Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


class _StreamCall(WaitingCall):
    """A call whose answers an iterator waits for, on a thread or in a coroutine."""

    __slots__ = ("_waiter", "unread")

    def __init__(self, caller: Caller, request: InferenceRequest) -> None:
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

    A final flag that comes without a response is seen as a response without tensors, as in Triton. When all
    have come they can be gone through again from the first one, so they are kept as long as the iterator.
    """

    def __init__(self, caller: Caller, request: InferenceRequest) -> None:
        self._call = _StreamCall(caller, request)
        self._responses: list[InferenceResponse] = []
        self._position = 0
        self._over = False
        self._call.begin(may_lead=False)

    def cancel(self) -> None:
        """Cancels the request: nobody waits for further responses. The model may still send some."""
        if not self._over:
            self._call.cancel()

    def __iter__(self) -> ResponseIterator:
        if self._over:
            self._position = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._over:
            response = self._again()
            if response is None:
                raise StopIteration("Iteration is done for the responses.")
            return response
        return self._keep(self._call.next())

    def __aiter__(self) -> ResponseIterator:
        return self.__iter__()

    async def __anext__(self) -> InferenceResponse:
        if self._over:
            response = self._again()
            if response is None:
                raise StopAsyncIteration("Iteration is done for the responses.")
            return response
        return self._keep(await self._call.next_in_coroutine())

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

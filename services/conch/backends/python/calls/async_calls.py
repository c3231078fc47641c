"""Calls for whose answers a coroutine waits."""

from __future__ import annotations

import asyncio
from functools import partial

from conch.backends.python.api.pb_errors import CallsEndedError, TritonModelException
from conch.backends.python.api.pb_response import InferenceResponse
from conch.backends.python.calls.bls_call import LONGEST_LOOK_S, Answer, BlsRequest, Call
from conch.backends.python.calls.call_context import CallContext
from conch.backends.python.calls.response_iterator import ResponseIterator, tell


class AsyncCall(Call):
    """A call that sets a future of a loop.

    Cancelling the future, as cancelling a task that waits for it does, cancels the call.

    Args:
        caller: Who calls.
        request: The request.
        loop: The loop, which is that of the calling thread.

    Attributes:
        future: Its answer.
    """

    __slots__ = ("_look_again", "_loop", "future")

    def __init__(self, caller: CallContext, request: BlsRequest, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.future: asyncio.Future[InferenceResponse] = loop.create_future()
        super().__init__(caller, request, False)
        self._look_again = loop.call_later(LONGEST_LOOK_S, self._watch)
        self.future.add_done_callback(self._done)

    def take(self, answer: Answer) -> None:
        """See `Call.take`."""
        tell(self._loop, partial(self._set, answer))

    def _set(self, answer: Answer) -> None:
        if not self.future.done():
            self.future.set_result(answer[0] or InferenceResponse())

    def _done(self, future: asyncio.Future[InferenceResponse]) -> None:
        self._look_again.cancel()
        if future.cancelled():
            self.caller.ended(self)
            self.caller.cancel(self.core)

    def _watch(self) -> None:
        if self.future.done():
            return
        try:
            self.look()
        except (CallsEndedError, TritonModelException) as ended:
            self.future.set_exception(ended)
        else:
            self._look_again = self._loop.call_later(LONGEST_LOOK_S, self._watch)


def start_async_call(caller: CallContext, request: BlsRequest) -> asyncio.Future[InferenceResponse]:
    """Begins a call; its answer comes with the future.

    Raises:
        RuntimeError: No loop runs on the calling thread.
        TritonModelException: The caller can't call the server.
    """
    call = AsyncCall(caller, request, asyncio.get_running_loop())
    try:
        call.begin(may_claim=False)
    except BaseException:
        call.future.cancel()
        raise
    return call.future


def start_async_stream(caller: CallContext, request: BlsRequest) -> asyncio.Future[ResponseIterator]:
    """Begins a call that may have any number of answers; the iterator comes with the first one, as in Triton.

    Raises:
        RuntimeError: No loop runs on the calling thread.
        TritonModelException: The caller can't call the server.
    """
    loop = asyncio.get_running_loop()
    return loop.create_task(ResponseIterator(caller, request)._begun())

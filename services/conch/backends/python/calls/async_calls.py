"""Calls that a coroutine awaits."""

from __future__ import annotations

import asyncio
from functools import partial

from conch.backends.python.api.pb_errors import CallsEndedError, TritonModelException
from conch.backends.python.api.pb_response import InferenceResponse
from conch.backends.python.calls.bls_call import MAX_POLL_S, BlsAnswer, BlsCall, BlsRequest
from conch.backends.python.calls.call_context import CallContext
from conch.backends.python.calls.response_iterator import ResponseIterator, call_in_loop


class AsyncCall(BlsCall):
    """A call that completes `future` with its response; cancelling the future cancels the call."""

    __slots__ = ("_loop", "_next_check", "future")

    def __init__(self, caller: CallContext, request: BlsRequest, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.future: asyncio.Future[InferenceResponse] = loop.create_future()
        super().__init__(caller, request, False)
        self._next_check = loop.call_later(MAX_POLL_S, self._check)
        self.future.add_done_callback(self._done)

    def receive(self, answer: BlsAnswer) -> None:
        """See `BlsCall.receive`."""
        call_in_loop(self._loop, partial(self._set, answer))

    def _set(self, answer: BlsAnswer) -> None:
        if not self.future.done():
            self.future.set_result(answer[0] or InferenceResponse())

    def _done(self, future: asyncio.Future[InferenceResponse]) -> None:
        self._next_check.cancel()
        if future.cancelled():
            self.caller.remove_open_call(self)
            self.caller.cancel(self.core)

    def _check(self) -> None:
        if self.future.done():
            return
        try:
            self.check_abandoned()
        except (CallsEndedError, TritonModelException) as ended:
            self.future.set_exception(ended)
        else:
            self._next_check = self._loop.call_later(MAX_POLL_S, self._check)


def start_async_call(caller: CallContext, request: BlsRequest) -> asyncio.Future[InferenceResponse]:
    """Starts a call; the future completes with its response.

    Raises:
        RuntimeError: No loop runs on the calling thread.
        TritonModelException: The instance cannot call the server.
    """
    call = AsyncCall(caller, request, asyncio.get_running_loop())
    try:
        call.start(may_claim=False)
    except BaseException:  # raised again
        call.future.cancel()
        raise
    return call.future


def start_async_stream(caller: CallContext, request: BlsRequest) -> asyncio.Future[ResponseIterator]:
    """Starts a decoupled call; as in Triton, the iterator comes with the first response.

    Raises:
        RuntimeError: No loop runs on the calling thread.
        TritonModelException: The instance cannot call the server.
    """
    loop = asyncio.get_running_loop()
    return loop.create_task(ResponseIterator(caller, request)._wait_first())

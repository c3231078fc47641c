"""Runs an `execute` that is a generator: each yielded item is a step of the responses to the batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from typing import Any

from conch.backends.python.api.pb_errors import TritonModelException
from conch.backends.python.api.pb_request import ReceivedRequest
from conch.backends.python.api.pb_response import InferenceResponse
from conch.backends.python.api.pb_types import TRITONSERVER_RESPONSE_COMPLETE_FINAL as FINAL
from conch.backends.python.calls.response_iterator import call_in_loop
from conch.core.errors import CancelledError, ConchError, DeadlineExceededError
from conch.core.request import InferenceRequest


class GeneratorExecution:
    """Sends what a generator yields through the response senders of a batch.

    A step is a list with a response or None per request; or a single response for a batch of one; or None,
    which only checks for abandoned requests. When all requests are abandoned, the generator is closed at its
    next step.
    """

    def __init__(self, requests: Sequence[ReceivedRequest], decoupled: bool) -> None:
        self._requests = requests
        self._decoupled = decoupled
        # Created now, so that a failure ends all of them.
        self._senders = [request.get_response_sender() for request in requests]

    def run(self, steps: Generator[Any, None, Any]) -> list[None] | None:
        """Runs a generator to its end and returns the result of `execute`.

        Raises:
            BaseException: The generator's exception, or an invalid step.
        """
        with closing(steps):
            while True:
                try:
                    step = next(steps)
                except StopIteration as end:
                    returned = end.value
                    break
                self._send_step(step)
                for request in self._requests:
                    request._core.wait_until_writable()
                if self._abandoned:
                    return self._fail_abandoned()
        if returned is not None:
            raise TritonModelException(
                f"An execute function that yields responses must not return any, found type "
                f"'{type(returned)}'."
            )
        return self._end()

    async def run_async(self, steps: AsyncGenerator[Any, None]) -> list[None] | None:
        """Runs an async generator."""
        async with aclosing(steps):
            async for step in steps:
                self._send_step(step)
                for request in self._requests:
                    if request._core.backpressure:
                        await _read(request._core)
                if self._abandoned:
                    return self._fail_abandoned()
        return self._end()

    def _send_step(self, step: Any) -> None:
        if step is None:
            return
        flags = 0 if self._decoupled else FINAL
        for request, sender, response in zip(self._requests, self._senders, self._listed(step), strict=True):
            if response is not None:
                if not self._decoupled and request._core.rescheduled:
                    raise TritonModelException(
                        f"Expected a None object in the execute function return list for reschduled request, "
                        f"found type '{type(response)}'."
                    )
                sender._send(response, flags)

    def _listed(self, step: Any) -> Sequence[InferenceResponse | None]:
        count = len(self._requests)
        if count == 1 and isinstance(step, InferenceResponse):
            return [step]
        if not isinstance(step, list | tuple):
            raise TritonModelException(
                f"Expected a list in the execute yield, found type '{type(step)}'. With several requests in "
                f"a batch it has an InferenceResponse or None for each of them."
            )
        if len(step) != count:
            raise _mismatch(count, len(step))
        for response in step:
            if response is not None and not isinstance(response, InferenceResponse):
                raise TritonModelException(
                    f"Expected an 'InferenceResponse' object in the execute function yield list, found type "
                    f"'{type(response)}'."
                )
        return step

    @property
    def _abandoned(self) -> bool:
        return all(request.is_cancelled() or request._core.filler for request in self._requests)

    def _fail_abandoned(self) -> list[None] | None:
        """Fails the abandoned requests."""
        for request, sender in zip(self._requests, self._senders, strict=True):
            request._core.rescheduled = False
            error: ConchError = CancelledError("")
            if not request._core.cancelled:
                error = DeadlineExceededError("Deadline Exceeded")
            sender._end(error)
        return self._result()

    def _end(self) -> list[None] | None:
        """Ends the requests after the last step."""
        left = [
            sender
            for request, sender in zip(self._requests, self._senders, strict=True)
            if sender._open and not (request._core.rescheduled or request._core.filler)
        ]
        if left and not self._decoupled:
            raise _mismatch(len(self._requests), len(self._requests) - len(left))
        for sender in left:
            sender.send(flags=FINAL)
        return self._result()

    def _result(self) -> list[None] | None:
        return None if self._decoupled else [None] * len(self._requests)


async def _read(core: InferenceRequest) -> None:
    """Waits until the client of a request has caught up; other coroutines go on."""
    loop = asyncio.get_running_loop()
    read = asyncio.Event()
    core.when_writable(lambda: call_in_loop(loop, read.set))
    await read.wait()


def _mismatch(requests: int, responses: int) -> TritonModelException:
    return TritonModelException(
        f"Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
        f"InferenceRequest(s) size is:{requests}, and InferenceResponse(s) size is:{responses}\n"
    )

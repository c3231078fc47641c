"""`execute` as a generator: each item that it yields is a step of the answers to the requests of a batch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from typing import Any

from conch.backends.python.api.pb_errors import TritonModelException
from conch.backends.python.api.pb_request import ReceivedRequest
from conch.backends.python.api.pb_response import InferenceResponse
from conch.backends.python.api.pb_types import TRITONSERVER_RESPONSE_COMPLETE_FINAL as FINAL
from conch.core.errors import CancelledError, ConchError, DeadlineExceededError


class GeneratorExecution:
    """Hands what a generator yields for one batch to the senders of its requests.

    A step is a list with a response or None for each request; for a batch of one request the response by
    itself; or None, where a model only wants to know whether anybody still waits. Once nobody waits for any
    of the answers, the generator is closed at its next step.

    Args:
        requests: The requests of the batch.
        decoupled: Whether each of them may have any number of responses, or exactly one.
    """

    def __init__(self, requests: Sequence[ReceivedRequest], decoupled: bool) -> None:
        self._requests = requests
        self._decoupled = decoupled
        # Made now, so that a failure ends all of them.
        self._senders = [request.get_response_sender() for request in requests]

    def run(self, steps: Generator[Any, None, Any]) -> list[None] | None:
        """Takes all steps of a generator; what `execute` then has to say.

        Raises:
            BaseException: What the generator raises, or what is wrong with a step.
        """
        with closing(steps):
            while True:
                try:
                    step = next(steps)
                except StopIteration as end:
                    returned = end.value
                    break
                self._take(step)
                if self._abandoned:
                    return self._give_up()
        if returned is not None:
            raise TritonModelException(
                f"An execute function that yields responses must not return any, found type "
                f"'{type(returned)}'."
            )
        return self._end()

    async def run_async(self, steps: AsyncGenerator[Any, None]) -> list[None] | None:
        """The same for an async generator."""
        async with aclosing(steps):
            async for step in steps:
                self._take(step)
                if self._abandoned:
                    return self._give_up()
        return self._end()

    def _take(self, step: Any) -> None:
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
                sender.send(response, flags)

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

    def _give_up(self) -> list[None] | None:
        """Ends requests that nobody waits for any more."""
        for request, sender in zip(self._requests, self._senders, strict=True):
            request._core.rescheduled = False
            error: ConchError = CancelledError("")
            if not request._core.cancelled:
                error = DeadlineExceededError("Deadline Exceeded")
            sender._end(error)
        return self._answer()

    def _end(self) -> list[None] | None:
        """Says that there is nothing more to come."""
        left = [
            sender
            for request, sender in zip(self._requests, self._senders, strict=True)
            if sender._open and not (request._core.rescheduled or request._core.filler)
        ]
        if left and not self._decoupled:
            raise _mismatch(len(self._requests), len(self._requests) - len(left))
        for sender in left:
            sender.send(flags=FINAL)
        return self._answer()

    def _answer(self) -> list[None] | None:
        return None if self._decoupled else [None] * len(self._requests)


def _mismatch(requests: int, responses: int) -> TritonModelException:
    return TritonModelException(
        f"Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
        f"InferenceRequest(s) size is:{requests}, and InferenceResponse(s) size is:{responses}\n"
    )

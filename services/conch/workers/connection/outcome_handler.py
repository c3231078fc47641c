"""Handles a worker's outcomes of batches and responses of response senders.

Threads: the I/O loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conch.core.errors import ConchError, as_conch_error, without_traceback
from conch.core.request import InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.scheduling.sequence.implicit_state import SequenceStates
from conch.core.tensor import Tensor
from conch.ipc.channel import WireError
from conch.ipc.codec import FAILED, FINAL, RESCHEDULED, decode_responses
from conch.ipc.response_credit import units
from conch.ipc.tensors import ReceivedMessage, ReturnedTensor, UnreachableError
from conch.workers.connection.in_flight import InFlightTable, KeptRequest, SentBatch
from conch.workers.connection.worker_responses import Grant, OpenRequest


class OutcomeHandler:
    """Completes batches, and delivers responses of senders.

    Args:
        table: The batches and open requests of the worker.
        abandon: Ends a request in the worker.
        grant: Grants response units to requests.
        states: Keeps the states of requests that run again, and of decoupled models; None without states.
        decoupled: True if the model is decoupled: then outcomes of batches have only states.
    """

    def __init__(
        self,
        table: InFlightTable,
        abandon: Callable[[int], None],
        grant: Grant,
        states: SequenceStates | None = None,
        decoupled: bool = False,
    ) -> None:
        self._table = table
        self._states = states
        self._decoupled = decoupled
        self._abandon = abandon
        self._grant = grant

    def done(self, number: int, received: ReceivedMessage) -> None:
        """Completes a batch.

        Raises:
            WireError: There is no such batch, or the outcome does not fit it.
        """
        table = self._table
        sent = table.batches.get(number)
        if sent is None:
            raise WireError(f"batch {number} is done, but has not begun")
        batch = sent.batch
        columns = decode_responses(received, len(batch.requests))
        times, outcome = columns.times, columns.error or columns.responses
        left: Sequence[int] = ()
        if columns.error is None:
            if received.placed:
                _keep_waiting(batch, columns.responses)
            if columns.flags is not None:
                left = self._mark(sent, columns.responses, columns.flags)
        if not table.end_batch(sent, left):
            return  # the worker was lost meanwhile
        for index in left:
            if (entry := table.entry(sent.number_at(index))) is not None:
                entry.since_ns = sent.since_ns
        batch.compute_input_end_ns, batch.compute_output_start_ns, nbytes = times
        batch.bytes_copied += nbytes
        done = sent.done
        # Only `done` holds the outcome now, so memory that it drops is free at once.
        del sent, received, columns
        done(batch, outcome)

    def responses(self, subject: int, received: ReceivedMessage) -> None:
        """Delivers a frame: responses of senders, and ends of requests' responses.

        Raises:
            WireError: The message is malformed.
        """
        columns = decode_responses(received)
        assert columns.numbers is not None and columns.flags is not None, "a frame has both"
        granted: list[tuple[int, int]] = []
        for number, response, flags in zip(columns.numbers, columns.responses, columns.flags, strict=True):
            more = self._response(number, response, flags)
            if more:
                granted.append((number, more))
        if granted:
            self._grant(granted)

    def _response(self, number: int, response: InferenceResponse | None, flags: int) -> int:
        """Delivers a response; returns units to grant to its request."""
        if response is not None and isinstance(response.error, UnreachableError):
            self.response_lost(number, response.error)
            return 0
        entry = self._table.entry(number)
        final = flags & FINAL != 0
        if final:
            self._table.finish(number)
        if entry is None:
            return 0  # it ended with an error meanwhile
        if final and entry.watched is not None:
            entry.watched.ended(entry)
        if flags & FAILED:
            entry.request.failed = True
        return entry.deliver(response, final, 0 if response is None else units(response.outputs))

    def done_lost(self, number: int, error: ConchError) -> None:
        """Fails a batch whose outcome could not be read.

        Raises:
            WireError: There is no such batch.
        """
        sent = self._table.batches.get(number)
        if sent is None:
            raise WireError(f"batch {number} is done, but has not begun")
        self.fail(sent, error)

    def response_lost(self, number: int, error: ConchError) -> None:
        """Fails a request one of whose responses could not be read; later ones are ignored."""
        entry = self._table.entry(number)
        if entry is None:
            return
        self._abandon(number)
        self._table.finish(number)
        if entry.watched is not None:
            entry.watched.ended(entry)
        entry.fail(error)

    def fail(self, sent: SentBatch, error: ConchError, opened: dict[int, OpenRequest] | None = None) -> None:
        """Fails a batch, unless it has left the table; `opened` has the requests of a closed table."""
        if opened is not None:
            for number in sent.numbers:
                opened.pop(number, None)
        elif not self._table.end_batch(sent):
            return
        sent.done(sent.batch, error)

    def _mark(
        self, sent: SentBatch, responses: list[InferenceResponse | None], flags: Sequence[int]
    ) -> list[int]:
        """Marks requests that failed or run again; returns the indexes of those that stay open.

        Raises:
            WireError: A request goes on and has outputs, but there are no states.
        """
        table, requests = self._table, sent.batch.requests
        left: list[int] = []
        for index, (request, response, each) in enumerate(zip(requests, responses, flags, strict=True)):
            if each & FAILED:
                request.failed = True
            states = response is not None and response.error is None and self._decoupled
            if response is not None and (each & RESCHEDULED or states):
                if self._states is None:
                    raise WireError("a request that goes on has outputs, and there are no states")
                self._states.collect(request, response)
                if response.error is None:
                    responses[index] = None
                else:
                    self._abandon(sent.number_at(index))
            if responses[index] is not None:
                continue
            left.append(index)
            if each & RESCHEDULED and not request.filler:
                number = sent.number_at(index)
                request.rescheduled = True
                request.backend_state = KeptRequest(table, number)
                table.rescheduled.add(number)
        return left


def _keep_waiting(batch: Batch, responses: Sequence[InferenceResponse | None]) -> None:
    """Copies outputs of responses that wait: the model may write to its inputs and its GPU memory before."""
    for request, response in zip(batch.requests, responses, strict=True):
        if response is not None and request.responses_wait:
            try:
                response.outputs = [_detached(each) for each in response.outputs]
            except Exception as failure:  # no memory for a copy: only this request fails
                response.outputs, response.error = [], without_traceback(as_conch_error(failure))


def _detached(tensor: Tensor) -> Tensor:
    """A tensor that the model can't change."""
    return tensor.detached(tensor.name) if tensor.on_device or isinstance(tensor, ReturnedTensor) else tensor

"""Handles a worker's outcomes of batches and responses of response senders.

Threads: the thread that reads the socket. Used by: worker_connection.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

from conch.core.backend import Outcome
from conch.core.errors import ConchError, as_conch_error, without_traceback
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor
from conch.workers.connection.in_flight import InFlightTable, KeptRequest, SentBatch
from conch.workers.connection.worker_responses import OpenRequest
from conch.workers.protocol import message_records
from conch.workers.protocol.message_records import DoneRecord, ResponseRecord
from conch.workers.protocol.received_message import ReceivedMessage
from conch.workers.protocol.tensor_kinds import ReturnedTensor
from conch.workers.protocol.tensor_transport import UnreachableError
from conch.workers.protocol.wire import WireError


class OutcomeHandler:
    """Completes batches, and delivers responses of senders. `abandon` ends a request in the worker."""

    def __init__(self, table: InFlightTable, spec: ModelSpec, abandon: Callable[[int], None]) -> None:
        self._table = table
        self._abandon = abandon
        self._decoupled = spec.decoupled

    def done(self, number: int, received: ReceivedMessage) -> None:
        """Completes a batch.

        Raises:
            WireError: There is no such batch, or the outcome does not fit it.
        """
        table = self._table
        sent = table.batches.get(number)
        if sent is None:
            raise WireError(f"batch {number} is done, but has not begun")
        reader = received.reader
        record = DoneRecord.decode(reader)
        outcome: Outcome
        if record.error:
            outcome = message_records.decode_error(reader.take(record.error))
        else:
            if record.length != len(sent.batch.requests):
                raise WireError(f"{record.length} responses to {len(sent.batch.requests)} requests")
            outcome = (
                _homogeneous(received, record.length)
                if record.homogeneous
                else self._responses(sent, received)
            )
        reader.end()
        if table.remove(number) is None:
            return  # the worker was lost meanwhile
        self._settle(sent, outcome)
        batch = sent.batch
        batch.compute_input_end_ns = record.input_end_ns
        batch.compute_output_start_ns = record.output_start_ns
        batch.bytes_copied += record.bytes_copied
        done = sent.done
        # Only `done` holds the outcome now, so memory that it drops is free at once.
        del sent, received, reader
        done(batch, outcome)

    def response(self, number: int, received: ReceivedMessage) -> None:
        """Delivers a response of a sender, or the end of a request's responses.

        Raises:
            WireError: The message is malformed.
        """
        record = ResponseRecord.decode(received.reader)
        try:
            outputs: Sequence[Tensor] = received.tensors() if record.has_tensors else []
        except UnreachableError as error:
            self.response_lost(number, without_traceback(error))
            return
        received.reader.end()
        entry = self._table.entry(number)
        if record.final:
            self._table.finish((number,))
        if entry is None:
            return  # it ended with an error meanwhile
        if record.final and entry.watched is not None:
            entry.watched.ended(entry)
        if record.failed:
            entry.request.failed = True
        response: InferenceResponse | None = None
        if record.present:
            parameters = None if record.parameters is None else dict(record.parameters)
            response = InferenceResponse(list(outputs), record.error, parameters)
        entry.deliver(response, record.final, message_records.units(outputs))

    def done_lost(self, number: int, error: ConchError) -> None:
        """Fails a batch whose outcome could not be read.

        Raises:
            WireError: There is no such batch.
        """
        sent = self._table.batches.get(number)
        if sent is None:
            raise WireError(f"batch {number} is done, but has not begun")
        if self._table.remove(number) is not None:
            self.fail(sent, error)

    def response_lost(self, number: int, error: ConchError) -> None:
        """Fails a request one of whose responses could not be read; later ones are ignored."""
        entry = self._table.entry(number)
        if entry is None:
            return
        self._abandon(number)
        self._table.finish((number,))
        if entry.watched is not None:
            entry.watched.ended(entry)
        entry.fail(error)

    def fail(self, sent: SentBatch, error: ConchError, opened: dict[int, OpenRequest] | None = None) -> None:
        """Fails a batch that has left the table; `opened` has its requests if they have left it too."""
        self._leave_to_queues(sent, opened)
        sent.done(sent.batch, error)

    def _responses(self, sent: SentBatch, received: ReceivedMessage) -> list[InferenceResponse | None]:
        responses: list[InferenceResponse | None] = []
        for request, number in zip(sent.batch.requests, sent.numbers, strict=True):
            record = ResponseRecord.decode(received.reader)
            error = record.error
            try:
                outputs = received.tensors() if record.has_tensors else []
            except UnreachableError as unreachable:  # the worker sends copies from now on
                outputs, error = [], without_traceback(unreachable)
            if request.responses_wait:
                # The model may write to its inputs and its GPU memory before the response is sent.
                try:
                    outputs = [_own(each) for each in outputs]
                except Exception as failure:  # no memory for a copy: only this request fails
                    outputs, error = [], without_traceback(as_conch_error(failure))
            if record.failed:
                request.failed = True
            if record.present:
                parameters = None if record.parameters is None else dict(record.parameters)
                responses.append(InferenceResponse(outputs, error, parameters))
                continue
            responses.append(None)
            if record.rescheduled and not request.filler:
                request.rescheduled = True
                request.kept = KeptRequest(self._table, number)
                self._table.rescheduled.add(number)
        return responses

    def _settle(self, sent: SentBatch, outcome: Outcome) -> None:
        """Removes the requests that are completed with their batch."""
        table = self._table
        if isinstance(outcome, BaseException):
            self._leave_to_queues(sent)
            return
        if self._decoupled and any(request.rescheduled for request in sent.batch.requests):
            # Responses sent before come first.
            _end_in_queues(sent, [table.entry(number) for number in sent.numbers])
        if not outcome or None in outcome:
            responses = outcome or itertools.repeat(None)
            pairs = list(zip(sent.numbers, responses, strict=False))
            table.finish([number for number, response in pairs if response is not None])
            for number, response in pairs:
                if response is None and (entry := table.entry(number)) is not None:
                    entry.since_ns = sent.since_ns
        else:
            table.finish(sent.numbers)

    def _leave_to_queues(self, sent: SentBatch, opened: dict[int, OpenRequest] | None = None) -> None:
        """Removes the requests of a failed batch; those of decoupled models end behind earlier responses."""
        if self._decoupled:
            find = self._table.entry if opened is None else opened.get
            _end_in_queues(sent, [find(number) for number in sent.numbers])
        if opened is None:
            self._table.finish(sent.numbers)
            return
        for number in sent.numbers:
            opened.pop(number, None)


def _end_in_queues(sent: SentBatch, entries: Sequence[OpenRequest | None]) -> None:
    """Makes the batch end its requests behind responses that are still queued."""
    sent.batch.end = partial(_end_in_queue, dict(zip(sent.batch.requests, entries, strict=True)))


def _end_in_queue(
    queues: dict[InferenceRequest, OpenRequest | None], request: InferenceRequest, response: InferenceResponse
) -> None:
    """Queues the last response of a request."""
    queue = queues[request]
    if queue is not None:
        queue.deliver(response, True, 0)


def _own(tensor: Tensor) -> Tensor:
    """A tensor that the model can't change."""
    return tensor.detached(tensor.name) if tensor.on_device or isinstance(tensor, ReturnedTensor) else tensor


def _homogeneous(received: ReceivedMessage, length: int) -> list[InferenceResponse]:
    """Responses of nothing but tensors with one common description."""
    return list(map(InferenceResponse, received.homogeneous_tensors(length)))

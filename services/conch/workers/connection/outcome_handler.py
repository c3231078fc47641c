"""Takes what a worker sends of the requests that it has: outcomes of batches, and responses of senders."""

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


class Results:
    """Gives batches their outcomes, and requests the responses that senders send.

    Args:
        table: What the worker has.
        spec: The model version.
        abandon: Tells the worker that a request that it has is over, by its number.
    """

    def __init__(self, table: InFlightTable, spec: ModelSpec, abandon: Callable[[int], None]) -> None:
        self._table = table
        self._abandon = abandon
        self._decoupled = spec.decoupled

    def done(self, number: int, received: ReceivedMessage) -> None:
        """Takes the outcome of a batch.

        Raises:
            WireError: There is no such batch, or this is no outcome of it.
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
        if table.take(number) is None:
            return  # it has been lost meanwhile
        self._settle(sent, outcome)
        batch = sent.batch
        batch.compute_input_end_ns = record.input_end_ns
        batch.compute_output_start_ns = record.output_start_ns
        batch.bytes_copied += record.bytes_copied
        done = sent.done
        # What has come is done's alone now: memory that it lets go of goes at once.
        del sent, batch, received, reader
        done(outcome)

    def response(self, number: int, received: ReceivedMessage) -> None:
        """Takes a response that a sender has sent, or that there will be no more.

        Raises:
            WireError: It is none.
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
            self._table.over((number,))
        if entry is None:
            return  # it has been answered with an error meanwhile
        if record.final and entry.watched is not None:
            entry.watched.ended(entry)
        if record.failed:
            entry.request.failed = True
        response: InferenceResponse | None = None
        if record.present:
            parameters = None if record.parameters is None else dict(record.parameters)
            response = InferenceResponse(list(outputs), record.error, parameters)
        entry.hand(response, record.final, message_records.units(outputs))

    def done_lost(self, number: int, error: ConchError) -> None:
        """Ends a batch whose outcome could not be read.

        Raises:
            WireError: There is no such batch.
        """
        sent = self._table.batches.get(number)
        if sent is None:
            raise WireError(f"batch {number} is done, but has not begun")
        if self._table.take(number) is not None:
            self.fail(sent, error)

    def response_lost(self, number: int, error: ConchError) -> None:
        """Ends a request one of whose responses could not be read: nothing may follow the error."""
        entry = self._table.entry(number)
        if entry is None:
            return
        self._abandon(number)
        self._table.over((number,))
        if entry.watched is not None:
            entry.watched.ended(entry)
        entry.fail(error)

    def fail(self, sent: SentBatch, error: ConchError, opened: dict[int, OpenRequest] | None = None) -> None:
        """Ends a batch with an error.

        Args:
            sent: The batch, which is not in the table any more.
            error: The error.
            opened: Where its requests are, if not in the table.
        """
        self._leave_to_queues(sent, opened)
        sent.done(error)

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
                # The model may write to its inputs, and to what it has on a GPU, before the response is sent.
                try:
                    outputs = [_own(each) for each in outputs]
                except Exception as failure:  # no memory for a copy: that is this request's matter alone
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
                self._table.again.add(number)
        return responses

    def _settle(self, sent: SentBatch, outcome: Outcome) -> None:
        """Forgets the requests of a batch that have got their answers with it."""
        table = self._table
        if isinstance(outcome, BaseException):
            self._leave_to_queues(sent)
            return
        if self._decoupled and any(request.rescheduled for request in sent.batch.requests):
            # Those that must not run again are told so after what they have been sent.
            _end_in_queues(sent, [table.entry(number) for number in sent.numbers])
        if not outcome or None in outcome:
            responses = outcome or itertools.repeat(None)
            pairs = list(zip(sent.numbers, responses, strict=False))
            table.over([number for number, response in pairs if response is not None])
            for number, response in pairs:
                if response is None and (entry := table.entry(number)) is not None:
                    entry.since_ns = sent.since_ns
        else:
            table.over(sent.numbers)

    def _leave_to_queues(self, sent: SentBatch, opened: dict[int, OpenRequest] | None = None) -> None:
        """Forgets the requests of a batch that has failed.

        What those of a decoupled model have been sent before comes first, and to hand that over may block.
        """
        if self._decoupled:
            find = self._table.entry if opened is None else opened.get
            _end_in_queues(sent, [find(number) for number in sent.numbers])
        if opened is None:
            self._table.over(sent.numbers)
            return
        for number in sent.numbers:
            opened.pop(number, None)


def _end_in_queues(sent: SentBatch, entries: Sequence[OpenRequest | None]) -> None:
    """Has whoever ends the requests of a batch do so behind the responses that wait for their clients."""
    sent.batch.end = partial(_end_in_queue, dict(zip(sent.batch.requests, entries, strict=True)))


def _end_in_queue(
    queues: dict[InferenceRequest, OpenRequest | None], request: InferenceRequest, response: InferenceResponse
) -> None:
    """Ends a request after what it has been sent, unless that ends it."""
    queue = queues[request]
    if queue is not None:
        queue.hand(response, True, 0)


def _own(tensor: Tensor) -> Tensor:
    """A tensor that stays as it is, whatever the model does."""
    return tensor.detached(tensor.name) if tensor.on_device or isinstance(tensor, ReturnedTensor) else tensor


def _homogeneous(received: ReceivedMessage, length: int) -> list[InferenceResponse]:
    """Responses that are nothing but tensors, which one list describes."""
    return list(map(InferenceResponse, received.homogeneous_tensors(length)))

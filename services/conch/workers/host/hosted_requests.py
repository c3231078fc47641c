"""Requests and batches in a worker, decoded from messages. Used by: worker_loop, response_writer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from conch.core.request import InferenceRequest, Responder
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import ModelSpec
from conch.workers.protocol import message_records
from conch.workers.protocol.message_records import BatchRecord, RequestRecord
from conch.workers.protocol.received_message import ReceivedMessage
from conch.workers.protocol.tensor_kinds import worker_inputs
from conch.workers.protocol.wire import WireError


class HostedRequest(InferenceRequest):
    """A request from the server.

    Attributes:
        number: Its number on the socket.
        granted: Response units that the server has granted; changed by the thread that reads.
        spent: Units used, which the last response may overdraw; changed by the sending thread.
    """

    __slots__ = ("granted", "number", "spent")

    number: int
    granted: int
    spent: int


class HostedFiller(HostedRequest):
    """A padding row of a batch."""

    filler: ClassVar[bool] = True

    __slots__ = ()


class HostedRequests:
    """Open and rescheduled requests by number; `responder` takes their responses."""

    def __init__(self, spec: ModelSpec, responder: Responder) -> None:
        self._name = spec.name
        self._version = str(spec.version)
        self.responder = responder
        self._by_number: dict[int, HostedRequest] = {}

    def get(self, number: int) -> HostedRequest | None:
        """An open request."""
        return self._by_number.get(number)

    def remove(self, number: int) -> None:
        """Removes a completed request."""
        self._by_number.pop(number, None)

    def remove_all(self, requests: Iterable[HostedRequest]) -> None:
        """Removes completed requests."""
        remove = self._by_number.pop
        for request in requests:
            remove(request.number, None)

    def keep(self, request: HostedRequest) -> None:
        """Keeps a request, even a completed one, to which the server may still refer."""
        self._by_number[request.number] = request

    def batch(self, received: ReceivedMessage) -> Batch:
        """Decodes a batch.

        Raises:
            WireError: The message is malformed.
        """
        reader = received.reader
        record = BatchRecord.decode(reader)
        fillers = 0
        requests: list[InferenceRequest]
        if record.homogeneous:
            requests = self._homogeneous(received, record.length)
        else:
            requests = [self._request(received) for _ in range(record.length)]
            reader.end()
            fillers = sum(request.filler for request in requests)
        batch = Batch(requests, record.size, None if record.instance < 0 else record.instance)
        batch.compute_start_ns = record.start_ns
        batch.fillers = fillers
        return batch

    def _homogeneous(self, received: ReceivedMessage, length: int) -> list[InferenceRequest]:
        requested, rows, ids = message_records.decode_homogeneous(received.reader, length)
        lists = worker_inputs(*received.homogeneous_lists(length), length)
        model, version, responder, by_number = self._name, self._version, self.responder, self._by_number
        requests: list[InferenceRequest] = []
        for (number, received_ns, queued, deadline, size, _), request_id, inputs in zip(
            rows, ids, lists, strict=True
        ):
            request = HostedRequest(model, version, inputs, responder, received_ns, request_id, requested)
            request.number = number
            request.granted, request.spent = message_records.WINDOW, 0
            request.queued_ns = queued
            if deadline != message_records.NO_DEADLINE:
                request.deadline_ns = deadline
            request.batch_size = size
            by_number[number] = request
            requests.append(request)
        return requests

    def _request(self, received: ReceivedMessage) -> HostedRequest:
        record = RequestRecord.decode(received.reader)
        inputs = {tensor.name: tensor for tensor in received.tensors()}
        flags = record.flags
        parameters = None if record.parameters is None else dict(record.parameters)
        if flags & message_records.AGAIN:
            known = self._by_number.get(record.number)
            if known is None:
                raise WireError(f"request {record.number} runs again, but has not run")
            request = known
            request.inputs = inputs
            request.rescheduled = False
        else:
            kind = HostedFiller if flags & message_records.FILLER else HostedRequest
            request = kind(
                self._name,
                self._version,
                inputs,
                self.responder,
                record.received_ns,
                record.id,
                record.requested,
                parameters,
            )
            request.number = record.number
            request.granted, request.spent = message_records.WINDOW, 0
            if not request.filler:
                self._by_number[record.number] = request
        request.queued_ns = record.queued_ns
        request.deadline_ns = record.deadline_ns
        request.batch_size = record.batch_size
        request.correlation_id = record.correlation_id
        request.priority = record.priority
        request.timeout_us = record.timeout_us
        if flags:
            request.sequence_start = bool(flags & message_records.SEQUENCE_START)
            request.sequence_end = bool(flags & message_records.SEQUENCE_END)
            request.cancelled = bool(flags & message_records.CANCELLED)
        return request

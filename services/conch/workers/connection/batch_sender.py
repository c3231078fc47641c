"""Sends batches to a worker, and control messages about their requests.

Owns: nothing but what was told of GPUs. Threads: `send` runs on one thread at a time, the rest on any.
Used by: worker_connection.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from conch.backends.python.runtime.python_instance import only_cpu_inputs
from conch.core.errors import ConchError, InvalidArgumentError, as_conch_error
from conch.core.spec import ModelSpec
from conch.memory.cuda import CudaDevices
from conch.workers.connection.in_flight import InFlightTable, SentBatch
from conch.workers.connection.message_stream import MessageStream
from conch.workers.connection.packet_channel import ChannelClosedError
from conch.workers.protocol import wire
from conch.workers.protocol.devices import ServerDevices, use_on_server
from conch.workers.protocol.received_message import ReceivedMessage
from conch.workers.protocol.request_columns import MOST_REQUESTS, encode_requests
from conch.workers.protocol.response_columns import encode_credit
from conch.workers.protocol.tensor_transport import Payload, unmapped_error
from conch.workers.protocol.wire import Kind, WireError
from conch.workers.protocol.worker_log import WorkerLog

log = logging.getLogger(__name__)


class BatchSender:
    """Sends to one worker. `fail` ends a batch that can't be sent."""

    def __init__(
        self,
        stream: MessageStream,
        spec: ModelSpec,
        table: InFlightTable,
        records: WorkerLog,
        gpus: CudaDevices,
        fail: Callable[[SentBatch, ConchError], None],
    ) -> None:
        self._stream = stream
        self._spec = spec
        self._table = table
        self._records = records
        self._gpus = gpus
        self._devices: ServerDevices | None = None  # until the server uses a GPU
        self._fail = fail

    def send(self, sent: SentBatch) -> None:
        """Sends a batch of the in-flight table; ends it if that fails."""
        batch = sent.batch
        payload: Payload | None = None
        try:
            if self._table.rescheduled:
                for number in self._table.completed():
                    self._stream.send(Kind.FORGET, number)
            if self._records.changed:
                self._stream.send(Kind.LEVEL, 0, wire.encode_json({"level": self._records.level}))
            if self._gpus.in_use and self._devices is None:
                lends = not only_cpu_inputs(self._spec)
                tell = partial(self._stream.send, Kind.DEVICES, 0)
                self._devices = use_on_server(self._stream, self._gpus, lends, tell)
            requests = batch.requests
            if len(requests) > MOST_REQUESTS:
                raise InvalidArgumentError(f"a batch for a worker has at most {MOST_REQUESTS} requests")
            payload = self._stream.pack([request.inputs.values() for request in requests], True)
            batch.bytes_copied += payload.bytes_copied
            again = sent.again
            head = encode_requests(
                requests,
                batch.size,
                -1 if batch.instance is None else batch.instance,
                batch.compute_start_ns,
                None if again is None else [again.get(index, 0) for index in range(len(requests))],
            )
            self._stream.send(Kind.EXECUTE, sent.number, head + payload.fields, payload)
        except BaseException as error:
            if payload is not None:
                self._stream.discard(payload)
            # On a closed channel the reader thread ends the batch.
            if not isinstance(error, ChannelClosedError):
                self._fail(sent, as_conch_error(error))
            return
        for index, request in enumerate(batch.requests):
            # A cancellation before the worker knew the request was lost; a second one does no harm.
            if request.cancelled:
                self.cancel(sent.number_at(index))

    def unreachable(self, number: int, received: ReceivedMessage) -> None:
        """Resends, once, a batch whose tensors the worker could not open.

        If GPU memory was involved, the worker gets copies in host memory from then on.

        Raises:
            WireError: There is no such batch.
        """
        sent = self._table.batches.get(number)
        if sent is None:
            raise WireError(f"batch {number} is out of reach, but has not begun")
        if sent.resent:
            self._fail(sent, unmapped_error("the worker can't open further files"))
            for each in sent.numbers:
                self.notify(Kind.FORGET, each)
            return
        sent.resent = True
        if self._devices is not None and self._devices.lends:
            self._devices.lends = False
            log.warning("a worker of model '%s' can't open memory on GPUs: it gets copies", self._spec.name)
        self.send(sent)

    def cancel(self, number: int) -> None:
        """Cancels an open request."""
        if self._table.request(number) is not None:
            self.notify(Kind.CANCEL, number)

    def abandon(self, number: int) -> None:
        """Cancels and forgets a request; later responses of the worker are ignored."""
        self.cancel(number)
        self.notify(Kind.FORGET, number)

    def credit(self, number: int, units: int) -> None:
        """Grants further response units to a request (flow control)."""
        self.notify(Kind.CREDIT, number, encode_credit(units))

    def notify(self, kind: Kind, subject: int, fields: bytes = b"") -> None:
        """Sends a message without tensors; does nothing on a closed channel."""
        try:
            self._stream.send(kind, subject, fields)
        except ChannelClosedError:
            pass  # the reader thread notices

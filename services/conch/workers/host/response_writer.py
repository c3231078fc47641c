"""Writes outcomes of batches and responses of senders to the server.

Threads: batches on the main thread, responses on the senders'. Used by: worker_loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from conch.core.backend import Outcome
from conch.core.errors import ConchError, InternalError, as_conch_error, message_of
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_errors import at_fault
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor
from conch.workers.connection.message_stream import MessageStream
from conch.workers.connection.packet_channel import ChannelClosedError
from conch.workers.host.host_reader import HostReader
from conch.workers.host.hosted_requests import HostedRequest, HostedRequests
from conch.workers.protocol import message_records
from conch.workers.protocol.message_records import DoneRecord, ResponseRecord
from conch.workers.protocol.tensor_transport import Payload
from conch.workers.protocol.wire import Kind

Responses = Sequence[InferenceResponse | None]


class ResponseWriter:
    """Sends outcomes and responses.

    Attributes:
        requests: The open requests.
    """

    def __init__(self, spec: ModelSpec, stream: MessageStream, reader: HostReader) -> None:
        self._name = spec.name
        self._decoupled = spec.decoupled
        self._stream = stream
        self._reader = reader
        self.requests = HostedRequests(spec, self._respond)

    # --- batches ------------------------------------------------------------------------------------------

    def fields(self, batch: Batch, outcome: Outcome) -> tuple[bytes, Payload | None]:
        """Encodes the outcome of a batch; the result does not refer to the batch."""
        if not isinstance(outcome, BaseException):
            try:
                try:
                    return self._responses(batch, outcome)
                except Exception:
                    if not self._mark_faulty(outcome):
                        raise
                    return self._responses(batch, outcome)
            except Exception as error:  # no memory, or tensors that do not match their shapes
                outcome = InternalError(f"responses can't be sent: {message_of(error)}")
        text = message_records.encode_error(as_conch_error(outcome))
        self.requests.remove_all(_requests(batch))
        return _times(batch, 0, len(text)) + text, None

    def send_done(self, number: int, fields: bytes, payload: Payload | None) -> None:
        """Sends an encoded outcome, or the error why that failed.

        Raises:
            ChannelClosedError: The server is gone.
        """
        try:
            self._stream.send(Kind.DONE, number, fields, payload)
        except (OSError, MemoryError, ConchError) as error:  # no memory or descriptor
            text = message_records.encode_error(
                InternalError(f"responses can't be sent: {message_of(error)}")
            )
            self._stream.send(Kind.DONE, number, DoneRecord(0, 0, 0, 0, len(text)).encode() + text)

    def _mark_faulty(self, responses: Responses | None) -> bool:
        """Turns responses that can't be sent into errors, so that the others can; True if there were any."""
        blamed = False
        for response in responses or ():
            error = at_fault(self._name, response)
            if response is not None and error is not None:
                response.outputs, response.error = [], error
                blamed = True
        return blamed

    def _responses(self, batch: Batch, responses: Responses | None) -> tuple[bytes, Payload]:
        heads: list[tuple[bytes, bool]] | None = None
        lists = None if responses is None else self._only_tensors(batch, responses)
        if lists is None:
            heads, lists = self._heads(batch, responses)
        payload = self._stream.pack(lists, True, True)
        batch.bytes_copied += payload.bytes_copied
        if heads is None:
            if payload.homogeneous is not None:
                return _times(batch, len(lists), 0, True) + payload.homogeneous, payload
            heads = [(message_records.PLAIN_RESPONSE, True)] * len(lists)
        parts = [_times(batch, len(heads), 0)]
        described = iter(payload.lists)
        for head, has_tensors in heads:
            parts.append(head)
            if has_tensors:
                parts.append(next(described))
        return b"".join(parts), payload

    def _only_tensors(self, batch: Batch, responses: Responses) -> list[Sequence[Tensor]] | None:
        """Outputs of a batch whose responses are nothing but tensors; otherwise None, see `_heads`."""
        requests = _requests(batch)
        lists: list[Sequence[Tensor]] = []
        for request, response in zip(requests, responses, strict=True):
            if response is None or response.error is not None or response.parameters or request.completed:
                return None
            lists.append(response.outputs)
        self.requests.remove_all(requests)
        return lists

    def _heads(
        self, batch: Batch, responses: Responses | None
    ) -> tuple[list[tuple[bytes, bool]], list[Sequence[Tensor]]]:
        """A record for each request and whether it has tensors; and the tensors."""
        requests = self.requests
        heads: list[tuple[bytes, bool]] = []
        lists: list[Sequence[Tensor]] = []
        entries = responses if responses is not None else [None] * len(batch.requests)
        for request, response in zip(_requests(batch), entries, strict=True):
            if response is not None or (request.completed and not request.rescheduled):
                requests.remove(request.number)
            elif request.rescheduled:
                # Even if completed: the server may resend it before it knows.
                requests.keep(request)
            record = _record(request, response)
            heads.append((record.encode(), record.has_tensors))
            if response is not None and response.error is None:
                lists.append(response.outputs)
        return heads, lists

    # --- senders ------------------------------------------------------------------------------------------

    def _respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Sends a response of a sender; blocks until the server has granted units for it."""
        assert isinstance(request, HostedRequest), "made by `HostedRequests`"
        if request.filler:
            return
        if self._decoupled and request.granted <= request.spent and not self._has_credit(request):
            return
        record = ResponseRecord(response is not None, final=final)
        outputs: Sequence[Tensor] = ()
        if response is not None:
            record.error, record.parameters, outputs = response.error, response.parameters, response.outputs
        record.failed = getattr(request, "failed", False)
        try:
            try:
                self._send_response(request, record, outputs)
            except ChannelClosedError:
                raise
            except Exception as error:  # no memory, or tensors that do not match their shapes
                record.present, record.parameters = True, None
                record.error = at_fault(self._name, response)
                if record.error is None:
                    record.error = InternalError(f"a response can't be sent: {message_of(error)}")
                # Nothing may follow an error; later responses are dropped.
                record.final = request.completed = True
                self._send_response(request, record, ())
        except ChannelClosedError:
            pass  # the thread that reads notices, and ends the process

    def _has_credit(self, request: HostedRequest) -> bool:
        """Waits until the server grants further units; False if the request has ended."""
        requests = self.requests
        number = request.number
        try:
            self._reader.until(lambda: request.granted > request.spent or requests.get(number) is not request)
        except ChannelClosedError:
            return False
        return requests.get(number) is request

    def _send_response(
        self, request: HostedRequest, record: ResponseRecord, outputs: Sequence[Tensor]
    ) -> None:
        head = record.encode()
        # Copies, also from GPUs: the model may write to its outputs at once.
        payload = self._stream.pack([outputs] if record.has_tensors else [])
        if record.final:
            self.requests.remove(request.number)
            if request.rescheduled:
                self.requests.keep(request)  # until the server resends or forgets it
        fields = head + b"".join(payload.lists)
        request.spent += message_records.units(outputs)  # senders hold a lock
        self._stream.send(Kind.RESPONSE, request.number, fields, payload)


def _requests(batch: Batch) -> list[HostedRequest]:
    """A batch's requests, which `HostedRequests` has made."""
    return cast("list[HostedRequest]", batch.requests)


def _record(request: HostedRequest, response: InferenceResponse | None) -> ResponseRecord:
    """A request's record in the outcome of its batch."""
    failed = getattr(request, "failed", False)
    if response is None:
        return ResponseRecord(rescheduled=request.rescheduled, failed=failed)
    return ResponseRecord(True, response.error, response.parameters, failed=failed)


def _times(batch: Batch, count: int, error: int, homogeneous: bool = False) -> bytes:
    times = batch.compute_input_end_ns, batch.compute_output_start_ns
    return DoneRecord(*times, batch.bytes_copied, count, error, homogeneous).encode()

"""What a worker's model answers, as messages to the server."""

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
from conch.workers.host.host_reader import Reading
from conch.workers.host.hosted_requests import HostRequest, Requests
from conch.workers.protocol import message_records
from conch.workers.protocol.message_records import DoneRecord, ResponseRecord
from conch.workers.protocol.tensor_transport import Payload
from conch.workers.protocol.wire import Kind

Responses = Sequence[InferenceResponse | None]


class Answering:
    """Says what has become of batches, and sends what senders send.

    Args:
        spec: The model version.
        exchange: Where answers go.
        reading: Who reads what the server says.

    Attributes:
        requests: The requests that the model has to answer.
    """

    def __init__(self, spec: ModelSpec, stream: MessageStream, reading: Reading) -> None:
        self._name = spec.name
        self._decoupled = spec.decoupled
        self._stream = stream
        self._reading = reading
        self.requests = Requests(spec, self._respond)

    # --- batches ------------------------------------------------------------------------------------------

    def fields(self, batch: Batch, outcome: Outcome) -> tuple[bytes, Payload | None]:
        """What is to be sent when a batch has been executed: nothing of it refers to the batch any more."""
        if not isinstance(outcome, BaseException):
            try:
                try:
                    return self._responses(batch, outcome)
                except Exception:
                    if not self._blame(outcome):
                        raise
                    return self._responses(batch, outcome)
            except Exception as error:  # no memory for them, or they are not what they say they are
                outcome = InternalError(f"responses can't be sent: {message_of(error)}")
        text = message_records.encode_error(as_conch_error(outcome))
        self.requests.remove_all(_requests(batch))
        return _times(batch, 0, len(text)) + text, None

    def send_done(self, number: int, fields: bytes, payload: Payload | None) -> None:
        """Sends what came of a batch, or why that can't be sent.

        Args:
            number: The batch's number on the socket.
            fields: See `fields`.
            payload: Likewise.

        Raises:
            ChannelClosedError: The server is gone.
        """
        try:
            self._stream.send(Kind.DONE, number, fields, payload)
        except (OSError, MemoryError, ConchError) as error:  # there is no room for it
            text = message_records.encode_error(
                InternalError(f"responses can't be sent: {message_of(error)}")
            )
            self._stream.send(Kind.DONE, number, DoneRecord(0, 0, 0, 0, len(text)).encode() + text)

    def _blame(self, responses: Responses | None) -> bool:
        """Makes errors of the responses that can't be sent, so that the others can; whether there are any."""
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
        """The outputs of a batch where there is nothing else to say: the quick way for what most models do.

        Returns:
            None if there is; see `_heads` then.
        """
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
        """What is to be said of each request, and whether tensors belong to it; and the tensors."""
        requests = self.requests
        heads: list[tuple[bytes, bool]] = []
        lists: list[Sequence[Tensor]] = []
        entries = responses if responses is not None else [None] * len(batch.requests)
        for request, response in zip(_requests(batch), entries, strict=True):
            if response is not None or (request.completed and not request.rescheduled):
                requests.remove(request.number)
            elif request.rescheduled:
                # Also if it has been answered: the server may not know that when it sends it again.
                requests.keep(request)
            record = _record(request, response)
            heads.append((record.encode(), record.has_tensors))
            if response is not None and response.error is None:
                lists.append(response.outputs)
        return heads, lists

    # --- senders ------------------------------------------------------------------------------------------

    def _respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Sends a response that a sender sends, once the server has handed enough of the others on."""
        assert isinstance(request, HostRequest), "they have been made here"
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
            except Exception as error:  # no memory for it, or it is not what it says it is
                record.present, record.parameters = True, None
                record.error = at_fault(self._name, response)
                if record.error is None:
                    record.error = InternalError(f"a response can't be sent: {message_of(error)}")
                # Nothing may follow an error; what the model goes on to send goes nowhere.
                record.final = request.completed = True
                self._send_response(request, record, ())
        except ChannelClosedError:
            pass  # whoever reads notices, and ends the process

    def _has_credit(self, request: HostRequest) -> bool:
        """Waits until the server wants more responses to a request; False if it wants none any more."""
        requests = self.requests
        number = request.number
        try:
            self._reading.until(
                lambda: request.granted > request.spent or requests.get(number) is not request
            )
        except ChannelClosedError:
            return False
        return requests.get(number) is request

    def _send_response(self, request: HostRequest, record: ResponseRecord, outputs: Sequence[Tensor]) -> None:
        head = record.encode()
        # Copies, also of outputs on GPUs: the model may go on to write to them at once.
        payload = self._stream.pack([outputs] if record.has_tensors else [])
        if record.final:
            self.requests.remove(request.number)
            if request.rescheduled:
                self.requests.keep(request)  # until the server says what becomes of it
        fields = head + b"".join(payload.lists)
        request.spent += message_records.units(outputs)  # nobody else does so: senders hold a lock
        self._stream.send(Kind.RESPONSE, request.number, fields, payload)


def _requests(batch: Batch) -> list[HostRequest]:
    """The requests of a batch, which have been made here."""
    return cast("list[HostRequest]", batch.requests)


def _record(request: HostRequest, response: InferenceResponse | None) -> ResponseRecord:
    """What a batch says of a request."""
    failed = getattr(request, "failed", False)
    if response is None:
        return ResponseRecord(rescheduled=request.rescheduled, failed=failed)
    return ResponseRecord(True, response.error, response.parameters, failed=failed)


def _times(batch: Batch, count: int, error: int, alike: bool = False) -> bytes:
    times = batch.compute_input_end_ns, batch.compute_output_start_ns
    return DoneRecord(*times, batch.bytes_copied, count, error, alike).encode()

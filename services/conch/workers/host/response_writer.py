"""Writes outcomes of batches and responses of senders to the server.

Threads: batches on the main thread, responses on the senders'.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, cast

from conch.core.backend import BatchOutcome
from conch.core.errors import ConchError, InternalError, as_conch_error, message_of
from conch.core.request import InferenceRequest, InferenceResponse, SpanRecord
from conch.core.response_errors import at_fault, unsendable
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor
from conch.ipc.channel import MOST_INLINE, ChannelClosedError, Kind
from conch.ipc.codec import (
    RESCHEDULED,
    Times,
    encode_failure,
    encode_json,
    encode_responses,
    flags_of,
    text_of,
)
from conch.ipc.response_credit import units
from conch.ipc.tensors import Description, MessageStream, Payload, lists_in_one
from conch.workers.host.host_reader import HostReader
from conch.workers.host.hosted_requests import HostedRequest, HostedRequests
from conch.workers.host.response_frames import ResponseFrames, SentResponse

Responses = Sequence[InferenceResponse | None]
Encoded = tuple[bytes, Sequence[bytes], Payload | None]
"""Fields, texts and tensors of a message."""


class JoinedResponses(NamedTuple):
    """Responses to all requests of a batch, with outputs of one layout and nothing else.

    Attributes:
        layout: The layout of each response, which says the sizes.
        data: The outputs of all, each padded to a multiple of eight bytes.
    """

    layout: Description
    data: bytes


class ResponseWriter:
    """Sends outcomes and responses.

    Attributes:
        requests: The open requests.
    """

    def __init__(
        self, spec: ModelSpec, stream: MessageStream, reader: HostReader, by_address: bool = False
    ) -> None:
        self._name = spec.name
        self._decoupled = spec.decoupled
        self._stream = stream
        self._frames = ResponseFrames(spec.name, stream)
        self._reader = reader
        self.requests = HostedRequests(spec, self._respond, self._send_span, by_address)

    # --- batches ------------------------------------------------------------------------------------------

    def encode(self, number: int, batch: Batch, outcome: BatchOutcome | JoinedResponses) -> Encoded:
        """Encodes the outcome of a batch; the result does not refer to the batch."""
        if isinstance(outcome, JoinedResponses):
            self.requests.end_batch(number)
            count = len(batch.requests)
            fields = encode_responses(count, times=_times_of(batch))
            return fields, (), lists_in_one(outcome.layout, count, outcome.data)
        if not isinstance(outcome, BaseException):
            try:
                try:
                    return self._encode_responses(number, batch, outcome)
                except Exception:  # boundary: outputs of models; raised again without a faulty one
                    if not self._mark_faulty(outcome):
                        raise
                    return self._encode_responses(number, batch, outcome)
            except Exception as error:  # boundary: outputs of models, which may not match their shapes
                outcome = unsendable(self._name, None, error)
        self.requests.end_batch(number)
        return *encode_failure(as_conch_error(outcome), _times_of(batch)), None

    def send_done(self, number: int, fields: bytes, texts: Sequence[bytes], payload: Payload | None) -> None:
        """Sends an encoded outcome, or the error why that failed.

        Raises:
            ChannelClosedError: The server has closed the socket.
        """
        if self._frames.used:
            self._frames.flush()
        try:
            self._stream.send(Kind.DONE, number, fields, payload, texts)
        except (OSError, MemoryError, ConchError) as error:  # no memory or descriptor
            failure = InternalError(f"responses can't be sent: {message_of(error)}")
            fields, texts = encode_failure(failure)
            self._stream.send(Kind.DONE, number, fields, None, texts)

    def flush(self) -> None:
        """Writes the responses that senders have sent.

        Raises:
            ChannelClosedError: The server has closed the socket.
        """
        if self._frames.used:
            self._frames.flush()

    def close(self) -> None:
        """Writes the responses that senders have sent, of which none may follow.

        Raises:
            ChannelClosedError: The server has closed the socket.
        """
        self.flush()
        self._frames.close()

    def _mark_faulty(self, responses: Responses | None) -> bool:
        """Turns responses that can't be sent into errors, so that the others can; True if there were any."""
        blamed = False
        for response in responses or ():
            error = at_fault(self._name, response)
            if response is not None and error is not None:
                response.outputs, response.error = [], error
                blamed = True
        return blamed

    def _encode_responses(self, number: int, batch: Batch, outcome: Responses | None) -> Encoded:
        requests = cast("list[HostedRequest]", batch.requests)  # made by `HostedRequests`
        responses = [None] * len(requests) if outcome is None else outcome
        lists: list[Sequence[Tensor]] = []
        plain = True
        for request, response in zip(requests, responses, strict=True):
            if response is None or response.error is not None:
                plain = False
                continue
            if response.parameters or request.completed or request.rescheduled or self._decoupled:
                plain = False
            lists.append(response.outputs)
        left: list[HostedRequest] = []
        flags: list[int] | None = None
        texts: list[bytes] = []
        if not plain:
            texts = [text_of(response) for response in responses]
            if not any(texts):
                texts = []
            flags = []
            for request, response in zip(requests, responses, strict=True):
                own = flags_of(response, failed=request.failed)
                if request.rescheduled and (response is None or response.error is None):
                    own |= RESCHEDULED  # a response has only states
                    left.append(request)  # even if completed: the server may resend it before it knows
                elif (response is None or self._decoupled) and not request.gone:
                    left.append(request)  # a response of a decoupled model has only states, too
                flags.append(own)
        payload = self._stream.pack(lists, True, True)
        self.requests.end_batch(number, left)
        batch.bytes_copied += payload.bytes_copied
        return encode_responses(len(responses), flags, texts != [], _times_of(batch)), texts, payload

    def _send_span(self, number: int, span: SpanRecord) -> None:
        """Sends a span of a request's model; it arrives before what the model sends later."""
        with suppress(ChannelClosedError):  # the thread that reads notices, and ends the process
            self._stream.send(Kind.SPAN, number, encode_json(span._asdict()))

    # --- senders ------------------------------------------------------------------------------------------

    def _respond(self, request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        """Sends a response of a sender; blocks until the server has granted units for it."""
        assert isinstance(request, HostedRequest), "made by `HostedRequests`"
        if request.filler:
            return
        if self._decoupled and request.granted <= request.spent and not self._has_credit(request):
            return
        failed = request.failed
        try:
            try:
                self._send_response(request, response, final, failed)
            except ChannelClosedError:
                raise
            except Exception as error:  # boundary: outputs of models, which may not match their shapes
                failure = unsendable(self._name, response, error)
                # Nothing may follow an error; later responses are dropped.
                request.completed = True
                self._send_response(request, InferenceResponse([], failure), True, failed)
        except ChannelClosedError:
            pass  # the thread that reads notices, and ends the process

    def _has_credit(self, request: HostedRequest) -> bool:
        """Waits until the server grants further units; False if the request has ended."""
        try:
            self.flush()  # the server grants them for what it has
            self._reader.until(lambda: request.granted > request.spent or request.gone)
        except ChannelClosedError:
            return False
        return not request.gone

    def _send_response(
        self, request: HostedRequest, response: InferenceResponse | None, final: bool, failed: bool
    ) -> None:
        outputs: Sequence[Tensor] = ()
        lists: list[Sequence[Tensor]] = []
        if response is not None and response.error is None:
            outputs = response.outputs
            lists = [outputs]
        text = text_of(response)
        # Copies, also from GPUs: the model may write to its outputs at once.
        payload = self._stream.pack(lists) if lists else None
        nbytes = len(text)
        if payload is not None:
            nbytes += MOST_INLINE if payload.block is not None else payload.copy_small_tensors()
        flags = flags_of(response, final, failed)
        if final:
            self.requests.remove(request)
            if request.rescheduled:
                self.requests.keep(request)  # until the server resends or forgets it
        request.spent += units(outputs)  # senders hold a lock
        self._frames.put(SentResponse(request.number, flags, text, payload, nbytes + 1))


def _times_of(batch: Batch) -> Times:
    return batch.compute_input_end_ns, batch.compute_output_start_ns, batch.bytes_copied

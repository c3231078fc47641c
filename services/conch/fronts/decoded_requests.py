"""Requests that fronts have decoded, and their responses, as handlers see them.

With gRPC `FrontDecoder` takes the place of the port's decoder, and `FrontEncoder` that of its encoder. All
else is the same for all requests: admission, access policy, log, models that are loaded on demand.

Threads and locks: any thread; tables as in `recognition`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conch.core.errors import without_traceback
from conch.core.recognition import RequestTemplate, Table
from conch.core.request import InferenceRequest, InferenceResponse, Responder
from conch.core.tensor import Buffer, Tensor
from conch.frontends.grpc.request_decoder import RequestDecoder
from conch.frontends.grpc.response_encoder import ResponseEncoder, encode_parameters
from conch.fronts.front_messages import CALL_BITS
from conch.fronts.packed_responses import Pack, PackedResponse
from conch.fronts.remote_calls import RemoteUnary
from conch.ipc.channel import WireError
from conch.ipc.codec import (
    BINARY_OUTPUTS,
    NO_DEADLINE,
    SEQUENCE_END,
    SEQUENCE_START,
    Options,
    Row,
    decode_requests,
)
from conch.ipc.tensors import ReceivedMessage, UnreachableError


class DecodedRequest:
    """A request that a front has decoded; in place of the client's message, whose length it has."""

    __slots__ = ("_failure", "_size", "id", "inputs", "options", "row", "signature")

    def __init__(
        self,
        row: Row,
        request_id: str,
        options: Options,
        inputs: list[Tensor],
        signature: object,
        failure: UnreachableError | None,
    ) -> None:
        self._failure = failure
        self._size = row[3]
        self.row = row
        self.id = request_id
        self.options = options
        self.inputs = inputs
        self.signature = signature

    def __len__(self) -> int:
        return self._size

    @property
    def binary(self) -> bool:
        """True if all outputs of an HTTP request are to be sent as binary."""
        return self.row[4] & BINARY_OUTPUTS != 0

    def request(self, responder: Responder) -> InferenceRequest:
        """Makes the request.

        Raises:
            UnreachableError: Its tensors can't be mapped.
        """
        if self._failure is not None:
            raise without_traceback(self._failure)
        options, row = self.options, self.row
        name, version = options.model
        request = InferenceRequest(
            name,
            version,
            {tensor.name: tensor for tensor in self.inputs},
            responder,
            row[0],
            self.id,
            options.requested,
        )
        request.signature = self.signature
        if options.more:
            request.parameters = None if options.parameters is None else dict(options.parameters)
            request.priority, request.timeout_us = options.priority, options.timeout_us
            request.correlation_id = options.correlation_id
        if row[4] & ~BINARY_OUTPUTS:
            request.sequence_start = row[4] & SEQUENCE_START != 0
            request.sequence_end = row[4] & SEQUENCE_END != 0
        return request


class RequestReader:
    """Reads the requests of all fronts; on the loop's thread."""

    def __init__(self) -> None:
        self._signatures: Table[tuple[bytes, bytes], RequestTemplate] = Table()

    def read(self, received: ReceivedMessage) -> Iterator[tuple[int, int, int | None, DecodedRequest]]:
        """Reads EXECUTE: caller, call, deadline and request of each.

        Raises:
            WireError: The message is malformed.
        """
        _, _, _, rows, ids, options, numbers = decode_requests(received)
        texts = received.texts
        described = received.texts_read
        lists = received.lists(len(rows))
        if numbers is None:
            raise WireError("the numbers of requests are missing")
        failures = received.unreachable or {}
        layouts = texts[described:]
        alike = described == len(layouts) == 1
        signature: object = None
        for index, (row, request_id, each, inputs, number) in enumerate(
            zip(rows, ids, options, lists, numbers, strict=True)
        ):
            if len(each.model) != 2:
                raise WireError("a request does not name a model and a version")
            if not index or not alike:
                option_text = texts[index if described > 1 else 0].content
                layout_text = layouts[index if len(layouts) > 1 else 0].content
                signature = self._signature(option_text, layout_text, each, inputs)
            deadline_ns = None if row[2] == NO_DEADLINE else row[2]
            call = number & ((1 << CALL_BITS) - 1)
            yield (
                number >> CALL_BITS,
                call,
                deadline_ns,
                DecodedRequest(row, request_id, each, inputs, signature, failures.get(index)),
            )

    def _signature(
        self, option_text: bytes, layout_text: bytes, options: Options, inputs: list[Tensor]
    ) -> object:
        """Template of requests with the same texts; None if they differ in more than id and tensors."""
        if options.correlation_id:
            return None
        key = option_text, layout_text
        known = self._signatures.get(key)
        if known is None:
            described = [(tensor.name, tensor.datatype, tensor.shape) for tensor in inputs]
            name, version = options.model
            like = InferenceRequest(name, version, {}, _ignore, 0, "", options.requested)
            known = self._signatures.keep(key, RequestTemplate(described, like))
        return known


def _ignore(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
    """The responder of a request that is only described."""


class FrontDecoder(RequestDecoder):
    """Takes what fronts have decoded, and decodes the other messages."""

    def is_long(self, message: Any) -> bool:
        """See `RequestDecoder`; False for what is decoded."""
        return type(message) is not DecodedRequest and super().is_long(message)

    def __call__(self, message: Any, responder: Responder, received_ns: int) -> InferenceRequest:
        """See `RequestDecoder`."""
        if type(message) is DecodedRequest:
            return message.request(responder)
        return super().__call__(message, responder, received_ns)


class FrontEncoder(ResponseEncoder):
    """Leaves the responses to decoded requests to their fronts."""

    def message(self, request: InferenceRequest, response: InferenceResponse | None) -> Any:
        """The message; of a decoded request an `UnencodedResponse`, which its call takes."""
        call = request.context
        if type(call) is not RemoteUnary or not call.decoded or response is None:
            return super().message(request, response)
        if response.parameters:
            encode_parameters(response.parameters, request.model_name)  # raises here what it would there
        return UnencodedResponse(self, request, response, call.link.pack)

    def encoded(self, request: InferenceRequest, response: InferenceResponse) -> bytes:
        """The message, in any case."""
        return super().message(request, response)


class UnencodedResponse(PackedResponse):
    """A response in place of its message."""

    __slots__ = ("_encoder",)

    def __init__(
        self, encoder: FrontEncoder, request: InferenceRequest, response: InferenceResponse, pack: Pack
    ) -> None:
        PackedResponse.__init__(self, request, response, pack)
        self._encoder = encoder

    def __len__(self) -> int:
        """The length of the message, for the log."""
        return sum(map(_size, self._encoder.parts(self.request, self.response)))

    def encode(self) -> bytes:
        """The message, for answers with more than that."""
        return self._encoder.encoded(self.request, self.response)


def _size(part: Buffer) -> int:
    return part.nbytes if type(part) is memoryview else len(part)

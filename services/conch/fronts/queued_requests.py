"""A front's side of decoded requests: sends them to the core, and reads the responses.

Threads and locks: the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

from conch.core.errors import ConchError
from conch.core.recognition import Table
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.tensor import ELEMENT_SIZES, Tensor
from conch.frontends.grpc.request_decoder import LONG_BYTES
from conch.fronts.front_messages import CALL_BITS
from conch.ipc import codec
from conch.ipc.channel import ChannelClosedError, Kind, WireError
from conch.ipc.tensors import MessageStream, ReceivedMessage

_ANY_SIZE, _NO_SIZE = -1, -2


class RequestSender:
    """Sends decoded requests, those of a round that have model and flags in common as one EXECUTE.

    Args:
        stream: The messages.
        send_raw: Sends a request as it came, with the arguments of its `add`: it can't be packed.
    """

    def __init__(self, stream: MessageStream, send_raw: Callable[[int, Any, Any], None]) -> None:
        self._stream = stream
        self._send_raw = send_raw
        self._sizes: Table[object, tuple[int, ...]] = Table()
        self._requests: dict[
            tuple[tuple[str, str], int], list[tuple[InferenceRequest, int, int, Any, Any]]
        ] = {}

    def travels(self, request: InferenceRequest) -> bool:
        """True if the message of a round can have the request.

        The core finds a tensor's bytes by its shape, so each must have as many as that says: else it would
        get those of another request. `empty_final` says nothing of a unary call. The core's loop reads the
        lengths of strings, so many strings go as they came: a thread of the core decodes them.
        """
        if request.classes or request.named_regions is not None:
            return False
        template = request.signature
        sizes = self._sizes.get(template)
        if sizes is None:
            sizes = tuple(map(_expected_size, request.inputs.values()))
            if template is not None:
                self._sizes.keep(template, sizes)
        for tensor, size in zip(request.inputs.values(), sizes, strict=True):
            if size not in (tensor.nbytes, _ANY_SIZE) or (size == _ANY_SIZE and tensor.nbytes >= LONG_BYTES):
                return False
        return True

    def add(
        self, request: InferenceRequest, caller: int, number: int, call: Any, message: Any, flags: int = 0
    ) -> bool:
        """Adds a request that travels to those of the round; True if it is the first.

        Args:
            request: The request; its batch size is the size of the client's message.
            caller: Number of its caller.
            number: Number of its call.
            call: Its call.
            message: Message of the client.
            flags: Flags of its row.
        """
        first = not self._requests
        key = (request.model_name, request.model_version), flags
        requests = self._requests.get(key)
        if requests is None:
            requests = self._requests[key] = []
        requests.append((request, caller << CALL_BITS | number, number, call, message))
        return first

    def flush(self) -> None:
        """Sends the requests of the round.

        Raises:
            ChannelClosedError: The core is gone.
        """
        queued, self._requests = self._requests, {}
        for key, requests in queued.items():
            try:
                self._send(*key, requests)
            except ChannelClosedError:
                raise
            except (WireError, ConchError, OSError, ValueError):
                for each in requests:
                    self._send_alone(*key, each)

    def _send(
        self,
        model: tuple[str, str],
        flags: int,
        queued: list[tuple[InferenceRequest, int, int, Any, Any]],
    ) -> None:
        requests = [each[0] for each in queued]
        # Workers of a model can read the whole block, so it never has the tensors of another one.
        payload = self._stream.pack([request.inputs.values() for request in requests], owner=model)
        try:
            fields, texts = codec.encode_requests(
                requests, numbers=[each[1] for each in queued], flags=flags, model=model
            )
        except BaseException:
            self._stream.discard_payload(payload)
            raise
        self._stream.send(Kind.EXECUTE, 0, fields, payload, texts)
        for request in requests:
            request.inputs = {}  # views of the client's message

    def _send_alone(
        self, model: tuple[str, str], flags: int, queued: tuple[InferenceRequest, int, int, Any, Any]
    ) -> None:
        """Sends a request of a round of which one could not be packed."""
        try:
            self._send(model, flags, [queued])
        except ChannelClosedError:
            raise
        except (WireError, ConchError, OSError, ValueError):
            self._send_raw(*queued[2:])


def _expected_size(tensor: Tensor) -> int:
    """The bytes of a tensor of its shape; `_ANY_SIZE` for strings, `_NO_SIZE` if it is malformed."""
    if any(dim < 0 for dim in tensor.shape):
        return _NO_SIZE
    if tensor.datatype == "BYTES":
        return _ANY_SIZE
    if tensor.datatype not in ELEMENT_SIZES:
        return _NO_SIZE
    return prod(tensor.shape) * ELEMENT_SIZES[tensor.datatype]


class _Spec(NamedTuple):
    name: str


class _Model(NamedTuple):
    """The version that has answered, as the encoder sees it."""

    spec: _Spec
    version_text: str


class ResponseReader:
    """Reads the responses to decoded requests."""

    def __init__(self) -> None:
        self._models: dict[int, _Model] = {}

    def add_model(self, received: ReceivedMessage) -> None:
        """Reads MODEL."""
        fields = codec.decode_json(received.fields)
        self._models[received.subject] = _Model(_Spec(fields["name"]), fields["version"])

    def read(self, received: ReceivedMessage) -> Iterator[tuple[int, Any, InferenceResponse]]:
        """Reads RESPONSES: call, model and response of each.

        Raises:
            WireError: The message is malformed.
        """
        columns = codec.decode_responses(received)
        model = self._models[received.subject]
        assert columns.numbers is not None, "the message is a frame"
        for number, response in zip(columns.numbers, columns.responses, strict=True):
            assert response is not None, "errors are answers"
            yield number, model, response

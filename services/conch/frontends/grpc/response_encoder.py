"""Encodes responses as ModelInferResponse bytes, with one copy of the tensors.

Also: how errors tell clients when to retry, as trailing metadata and as a response parameter.
Threads and locks: any thread; updates of the tables are atomic.
"""

from __future__ import annotations

from typing import Any

from conch.core.compiled import mypyc_attr
from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.recognition import MOST_ENTRIES, Table
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_errors import wrong_parameter
from conch.core.tensor import Buffer
from conch.frontends.grpc.rpc_calls import Metadata
from conch.frontends.grpc.wire_format import length_header
from conch.protocol import inference_pb2

MAX_BYTES = 2**31 - 1
LARGE_BYTES = 1 << 20
_ID, _RAW_CONTENTS = 3, 6
RETRY_PARAMETER = "retry_after_ms"
"""Response parameter of errors on streams, which are messages."""

_SHORT_ID = tuple(length_header(_ID, size) for size in range(128))


@mypyc_attr(allow_interpreted_subclasses=True)
class ResponseEncoder:
    """Encodes ModelInferResponse messages; caches the parts with names, datatypes, shapes and lengths.

    Args:
        most: Limit of entries of each cache.
    """

    def __init__(self, most: int = MOST_ENTRIES) -> None:
        self._models: Table[tuple[str, str], bytes] = Table(most)
        self._outputs: Table[tuple[str, str, tuple[int, ...]], bytes] = Table(most)
        self._lengths: Table[int, bytes] = Table(most)
        self._single: Table[tuple[str, str, str, str, tuple[int, ...], int], bytes] = Table(most)

    @property
    def largest_cache(self) -> int:
        """The number of entries of the largest cache."""
        return max(len(self._models), len(self._outputs), len(self._lengths), len(self._single))

    def message(self, request: InferenceRequest, response: InferenceResponse | None) -> bytes:
        """Returns the serialised response; see `parts` for the arguments.

        Raises:
            InvalidArgumentError: It is larger than gRPC can send.
        """
        if response is None or len(response.outputs) != 1 or request.id or response.parameters:
            return joined(self.parts(request, response))
        # Fast path of `parts`, the careful twin: all bytes before those of the only tensor repeat. Test of
        # both: tests/conch/unit/frontends/test_response_encoder.py.
        model = request.model
        assert model is not None, "only a request that has been submitted is answered"
        (tensor,) = response.outputs
        data = tensor.data
        size = data.nbytes if type(data) is memoryview else len(data)
        key = (model.spec.name, model.version_text, tensor.name, tensor.datatype, tensor.shape, size)
        head = self._single.get(key)
        if head is None:
            head = self._single.keep(key, b"".join(self.parts(request, response)[:-1]))
        if size >= LARGE_BYTES:
            return joined([head, data])  # joins without the GIL where possible, and checks the size
        return head + data

    def parts(self, request: InferenceRequest, response: InferenceResponse | None) -> list[Buffer]:
        """Returns the serialised response in pieces.

        The response has no error; None stands for names only, with the requested version, as in Triton.
        """
        model = request.model
        assert model is not None, "only a request that has been submitted is answered"
        names = (model.spec.name, request.model_version if response is None else model.version_text)
        parts: list[Buffer] = [self._models.get(names) or self._models.keep(names, _named(*names))]
        if request.id:
            request_id = request.id.encode()
            size = len(request_id)
            parts.append(_SHORT_ID[size] if size < len(_SHORT_ID) else length_header(_ID, size))
            parts.append(request_id)
        if response is None:
            return parts
        if response.parameters:
            parts.append(encode_parameters(response.parameters, names[0]))
        raw: list[Buffer] = []
        outputs = self._outputs
        lengths = self._lengths
        for tensor in response.outputs:
            described = (tensor.name, tensor.datatype, tensor.shape)
            parts.append(outputs.get(described) or outputs.keep(described, _described(*described)))
            data = tensor.data
            size = data.nbytes if type(data) is memoryview else len(data)
            raw.append(lengths.get(size) or lengths.keep(size, length_header(_RAW_CONTENTS, size)))
            raw.append(data)
        parts += raw
        return parts


def _named(model: str, version: str) -> bytes:
    message = inference_pb2.ModelInferResponse(model_name=model, model_version=version)
    header: bytes = message.SerializeToString()
    return header


def _described(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    output = inference_pb2.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype, shape=shape)
    header: bytes = inference_pb2.ModelInferResponse(outputs=[output]).SerializeToString()
    return header


def encode_parameters(parameters: Any, model: str = "") -> bytes:
    """Encodes response parameters of a model as the ``parameters`` field of a ModelInferResponse.

    Raises:
        InternalError: A value is not a bool, integer of 64 bits, float or string.
    """
    message = inference_pb2.ModelInferResponse()
    for key, value in parameters.items():
        slot = message.parameters[key]
        if isinstance(value, bool):
            slot.bool_param = value
        elif isinstance(value, int):
            if not -(2**63) <= value < 2**63:
                raise wrong_parameter(model, key, value)
            slot.int64_param = value
        elif isinstance(value, float):
            slot.double_param = value
        elif isinstance(value, str):
            slot.string_param = value
        else:
            raise wrong_parameter(model, key, value)
    return message.SerializeToString()


def joined(parts: list[Buffer]) -> bytes:
    """Joins the pieces of a response. Raises InvalidArgumentError: it is larger than gRPC can send."""
    message = b"".join(parts)
    if len(message) > MAX_BYTES:
        raise InvalidArgumentError(
            f"Response has byte size {len(message)} which exceeds gRPC's byte size limit {MAX_BYTES}."
        )
    return message


def retry_metadata(error: ConchError) -> Metadata | None:
    """Returns the trailing metadata that tells when to retry: gRPC's pushback and HTTP's header."""
    after_ms = error.retry_after_ms
    if after_ms is None:
        return None
    return (("grpc-retry-pushback-ms", str(after_ms)), ("retry-after", str(-(-after_ms // 1000))))

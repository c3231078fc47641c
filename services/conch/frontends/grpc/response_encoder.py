"""Responses to ModelInferResponse bytes, with one copy: the join of what stays the same and the tensors."""

from __future__ import annotations

from typing import Any, TypeVar

from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.response_errors import wrong_parameter
from conch.core.tensor import Buffer
from conch.frontends.grpc.wire_format import length_header
from conch.protocol import inference_pb2

_MOST_BYTES = 2**31 - 1
_MOST_CACHED_HEADERS = 4096
_LARGE = 1 << 20
_ID, _RAW_CONTENTS = 3, 6
_SHORT_ID = tuple(length_header(_ID, size) for size in range(128))


class ResponseEncoder:
    """Makes ModelInferResponse messages.

    All but the tensors' bytes repeats from response to response, so the parts made of names, datatypes,
    shapes and lengths are kept.
    """

    def __init__(self) -> None:
        self._models: dict[tuple[str, str], bytes] = {}
        self._outputs: dict[tuple[str, str, tuple[int, ...]], bytes] = {}
        self._lengths: dict[int, bytes] = {}
        self._single: dict[tuple[str, str, str, str, tuple[int, ...], int], bytes] = {}

    def message(self, request: InferenceRequest, response: InferenceResponse | None) -> bytes:
        """The serialised response; see `parts` for the arguments.

        Raises:
            InvalidArgumentError: It is larger than gRPC can send.
        """
        if response is None or len(response.outputs) != 1 or request.id or response.parameters:
            return joined(self.parts(request, response))
        # All that precedes the bytes of the only tensor is the same for many responses.
        model = request.model
        assert model is not None, "only a request that has been submitted is answered"
        (tensor,) = response.outputs
        data = tensor.data
        size = data.nbytes if type(data) is memoryview else len(data)
        key = (model.spec.name, model.version_text, tensor.name, tensor.datatype, tensor.shape, size)
        head = self._single.get(key)
        if head is None:
            head = _remember(self._single, key, b"".join(self.parts(request, response)[:-1]))
        if size >= _LARGE:
            return joined([head, data])  # where that can be, it copies without the interpreter's lock
        return _sendable(head + data)

    def parts(self, request: InferenceRequest, response: InferenceResponse | None) -> list[Buffer]:
        """The serialised response in pieces, so that the caller joins them once.

        Args:
            request: The answered request.
            response: A response without an error, or None for one with nothing but its names; its version
                is then the one that was asked for, as Triton has it.
        """
        model = request.model
        assert model is not None, "only a request that has been submitted is answered"
        names = (model.spec.name, request.model_version if response is None else model.version_text)
        parts: list[Buffer] = [self._models.get(names) or _remember(self._models, names, _named(*names))]
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
            parts.append(outputs.get(described) or _remember(outputs, described, _described(*described)))
            data = tensor.data
            size = data.nbytes if type(data) is memoryview else len(data)
            raw.append(lengths.get(size) or _remember(lengths, size, length_header(_RAW_CONTENTS, size)))
            raw.append(data)
        parts += raw
        return parts


_Key = TypeVar("_Key")


def _remember(cache: dict[_Key, bytes], key: _Key, value: bytes) -> bytes:
    if len(cache) >= _MOST_CACHED_HEADERS:
        cache.clear()  # what never repeats must not fill the memory
    cache[key] = value
    return value


def _named(model: str, version: str) -> bytes:
    message = inference_pb2.ModelInferResponse(model_name=model, model_version=version)
    header: bytes = message.SerializeToString()
    return header


def _described(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    output = inference_pb2.ModelInferResponse.InferOutputTensor(name=name, datatype=datatype, shape=shape)
    header: bytes = inference_pb2.ModelInferResponse(outputs=[output]).SerializeToString()
    return header


def encode_parameters(parameters: Any, model: str = "") -> bytes:
    """Response parameters as the ``parameters`` field of a serialised ModelInferResponse.

    Args:
        parameters: They.
        model: The name of the model that gave them.

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
    """The pieces of a response as one message.

    Raises:
        InvalidArgumentError: It is larger than gRPC can send.
    """
    return _sendable(b"".join(parts))


def _sendable(message: bytes) -> bytes:
    if len(message) > _MOST_BYTES:
        raise InvalidArgumentError(
            f"Response has byte size {len(message)} which exceeds gRPC's byte size limit {_MOST_BYTES}."
        )
    return message

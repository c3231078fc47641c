"""Responses to ModelInferResponse bytes, with one copy: the join of what stays the same and the tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.sending import wrong_parameter
from conch.core.tensor import Buffer
from conch.frontends.grpc.wire import length_header
from conch.protocol import inference_pb2

_MOST_BYTES = 2**31 - 1
_MOST_CACHED_HEADERS = 4096
_ID, _RAW_OUTPUT_CONTENTS = 3, 6


class ResponseEncoder:
    """Makes ModelInferResponse messages.

    All but the tensors' bytes repeats from response to response, so the parts made of names, datatypes,
    shapes and lengths are kept.
    """

    def __init__(self) -> None:
        keep = lru_cache(_MOST_CACHED_HEADERS)
        self._model_header = keep(_model_header)
        self._output_header = keep(_output_header)
        self._length_header = keep(length_header)

    def parts(self, request: InferenceRequest, response: InferenceResponse | None) -> list[Buffer]:
        """The serialised response in pieces, so that the caller joins them once.

        Args:
            request: The answered request.
            response: A response without an error, or None for one with nothing but its names; its version
                is then the one that was asked for, as Triton has it.
        """
        model = request.model
        assert model is not None, "only a request that has been submitted is answered"
        version = request.model_version if response is None else model.version_text
        parts: list[Buffer] = [self._model_header(model.spec.name, version)]
        if request.id:
            request_id = request.id.encode()
            parts += (self._length_header(_ID, len(request_id)), request_id)
        if response is None:
            return parts
        if response.parameters:
            parts.append(encode_parameters(response.parameters, model.spec.name))
        raw: list[Buffer] = []
        for tensor in response.outputs:
            parts.append(self._output_header(tensor.name, tensor.datatype, tensor.shape))
            data = tensor.data
            size = data.nbytes if type(data) is memoryview else len(data)
            raw += (self._length_header(_RAW_OUTPUT_CONTENTS, size), data)
        parts += raw
        return parts


def _model_header(name: str, version: str) -> bytes:
    message = inference_pb2.ModelInferResponse(model_name=name, model_version=version)
    header: bytes = message.SerializeToString()
    return header


def _output_header(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
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
    message = b"".join(parts)
    if len(message) > _MOST_BYTES:
        raise InvalidArgumentError(
            f"Response has byte size {len(message)} which exceeds gRPC's byte size limit {_MOST_BYTES}."
        )
    return message

"""Responses to ModelInferResponse bytes, with one copy: the join of what stays the same and the tensors."""

from __future__ import annotations

from typing import Any

from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.sending import wrong_parameter
from conch.core.tensor import Buffer
from conch.frontends.grpc.wire import length_header
from conch.protocol import inference_pb2

_MOST_BYTES = 2**31 - 1
_MOST_CACHED_HEADERS = 4096


class ResponseEncoder:
    """Makes ModelInferResponse messages.

    All but the tensors' bytes repeats from response to response, so the parts made of names, datatypes
    and shapes are kept.
    """

    def __init__(self) -> None:
        self._outputs: dict[tuple[str, str, tuple[int, ...]], bytes] = {}
        self._models: dict[tuple[str, str], bytes] = {}

    def parts(self, request: InferenceRequest, response: InferenceResponse | None) -> list[Buffer]:
        """The serialised response in pieces, so that the caller joins them once.

        Args:
            request: The answered request.
            response: A response without an error, or None for one with nothing but its names; its version
                is then the one that was asked for, as Triton has it.
        """
        model = request.model
        assert model is not None, "only a request that has been submitted is answered"
        key = (model.spec.name, request.model_version if response is None else model.version_text)
        head = self._models.get(key)
        if head is None:
            head = inference_pb2.ModelInferResponse(
                model_name=key[0], model_version=key[1]
            ).SerializeToString()
            _remember(self._models, key, head)
        parts: list[Buffer] = [head]
        if request.id:
            request_id = request.id.encode()
            parts.append(length_header(3, len(request_id)))
            parts.append(request_id)
        if response is None:
            return parts
        if response.parameters:
            parts.append(encode_parameters(response.parameters, key[0]))
        raw: list[Buffer] = []
        outputs = self._outputs
        for tensor in response.outputs:
            output_key = (tensor.name, tensor.datatype, tensor.shape)
            header = outputs.get(output_key)
            if header is None:
                header = inference_pb2.ModelInferResponse(
                    outputs=[
                        inference_pb2.ModelInferResponse.InferOutputTensor(
                            name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
                        )
                    ]
                ).SerializeToString()
                _remember(outputs, output_key, header)
            parts.append(header)
            data = tensor.data
            size = data.nbytes if type(data) is memoryview else len(data)
            raw.append(b"2" + _SMALL_VARINTS[size] if size < 128 else length_header(6, size))
            raw.append(data)
        parts += raw
        return parts


_SMALL_VARINTS = tuple(bytes((value,)) for value in range(128))


def _remember(cache: dict[Any, bytes], key: Any, value: bytes) -> None:
    if len(cache) >= _MOST_CACHED_HEADERS:
        cache.clear()  # shapes that never repeat must not fill the memory
    cache[key] = value


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

"""Sends requests to a model over gRPC or HTTP."""

from __future__ import annotations

import http.client
import json
import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import grpc
import numpy as np

from conch.core.errors import ConchError
from conch.core.tensor import NUMPY_DTYPES, Array, Tensor, float_array
from conch.protocol import inference_pb2
from conch_tools.connection import Endpoint
from conch_tools.infer.signature import ModelSignature
from conch_tools.server_api import AskError, ask_error, model_path, open_channel

T = TypeVar("T")

_SERVICE = "/inference.GRPCInferenceService/"
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_UNSIGNED = ("priority",)
_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_PASSING_STATUS = (429, 502, 503, 504)
_STREAM_ERRORS = ("triton_grpc_error", "true")
"""Metadata that makes an error end a stream with its status code."""


class CallError(AskError):
    """A request failed.

    Attributes:
        passing: True if it may succeed when it is sent again.
    """

    def __init__(self, message: str, reached: bool, passing: bool) -> None:
        super().__init__(message, reached)
        self.passing = passing


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """A request to a model.

    Attributes:
        model: Its name.
        version: Its version; the server's choice if empty.
        id: The request's id.
        inputs: Its inputs.
        outputs: Names of the outputs to return; all if empty.
        classes: Number of classes to return of each of these outputs; 0 for their values.
        parameters: Parameters of the request.
        timeout_s: Time limit; None for no limit.
    """

    model: str
    version: str = ""
    id: str = ""
    inputs: Sequence[Tensor]
    outputs: Sequence[str] = ()
    classes: int = 0
    parameters: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class InferResponse:
    """A response of a model.

    Attributes:
        model: The model's name.
        version: The version that has answered.
        id: The request's id.
        parameters: Parameters of the response.
        outputs: Its tensors.
    """

    model: str
    version: str
    id: str
    parameters: Mapping[str, Any]
    outputs: Sequence[Tensor]

    @property
    def arrays(self) -> dict[str, Array]:
        """The values by output; BF16 as float32."""
        return {tensor.name: array_of(tensor) for tensor in self.outputs}


def array_of(tensor: Tensor) -> Array:
    """The values of a tensor; BF16 as float32."""
    return float_array(tensor.data, tensor.shape) if tensor.datatype == "BF16" else tensor.numpy()


class InferClient(Protocol):
    """A connection to a server; any method raises `CallError`."""

    def infer(self, request: InferRequest) -> InferResponse:
        """The response to a request."""
        ...

    def stream(self, request: InferRequest) -> Iterator[InferResponse]:
        """The responses to a request, as they come."""
        ...

    def close(self) -> None:
        """Closes the connection, which ends what is in flight; from any thread."""
        ...


def open_client(endpoint: Endpoint, signature: ModelSignature) -> InferClient:
    """A client for a model, which connects at its first request."""
    return HttpClient(endpoint, signature) if endpoint.protocol == "http" else GrpcClient(endpoint)


class GrpcClient:
    """A channel, for any number of threads."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._channel = open_channel(endpoint)
        self._metadata = tuple(endpoint.headers.items())
        self._infer = self._channel.unary_unary(
            f"{_SERVICE}ModelInfer",
            request_serializer=inference_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=inference_pb2.ModelInferResponse.FromString,
        )
        self._stream = self._channel.stream_stream(
            f"{_SERVICE}ModelStreamInfer",
            request_serializer=inference_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=inference_pb2.ModelStreamInferResponse.FromString,
        )

    def infer(self, request: InferRequest) -> InferResponse:
        """The response to a request. Raises CallError."""
        try:
            found = self._infer(grpc_message(request), timeout=request.timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error(error) from None
        except ValueError as error:
            raise CallError(str(error), True, False) from None  # the channel is closed
        return grpc_response(found)

    def stream(self, request: InferRequest) -> Iterator[InferResponse]:
        """The responses to a request, as they come. Raises CallError."""
        metadata = (*self._metadata, _STREAM_ERRORS)
        try:
            call = self._stream(iter([grpc_message(request)]), timeout=request.timeout_s, metadata=metadata)
            try:
                for found in call:
                    if found.error_message:
                        raise CallError(found.error_message, True, False)
                    yield grpc_response(found.infer_response)
            finally:
                call.cancel()
        except grpc.RpcError as error:
            raise self._error(error) from None
        except ValueError as error:
            raise CallError(str(error), True, False) from None  # the channel is closed

    def close(self) -> None:
        """Closes the channel, which cancels calls."""
        self._channel.close()

    def _error(self, error: grpc.RpcError) -> CallError:
        code, asked = error.code(), ask_error(self._endpoint, error)
        text = f"no answer in time ({asked})" if code is grpc.StatusCode.DEADLINE_EXCEEDED else str(asked)
        return CallError(text, asked.reached, code in _PASSING)


def grpc_message(request: InferRequest) -> inference_pb2.ModelInferRequest:
    """A request as gRPC's message."""
    message = inference_pb2.ModelInferRequest(
        model_name=request.model, model_version=request.version, id=request.id
    )
    for tensor in request.inputs:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(bytes(tensor.data))
    for name in request.outputs:
        output = message.outputs.add(name=name)
        if request.classes:
            output.parameters["classification"].int64_param = request.classes
    for name, value in request.parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param"}.get(
            type(value), "string_param"
        )
        setattr(message.parameters[name], "uint64_param" if name in _UNSIGNED else kind, value)
    return message


def grpc_response(message: inference_pb2.ModelInferResponse) -> InferResponse:
    """Reads gRPC's message."""
    outputs = []
    for at, output in enumerate(message.outputs):
        shape = tuple(output.shape)
        if at < len(message.raw_output_contents):
            tensor = Tensor(output.name, output.datatype, shape, message.raw_output_contents[at])
        else:
            values = getattr(output.contents, _CONTENTS[output.datatype])
            tensor = _listed(output.name, output.datatype, shape, list(values))
        outputs.append(tensor)
    parameters = {
        name: getattr(value, kind)
        for name, value in message.parameters.items()
        if (kind := value.WhichOneof("parameter_choice"))
    }
    return InferResponse(message.model_name, message.model_version, message.id, parameters, outputs)


def _listed(name: str, datatype: str, shape: tuple[int, ...], values: Sequence[Any]) -> Tensor:
    if datatype == "BYTES":
        array = np.empty(len(values), object)
        array[:] = [value if isinstance(value, bytes) else str(value).encode() for value in values]
    else:
        array = np.array(values, NUMPY_DTYPES[datatype])
    return Tensor.from_array(name, array.reshape(shape), datatype)


class HttpClient:
    """A connection that is kept, for one thread."""

    def __init__(self, endpoint: Endpoint, signature: ModelSignature) -> None:
        self._endpoint = endpoint
        self._datatypes = {rule.name: rule.datatype for rule in signature.outputs}
        self._connection: http.client.HTTPConnection | None = None
        self._closed = False

    def infer(self, request: InferRequest) -> InferResponse:
        """The response to a request. Raises CallError."""
        body, head_bytes = http_body(request)
        headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(head_bytes),
        }
        path = f"{model_path(request.model, request.version)}/infer"
        response = self._send(path, body, headers, request.timeout_s)
        content = self._read(response, request.timeout_s)
        if response.status != http.HTTPStatus.OK:
            raise _http_error(response.status, content)
        length = response.getheader("Inference-Header-Content-Length")
        try:
            return http_response(content, len(content) if length is None else int(length))
        except (ValueError, KeyError, TypeError, ConchError) as error:
            raise CallError(f"the answer can't be read: {error}", True, False) from None

    def stream(self, request: InferRequest) -> Iterator[InferResponse]:
        """The responses to a request by generate_stream, whose outputs are scalars or flat lists.

        Raises:
            CallError: It fails.
        """
        body = json.dumps(_generate_body(request)).encode()
        path = f"{model_path(request.model, request.version)}/generate_stream"
        headers = {"Content-Type": "application/json"}
        response = self._send(path, body, headers, request.timeout_s)
        if response.status != http.HTTPStatus.OK:
            content = self._read(response, request.timeout_s)
            raise _http_error(response.status, content.removeprefix(b"data:"))
        done = False
        try:
            while line := self._guarded(response.readline, request.timeout_s):
                if line.startswith(b"data:"):
                    found = json.loads(line[5:])
                    if "error" in found:
                        raise CallError(str(found["error"]), True, False)
                    yield self._event(found)
            done = True
        except ValueError as error:
            raise CallError(f"the answer can't be read: {error}", True, False) from None
        finally:
            if not done:
                self._drop()

    def close(self) -> None:
        """Closes the connection, which ends what is in flight."""
        self._closed = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
            connection.close()

    def _send(
        self, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float | None
    ) -> http.client.HTTPResponse:
        return self._guarded(lambda: self._sent(path, body, headers, timeout_s), timeout_s)

    def _sent(
        self, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float | None
    ) -> http.client.HTTPResponse:
        connection = self._connection
        if connection is None:
            connection = http.client.HTTPConnection(self._endpoint.host, self._endpoint.port)
            connection.auto_open = 0
            self._connection = connection
        if connection.sock is None:
            if self._closed:
                raise ConnectionAbortedError("the connection is closed")
            connection.sock = self._endpoint.connect(10.0 if timeout_s is None else timeout_s)
        connection.sock.settimeout(timeout_s)
        connection.request("POST", path, body, {**self._endpoint.headers, **headers})
        return connection.getresponse()

    def _read(self, response: http.client.HTTPResponse, timeout_s: float | None) -> bytes:
        with closing(response):
            return self._guarded(response.read, timeout_s)

    def _guarded(self, act: Callable[[], T], timeout_s: float | None) -> T:
        try:
            return act()
        except TimeoutError:
            self._drop()
            raise CallError(f"no answer within {timeout_s} s", True, False) from None
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            text = str(error) or type(error).__name__
            raise CallError(f"{self._endpoint.url}: {text}", False, True) from None

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _event(self, found: Mapping[str, Any]) -> InferResponse:
        outputs, parameters = [], {}
        for name, value in found.items():
            if name in self._datatypes:
                values = value if isinstance(value, list) else [value]
                outputs.append(_listed(name, self._datatypes[name], (len(values),), values))
            elif name not in ("model_name", "model_version", "id"):
                parameters[name] = value
        return InferResponse(
            str(found.get("model_name", "")),
            str(found.get("model_version", "")),
            str(found.get("id", "")),
            parameters,
            outputs,
        )


def _http_error(status: int, content: bytes) -> CallError:
    try:
        text = str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        text = f"HTTP {status}"
    return CallError(text, True, status in _PASSING_STATUS)


def _generate_body(request: InferRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"parameters": dict(request.parameters)} if request.parameters else {}
    if request.id:
        body["id"] = request.id
    for tensor in request.inputs:
        if tensor.datatype == "BF16":
            raise CallError(f"input '{tensor.name}' is BF16, which streams over HTTP don't take", True, False)
        values = tensor.numpy().ravel().tolist()
        if tensor.datatype == "BYTES":
            try:
                values = [value.decode() for value in values]
            except UnicodeDecodeError:
                raise CallError(
                    f"input '{tensor.name}' has bytes that are no text: stream over gRPC", True, False
                ) from None
        if len(tensor.shape) > 1 and math.prod(tensor.shape) != tensor.shape[-1]:
            raise CallError(
                f"input '{tensor.name}' has shape {list(tensor.shape)}, and streams over HTTP take vectors "
                f"only: stream over gRPC",
                True,
                False,
            )
        body[tensor.name] = values[0] if len(values) == 1 else values
    return body


def http_body(request: InferRequest) -> tuple[bytes, int]:
    """A request with binary data, and the length of its JSON."""
    head: dict[str, Any] = {
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": {"binary_data_size": len(tensor.data)},
            }
            for tensor in request.inputs
        ]
    }
    if request.id:
        head["id"] = request.id
    if request.outputs:
        asked = {"classification": request.classes} if request.classes else {}
        parameters = {"binary_data": True, **asked}
        head["outputs"] = [{"name": name, "parameters": parameters} for name in request.outputs]
        head["parameters"] = dict(request.parameters)
    else:
        head["parameters"] = {"binary_data_output": True, **request.parameters}
    text = json.dumps(head).encode()
    return b"".join((text, *(tensor.data for tensor in request.inputs))), len(text)


def http_response(content: bytes, head_bytes: int) -> InferResponse:
    """Reads JSON and the binary data behind it.

    Raises:
        ValueError, KeyError, TypeError: It has another form.
    """
    head = json.loads(content[:head_bytes])
    position = head_bytes
    outputs = []
    for output in head["outputs"]:
        name, datatype, shape = output["name"], output["datatype"], tuple(output["shape"])
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            outputs.append(_listed(name, datatype, shape, np.array(output["data"], object).ravel().tolist()))
        else:
            outputs.append(Tensor(name, datatype, shape, content[position : position + size]))
            position += size
    return InferResponse(
        str(head.get("model_name", "")),
        str(head.get("model_version", "")),
        str(head.get("id", "")),
        head.get("parameters", {}),
        outputs,
    )

"""Code of both `conch.Client` and `conch.AsyncClient`: inputs and results of calls, errors of servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from conch.core.errors import (
    ERRORS_BY_CODE,
    ConchError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
    UnknownError,
    UnsupportedError,
)
from conch.core.request import Parameter
from conch.core.tensor import Array, Tensor, datatype_of, encode_bytes
from conch_api.array_conversion import as_sample, column_input, input_array, is_flat, is_scalar
from conch_api.frame_requests import FrameRun
from conch_api.function_io import Result
from conch_frames.column_rules import ModelColumns, columns_of_config

LOOK_S = 0.05
"""Polling interval of model readiness, in seconds."""

STREAM_HEADERS = {"triton_grpc_error": "true"}
"""Makes a stream end with an error's status code, which stream responses do not carry."""

_GRPC_STATUS = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "UNIMPLEMENTED": "UNSUPPORTED",
}
_BY_HTTP_STATUS = {
    str(error.http_status): error for error in ERRORS_BY_CODE.values() if error.http_status != 400
} | {"400": InvalidArgumentError, "500": InternalError}
_FINAL = "triton_final_response"
_SCHEMES = {"grpc": False, "grpcs": True, "http": False, "https": True}


@dataclass(frozen=True, slots=True)
class Url:
    """Address of a server.

    Attributes:
        grpc: True if the protocol is gRPC.
        tls: True if it uses TLS.
        address: Host and port.
    """

    grpc: bool
    tls: bool
    address: str

    @classmethod
    def parse(cls, url: str) -> Url:
        """Parses a url."""
        scheme, found, address = url.partition("://")
        if not found:
            scheme, address = "grpc", url
        if scheme not in _SCHEMES or not address:
            raise InvalidArgumentError(
                f"url '{url}' must be host:port for gRPC, or begin with one of "
                f"{', '.join(f'{scheme}://' for scheme in _SCHEMES)}"
            )
        return cls(scheme.startswith("grpc"), _SCHEMES[scheme], address.rstrip("/"))

    def module(self, aio: bool = False) -> ModuleType:
        """The tritonclient module for this protocol."""
        kind = "grpc" if self.grpc else "http"
        try:
            return import_module(f"tritonclient.{kind}.aio" if aio else f"tritonclient.{kind}")
        except ImportError as error:
            raise ImportError(
                f"conch.Client needs tritonclient, which is not installed; install it with "
                f"`pip install 'conch[client]'` ({error})"
            ) from error


class Signature:
    """Inputs and properties of a model.

    Args:
        config: The model's config in JSON.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.name: str = config.get("name", "")
        self.inputs = {tensor["name"]: _datatype(tensor["data_type"]) for tensor in config.get("input", ())}
        self._dims = {
            tensor["name"]: [int(dim) for dim in tensor.get("dims", ())] for tensor in config.get("input", ())
        }
        self.optional = {tensor["name"] for tensor in config.get("input", ()) if tensor.get("optional")}
        self.batches = int(config.get("max_batch_size", 0)) > 0
        self.decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self.config = config

    @cached_property
    def columns(self) -> ModelColumns:
        """The model's columns. Raises InvalidArgumentError: the config contradicts itself."""
        return columns_of_config(self.config)

    def arrays(
        self, given: Sequence[npt.ArrayLike], named: Mapping[str, npt.ArrayLike], sample: bool
    ) -> dict[str, tuple[str, Array]]:
        """Datatype and array of each input; `sample` adds the batch dimension where the model has one."""
        if given and named:
            raise InvalidArgumentError("inputs can be given in their order or by name, not both")
        if given:
            if len(given) > len(self.inputs):
                raise InvalidArgumentError(
                    f"model '{self.name}' has {len(self.inputs)} inputs, not {len(given)}"
                )
            named = dict(zip(self.inputs, given, strict=False))
        for name in named:
            if name not in self.inputs:
                known = ", ".join(self.inputs)
                raise InvalidArgumentError(f"model '{self.name}' has no input '{name}'; it has {known}")
        missing = [name for name in self.inputs if name not in named and name not in self.optional]
        if missing:
            raise InvalidArgumentError(f"model '{self.name}' needs input '{missing[0]}'")
        return {name: (self.inputs[name], self._array(name, value, sample)) for name, value in named.items()}

    def _array(self, name: str, value: npt.ArrayLike, sample: bool) -> Array:
        datatype, dims = self.inputs[name], self._dims[name]
        if self.batches and dims == [1] and (is_scalar(value) if sample else is_flat(value)):
            array = column_input(name, [value] if sample else value, datatype, self.columns)
            return self._brain_floats(datatype, array)
        array = input_array(name, value, "FP32" if datatype == "BF16" else datatype)
        array = self._brain_floats(datatype, array)
        if not sample:
            return array
        array = as_sample(array, dims)
        return array[np.newaxis] if self.batches else array

    @staticmethod
    def _brain_floats(datatype: str, array: Array) -> Array:
        if datatype != "BF16" or datatype_of(array) not in ("FP32", "BF16"):
            return array
        # tritonclient takes arrays of ml_dtypes, before 26.06 of float32.
        return array.astype(import_module("tritonclient.utils").triton_to_np_dtype("BF16"), copy=False)

    def result(self, response: Any, sample: bool) -> Result:
        """Converts a response of tritonclient."""
        head = response.get_response()
        if isinstance(head, dict):
            names = [output["name"] for output in head.get("outputs", ())]
            parameters = dict(head.get("parameters", {}))
        else:
            names = [output.name for output in head.outputs]
            parameters = {
                key: getattr(value, value.WhichOneof("parameter_choice"))
                for key, value in head.parameters.items()
            }
        parameters.pop(_FINAL, None)
        outputs = {name: response.as_numpy(name) for name in names}
        if sample and self.batches:
            outputs = {name: array[0] for name, array in outputs.items()}
        return Result(outputs, parameters)


def is_final(response: Any) -> bool:
    """True for the last response of a stream."""
    parameter = response.get_response().parameters.get(_FINAL)
    return parameter is not None and bool(parameter.bool_param)


def as_error(error: BaseException) -> ConchError | None:
    """Converts an exception of tritonclient or its transports; None for others."""
    if isinstance(error, ConnectionError | TimeoutError):
        return UnavailableError(f"the server can't be reached: {error}")
    text_of, status_of = (
        getattr(error, message, None) or getattr(error, of_grpc, None)
        for message, of_grpc in (("message", "details"), ("status", "code"))
    )
    if not callable(text_of) or not callable(status_of):
        return None
    text = str(text_of())
    status = str(status_of() or "")
    if "Deadline Exceeded" in text or status.endswith("DEADLINE_EXCEEDED"):
        return DeadlineExceededError(text)
    if status.startswith("StatusCode."):
        name = status.removeprefix("StatusCode.")
        return ERRORS_BY_CODE.get(_GRPC_STATUS.get(name, name), UnknownError)(text)
    return _BY_HTTP_STATUS.get(status, UnknownError)(text)


def _datatype(data_type: str) -> str:
    name = data_type.removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


class ClientBase:
    """A model of a server; everything but waiting.

    Args:
        url: The server.
        model: The model's name.
        version: Its version; the newest if empty.
        wait_s: Seconds to wait until it is ready.
        timeout_s: Time limit of a request in seconds; None for no limit.

    Raises:
        InvalidArgumentError: The url is invalid.
        ImportError: tritonclient is not installed.
    """

    _aio: ClassVar[bool] = False
    """True if it uses tritonclient's asyncio client."""

    def __init__(
        self,
        url: str,
        model: str,
        version: str | int = "",
        *,
        wait_s: float = 60.0,
        timeout_s: float | None = None,
    ) -> None:
        self._url = Url.parse(url)
        self._module: Any = self._url.module(self._aio)
        self._tensors: Any = self._url.module()
        self._model = model
        self._version = str(version)
        self._wait_s = wait_s
        self._timeout_s = timeout_s
        self._client: Any = None
        self._signature: Signature | None = None

    def _request(
        self,
        signature: Signature,
        given: Sequence[npt.ArrayLike],
        named: Mapping[str, npt.ArrayLike],
        parameters: Mapping[str, Parameter] | None,
        sample: bool,
    ) -> dict[str, Any]:
        """Keyword arguments of tritonclient's methods for a request."""
        return self._asking_for(signature.arrays(given, named, sample), parameters)

    def _frame_run(self, signature: Signature, frame: Any) -> FrameRun:
        if signature.decoupled:
            raise InvalidArgumentError(
                f"model '{self._model}' is decoupled, and may not answer row by row: use stream_batch"
            )
        return FrameRun(frame, signature.columns)

    def _frame_request(
        self,
        inputs: Mapping[str, Tensor],
        outputs: Sequence[str] | None,
        parameters: Mapping[str, Parameter] | None,
    ) -> dict[str, Any]:
        arrays = {name: (tensor.datatype, tensor.numpy()) for name, tensor in inputs.items()}
        request = self._asking_for(arrays, parameters)
        if outputs:
            request["outputs"] = [self._tensors.InferRequestedOutput(name) for name in outputs]
        return request

    def _asking_for(
        self, arrays: Mapping[str, tuple[str, Array]], parameters: Mapping[str, Parameter] | None
    ) -> dict[str, Any]:
        inputs = []
        for name, (datatype, array) in arrays.items():
            tensor = self._tensors.InferInput(name, list(array.shape), datatype)
            try:
                if self._url.grpc and datatype == "BYTES" and array.dtype == object:
                    tensor._raw_content = encode_bytes(array.ravel())  # tritonclient takes five times as long
                else:
                    tensor.set_data_from_numpy(array)
            except Exception as error:  # of tritonclient, which raises one class for all
                raise InvalidArgumentError(f"input '{name}': {error}") from error
            inputs.append(tensor)
        return {
            "model_name": self._model,
            "inputs": inputs,
            "model_version": self._version,
            "parameters": dict(parameters) if parameters else None,
        }

    def _know(self, answer: Any) -> Signature:
        """Stores the signature from the server's model config."""
        self._signature = Signature(answer["config"] if self._url.grpc else answer)
        return self._signature

    @property
    def _asking(self) -> dict[str, Any]:
        """Arguments of the request for the model config."""
        asking: dict[str, Any] = {"model_name": self._model, "model_version": self._version}
        return asking | {"as_json": True} if self._url.grpc else asking

    def _check_streams(self) -> None:
        if not self._url.grpc:
            raise UnsupportedError("responses are streamed over gRPC only: use a grpc:// url")

    def _not_ready(self, why: str) -> UnavailableError:
        return UnavailableError(f"model '{self._model}' was not ready within {self._wait_s} s: {why}")


@contextmanager
def translated_errors(timeout_s: float | None = None) -> Iterator[None]:
    """Converts exceptions of tritonclient to conch's classes; `timeout_s` is the block's time limit."""
    try:
        yield
    except Exception as error:  # of tritonclient and its transports
        if isinstance(error, TimeoutError) and timeout_s is not None:
            raise DeadlineExceededError(f"no answer within {timeout_s} s") from error
        known = as_error(error)
        if known is None:
            raise
        raise known from error

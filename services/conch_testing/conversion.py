"""Converts between values of tests and objects of the core: arrays, requests, outputs, errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypedDict

import numpy as np

from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError, InternalError, message_of
from conch.core.request import InferenceRequest, InferenceResponse, Parameter, Responder
from conch.core.spec import TensorSpec
from conch.core.tensor import NUMPY_DTYPES, Array, Tensor, brain_floats, float_array


class ModelError(Exception):
    """An error that a client would receive instead of outputs.

    Args:
        message: The text.
        code: Triton's name of the code, such as ``INVALID_ARG``.

    Attributes:
        code: The code.
        responses: Responses that a decoupled model sent before.
    """

    def __init__(self, message: str, code: str = "INTERNAL") -> None:
        super().__init__(message)
        self.code = code
        self.responses: list[Outputs] = []


class Outputs(dict[str, Array]):
    """The outputs of one response by name, as arrays.

    Attributes:
        parameters: Its response parameters.
    """

    def __init__(
        self, outputs: Iterable[tuple[str, Array]] = (), parameters: Mapping[str, Parameter] | None = None
    ) -> None:
        super().__init__(outputs)
        self.parameters: dict[str, Parameter] = dict(parameters or {})


def tensors_of(inputs: Mapping[str, Any], specs: Iterable[TensorSpec] = ()) -> dict[str, Tensor]:
    """Converts inputs to the form of a front end: read-only, in wire form."""
    datatypes = {spec.name: spec.datatype for spec in specs}
    made = (_tensor(name, value, datatypes.get(name)) for name, value in inputs.items())
    return {
        tensor.name: Tensor(tensor.name, tensor.datatype, tensor.shape, bytes(tensor.data)) for tensor in made
    }


def outputs_of(response: InferenceResponse) -> Outputs:
    """The outputs of a successful response."""
    return Outputs(((tensor.name, array_of(tensor)) for tensor in response.outputs), response.parameters)


def array_of(tensor: Tensor) -> Array:
    """A tensor's array; BF16 as float32."""
    return float_array(tensor.data, tensor.shape) if tensor.datatype == "BF16" else tensor.numpy()


def as_model_error(error: ConchError) -> ModelError:
    """Converts an error of the core."""
    # The reason is for operators; clients get a shorter text.
    return ModelError(getattr(error, "reason", error.message), error.code)


def as_core_error(error: BaseException) -> ConchError:
    """Converts an exception of a mock model."""
    if isinstance(error, ConchError):
        return error
    if isinstance(error, ModelError):
        kinds = {kind.code: kind for kind in _kinds(ConchError)}
        return kinds.get(error.code, InternalError)(message_of(error))
    return InternalError(f"{type(error).__name__}: {message_of(error)}")


def _kinds(kind: type[ConchError]) -> Iterator[type[ConchError]]:
    for each in kind.__subclasses__():
        yield from _kinds(each)
        yield each


def _tensor(name: str, value: Any, datatype: str | None) -> Tensor:
    if isinstance(value, np.ndarray):
        array = value
    else:
        kind = "FP32" if datatype == "BF16" else datatype or ""
        array = np.asarray(value, object if kind == "BYTES" else NUMPY_DTYPES.get(kind))
    if datatype == "BF16" and array.dtype == np.float32:
        return Tensor(name, datatype, array.shape, brain_floats(array))
    return Tensor.from_array(name, array)


class Request(TypedDict, total=False):
    """Options of a request besides its inputs.

    Attributes:
        outputs: Names of the requested outputs; all if absent.
        parameters: Request parameters.
        request_id: Its id.
        sequence_id: Its sequence.
        sequence_start: True if it starts the sequence.
        sequence_end: True if it ends the sequence.
        priority: Its priority level.
        timeout_us: Queue timeout in microseconds.
        deadline_s: Seconds after which it is abandoned.
    """

    outputs: Iterable[str]
    parameters: Mapping[str, Parameter]
    request_id: str
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool
    priority: int
    timeout_us: int
    deadline_s: float


def make_request(
    name: str, version: str, tensors: dict[str, Tensor], responder: Responder, given: Request
) -> InferenceRequest:
    """Creates a request as a front end does."""
    now = monotonic_ns()
    outputs, parameters = given.get("outputs"), given.get("parameters")
    request = InferenceRequest(
        name,
        version,
        tensors,
        responder,
        now,
        given.get("request_id", ""),
        None if outputs is None else tuple(outputs),
        dict(parameters) if parameters else None,
    )
    request.correlation_id = given.get("sequence_id", 0)
    request.sequence_start = given.get("sequence_start", False)
    request.sequence_end = given.get("sequence_end", False)
    request.priority = given.get("priority", 0)
    request.timeout_us = given.get("timeout_us", 0)
    request.responses_wait = True
    if "deadline_s" in given:
        request.deadline_ns = now + round(given["deadline_s"] * 1e9)
    return request

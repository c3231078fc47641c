"""Responses as models make them, and their conversion to the core's."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from conch.backends.python.errors import TritonError, TritonModelException, as_core_error
from conch.backends.python.tensor import Tensor
from conch.core.errors import InternalError
from conch.core.request import InferenceRequest as CoreRequest
from conch.core.request import InferenceResponse as CoreResponse
from conch.core.request import Parameter
from conch.core.spec import ModelSpec

log = logging.getLogger(__name__)


class InferenceResponse:
    """One response to one request: tensors, or an error."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self._tensors = output_tensors
        self._error = error
        if parameters is not None:
            check_parameters(parameters)
        self._parameters = parameters

    def output_tensors(self) -> list[Tensor]:
        """The tensors."""
        return list(self._tensors or ())

    def has_error(self) -> bool:
        """Whether it is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, or None."""
        return self._error

    def parameters(self) -> dict[str, Parameter]:
        """The parameters for the client."""
        return dict(self._parameters or {})


def check_parameters(parameters: object) -> None:
    """Checks what a model gives as the parameters of a request or a response.

    Raises:
        TritonModelException: They can't be any; the text is Triton's.
    """
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, bool | int | str):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )


class Converter:
    """Turns a model's responses into the core's.

    As Triton does, it keeps the outputs that were asked for, and, beyond Triton, the states of a sequence.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._all = frozenset(tensor.name for tensor in spec.model_outputs)
        states = () if spec.sequence is None else spec.sequence.states
        self._states = frozenset(state.output_name for state in states)
        self._warned: set[str] = set()

    def __call__(self, request: CoreRequest, response: InferenceResponse) -> CoreResponse:
        """Converts one response.

        Raises:
            TritonModelException: Something in its list of tensors is not a tensor.
        """
        if response._error is not None:
            return CoreResponse([], as_core_error(response._error))
        requested = request.requested
        wanted: Collection[str] = self._all if requested is None else requested
        if self._states and requested is not None:
            wanted = self._states.union(requested)
        try:
            tensors = response._tensors
            if request.responses_wait:
                outputs = [tensor._kept() for tensor in tensors if tensor._core.name in wanted]
            else:
                outputs = [core for tensor in tensors if (core := tensor._core).name in wanted]
            dropped = len(tensors) != len(outputs)
        except (AttributeError, TypeError):
            raise TritonModelException(
                f"Expected a list of 'Tensor' objects in the output_tensors of an InferenceResponse, found "
                f"{_found(response._tensors)}."
            ) from None
        if dropped:
            self._warn(tensors)
        return CoreResponse(outputs, None, response._parameters)

    def failed(self, message: str) -> CoreResponse:
        """A response that says that the model failed."""
        return CoreResponse([], InternalError(message))

    def _warn(self, tensors: Sequence[Tensor]) -> None:
        """Says once for each output that the config does not have it: nobody will ever receive it."""
        for name in {tensor.name() for tensor in tensors} - self._all - self._warned:
            self._warned.add(name)
            log.warning(
                "model '%s' returns a tensor '%s', which is dropped: its config has no such output",
                self._spec.name,
                name,
            )


def _found(tensors: object) -> str:
    if not isinstance(tensors, list | tuple):
        return f"type '{type(tensors)}'"
    wrong = next((item for item in tensors if not isinstance(item, Tensor)), None)
    return f"an element of type '{type(wrong)}'"

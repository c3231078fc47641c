"""`pb_utils.InferenceResponse`, and its conversion to the core's response."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from conch.backends.python.api.pb_errors import TritonError, TritonModelException, as_core_error
from conch.backends.python.api.pb_tensor import Tensor
from conch.backends.python.python_settings import Settings
from conch.core.errors import InternalError
from conch.core.request import InferenceRequest as CoreRequest
from conch.core.request import InferenceResponse as CoreResponse
from conch.core.request import Parameter
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor as CoreTensor
from conch.core.tensor import brain_floats
from conch.core.validation import shape_text

log = logging.getLogger(__name__)

_EXPECTED = "Expected a list of 'Tensor' objects in the output_tensors of an InferenceResponse, found "


class InferenceResponse:
    """One response to a request: tensors or an error."""

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        for tensor in output_tensors if type(output_tensors) is list else _listed(output_tensors, error):
            if type(tensor) is not Tensor:
                _check_tensor(tensor)
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"the error of an InferenceResponse must be a TritonError, not {type(error)}")
        self._tensors = output_tensors
        self._error = error
        if parameters is not None:
            check_parameters(parameters)
        self._parameters = parameters

    def output_tensors(self) -> list[Tensor]:
        """The tensors."""
        return list(self._tensors or ())

    def has_error(self) -> bool:
        """True if it is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, or None."""
        return self._error

    def parameters(self) -> str:
        """The response parameters as a JSON object."""
        return as_json(self._parameters or {})


def as_json(parameters: Mapping[str, Parameter]) -> str:
    """Parameters as JSON in Triton's format: some models compare the text."""
    return json.dumps(dict(parameters), separators=(",", ":"), ensure_ascii=False)


def check_parameters(parameters: object) -> None:
    """Checks request or response parameters that a model passes.

    Raises:
        TritonModelException: They are invalid; the text is Triton's.
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


def set_parameters(response: InferenceResponse, parameters: Mapping[str, Parameter]) -> None:
    """Sets response parameters of any type of the protocol; Triton's Python API has no doubles."""
    response._parameters = parameters


class Converter:
    """Converts a model's responses to the core's.

    As in Triton it keeps the requested outputs; beyond Triton also sequence states. An output whose datatype
    or rank contradicts the config is served and noted, or refused with ``strict-outputs``. FP32 is converted
    to BF16 where the config has BF16, as numpy has no type for it. `note` receives contradictions.
    """

    def __init__(self, spec: ModelSpec, note: Callable[[str], None] = lambda text: None) -> None:
        self._spec = spec
        self._note = note
        self._strict = Settings.of(spec).strict_outputs
        batch = int(spec.max_batch_size > 0)
        self._dims = {
            tensor.name: (-1, *tensor.backend_dims) if batch else tensor.backend_dims
            for tensor in spec.model_outputs
        }
        self._expected = {
            tensor.name: (tensor.datatype, len(self._dims[tensor.name])) for tensor in spec.model_outputs
        }
        self._noted: set[str] = set()
        self._all = frozenset(tensor.name for tensor in spec.model_outputs)
        states = () if spec.sequence is None else spec.sequence.states
        self._states = frozenset(state.output_name for state in states)
        self._warned: set[str] = set()

    def convert(self, request: CoreRequest, response: InferenceResponse) -> CoreResponse:
        """Converts one response.

        Raises:
            TritonModelException: Its list of tensors contains something else.
        """
        if response._error is not None:
            return CoreResponse([], as_core_error(response._error))
        requested = request.requested
        wanted: Collection[str]
        if requested is None:
            wanted = self._all
        else:
            wanted = self._states.union(requested) if self._states else requested
        tensors = response._tensors
        expected = self._expected
        kept = request.responses_wait
        outputs: list[CoreTensor] = []
        dropped = False
        try:
            for tensor in tensors:
                core = tensor._core
                if core.name in wanted:
                    fits = (core.datatype, len(core.shape)) == expected.get(core.name)
                    output = tensor._stable() if kept else core
                    outputs.append(output if fits else self._fitted(output))
                else:
                    dropped = True
        except InternalError as error:
            return CoreResponse([], error)
        except (AttributeError, TypeError):
            raise TritonModelException(f"{_EXPECTED}{_type_names(response._tensors)}.") from None
        if dropped:
            self._warn(tensors)
        return CoreResponse(outputs, None, response._parameters)

    def failed(self, message: str) -> CoreResponse:
        """An error response for a failure of the model."""
        return CoreResponse([], InternalError(message))

    def _fitted(self, tensor: CoreTensor) -> CoreTensor:
        """An output that contradicts the config, as it is served.

        Raises:
            InternalError: It is refused.
        """
        name, shape = tensor.name, tensor.shape
        expected = self._expected.get(name)
        if expected is None:
            return tensor
        datatype, rank = expected
        if datatype == "BF16" and tensor.datatype == "FP32" and not tensor.on_device:
            tensor = CoreTensor(name, datatype, shape, brain_floats(tensor.numpy()))
        if tensor.datatype != datatype:
            self._contradicts(name, f"datatype {datatype}", tensor.datatype)
        if len(shape) != rank:
            self._contradicts(
                name,
                f"{rank} dimensions ({shape_text(self._dims[name])})",
                f"{len(shape)} ({shape_text(shape)})",
            )
        return tensor

    def _contradicts(self, name: str, expected: str, got: str) -> None:
        model = self._spec.name
        text = f"output '{name}' of model '{model}' contradicts its config: expected {expected}, got {got}"
        if self._strict:
            raise InternalError(text)
        kind = f"{name} {expected}"  # without the shape, which may vary endlessly
        if kind not in self._noted:
            self._noted.add(kind)
            self._note(text)

    def _warn(self, tensors: Sequence[Tensor]) -> None:
        """Warns once per output that the config does not have."""
        for name in {tensor.name() for tensor in tensors} - self._all - self._warned:
            self._warned.add(name)
            log.warning(
                "model '%s' returns a tensor '%s', which is dropped: its config has no such output",
                self._spec.name,
                name,
            )


def _listed(tensors: object, error: object) -> Collection[object]:
    """The tensors of a response that are not in a list; an error needs none.

    Raises:
        TypeError: The value cannot hold tensors.
    """
    if isinstance(tensors, Collection) and not isinstance(tensors, str | bytes | Mapping):
        return tensors
    if tensors is None and error is not None:
        return ()
    raise TypeError(_EXPECTED + _type_names(tensors) + ".")


def _check_tensor(tensor: object) -> None:
    """Checks a tensor of a response.

    Raises:
        TritonModelException: It is None; the text is Triton's.
        TypeError: It is not a tensor.
    """
    if tensor is None:
        raise TritonModelException("Output tensor for inference response should not be empty.")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{_EXPECTED}an element of type '{type(tensor)}'.")


def _type_names(tensors: object) -> str:
    if not isinstance(tensors, list | tuple):
        return f"type '{type(tensors)}'"
    wrong = next((item for item in tensors if not isinstance(item, Tensor)), None)
    return f"an element of type '{type(wrong)}'"

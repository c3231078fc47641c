"""Derives inputs and outputs of a bound function from its type hints, or from one example call."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np

from conch.core.errors import ConchError, InvalidArgumentError, message_of
from conch.core.tensor import Array
from conch_api.array_conversion import as_column, input_array, listed
from conch_api.coroutines import resolve_awaitable
from conch_api.decorators import Function, batch, takes_requests
from conch_api.frame_examples import FrameExample
from conch_api.frames import answered_columns, is_frame
from conch_api.function_config import Tensor
from conch_api.function_io import Request
from conch_api.input_readers import InputReader
from conch_frames.column_rules import COLUMNS_PARAMETER

_STREAMS = (Iterator, Generator, AsyncIterator, AsyncGenerator)
_ADVICE = (
    "give {kind}=[conch.Tensor(...)], an example={{name: array}}, or a hint with an element type and a "
    "number of dimensions, such as np.ndarray[tuple[int, int], np.dtype[np.float32]] or "
    "Annotated[np.ndarray, conch.Tensor(dtype=np.float32, shape=(-1,))]"
)


def hinted_inputs(name: str, function: Function, batching: bool) -> list[Tensor]:
    """The inputs from a function's type hints."""
    parameters, hints = _hints(name, function)
    inputs = []
    for parameter in parameters.values():
        hint, optional = _without_none(hints.get(parameter.name))
        tensor = _tensor_of(hint, batching)
        if tensor is None or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            raise _unsaid(name, "inputs", f"parameter '{parameter.name}'")
        optional = optional or tensor.optional or parameter.default is not parameter.empty
        inputs.append(replace(tensor, name=parameter.name, optional=optional))
    return inputs


def hinted_outputs(name: str, function: Function, batching: bool) -> list[Tensor]:
    """The outputs from the hint of the returned or yielded value."""
    returned = _hints(name, function)[1].get("return")
    if get_origin(returned) in _STREAMS:
        returned = get_args(returned)[0]
    outputs = []
    for label, hint in _named_hints(returned):
        tensor = _tensor_of(hint, batching)
        if tensor is None:
            raise _unsaid(name, "outputs", "what is returned" if label is None else f"output '{label}'")
        outputs.append(tensor if label is None else replace(tensor, name=label))
    return outputs


@dataclass(frozen=True, slots=True)
class Derived:
    """A function with the inputs and outputs of its example.

    Attributes:
        inputs: Its inputs.
        outputs: Its outputs.
        functions: The functions, which take requests.
        readers: Readers of inputs that functions get as the example had them.
        parameters: Parameters of the model's config.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    functions: Sequence[Function]
    readers: Mapping[str, InputReader] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)


def from_example(
    name: str,
    functions: Sequence[Function],
    example: Any,
    inputs: Sequence[Tensor] | None,
    outputs: Sequence[Tensor] | None,
    batching: bool,
) -> Derived:
    """The inputs and outputs of one call: inputs have the example's dims, those of outputs are variable."""
    if is_frame(example):
        if inputs is not None or not batching:
            raise InvalidArgumentError(
                f"model '{name}': a frame as example has rows and says all of the inputs: leave inputs and "
                f"batching=False out"
            )
        frame = FrameExample(example)
        functions = [each if takes_requests(each) else frame_function(each, frame) for each in functions]
        found = outputs or _outputs_of(name, functions[0], frame.arrays, batching)
        return Derived(frame.tensors, found, functions, frame.readers, {COLUMNS_PARAMETER: frame.parameter})
    datatypes = {tensor.name: tensor.datatype for tensor in inputs or ()}
    arrays: dict[str, Array] = {}
    readers: dict[str, InputReader] = {}
    for label, value in example.items():
        array = input_array(label, value, datatypes.get(label))
        array = (as_column(array) if batching and label not in datatypes else array).view()
        array.flags.writeable = False  # belongs to the caller; the function gets a copy
        arrays[label] = array
    if inputs is None:
        inputs = [
            Tensor(label, array.dtype, _dims_of(label, array, batching)) for label, array in arrays.items()
        ]
        readers = {label: InputReader(label, True) for label, value in example.items() if _has_texts(value)}
    if outputs is None:
        given = {
            label: readers[label](array) if label in readers else array for label, array in arrays.items()
        }
        outputs = _outputs_of(name, functions[0], given, batching)
    return Derived(inputs, outputs, functions, readers)


def frame_function(function: Function, example: FrameExample) -> Function:
    """Calls a function once per batch with a frame like the example; its outputs have a row for each."""

    @batch
    def run(**columns: Array) -> Any:
        return function(example.frame(columns))

    return run


def _has_texts(value: Any) -> bool:
    """True if an example has texts and no bytes."""
    array = value if isinstance(value, np.ndarray) else np.asarray(value, object)
    return array.dtype.kind == "U" or (
        array.dtype.kind == "O" and array.size > 0 and all(isinstance(each, str) for each in array.ravel())
    )


def _outputs_of(name: str, function: Function, arrays: Mapping[str, Array], batching: bool) -> list[Tensor]:
    """The outputs of a call."""
    rows = next((len(array) for array in arrays.values()), 0) if batching else None
    try:
        returned = resolve_awaitable(function([Request(arrays, rows=rows)]))
        if isinstance(returned, Iterator):
            returned = next(returned)
        (answer,) = returned
        if isinstance(answer, BaseException):
            raise answer
        named = _answered(answered_columns(answer))
    except Exception as error:  # of user code
        text = (
            error.message if isinstance(error, ConchError) else f"{type(error).__name__}: {message_of(error)}"
        )
        raise InvalidArgumentError(f"model '{name}': the call with the example failed: {text}") from error
    return [_output_of(label, array, batching) for label, array in named]


def _answered(answer: Any) -> list[tuple[str | None, Array]]:
    if isinstance(answer, Mapping):
        return [(str(label), listed(value)) for label, value in answer.items()]
    return [(None, listed(value)) for value in (answer if isinstance(answer, list | tuple) else (answer,))]


def _output_of(label: str | None, array: Array, batching: bool) -> Tensor:
    if batching and array.ndim == 1:
        return Tensor(label, array.dtype, (1,))  # a value for each row
    return Tensor(label, array.dtype, (-1,) * len(_dims_of(label, array, batching)))


def _dims_of(label: str | None, array: Array, batching: bool) -> tuple[int, ...]:
    """The dims behind that of the batch."""
    if array.ndim - batching < 1:
        raise InvalidArgumentError(
            f"{'an output' if label is None else f'tensor {label!r}'} of the example has shape "
            f"{list(array.shape)}: it must have a dim{' besides that of the batch' if batching else ''}"
        )
    return array.shape[1:] if batching else array.shape


def _hints(name: str, function: Function) -> tuple[Mapping[str, inspect.Parameter], dict[str, Any]]:
    """The parameters of a function below its decorators, and its type hints."""
    inner = inspect.unwrap(function)
    called = inner if inspect.isroutine(inner) else getattr(inner, "__call__", inner)  # noqa: B004
    try:
        return inspect.signature(called).parameters, get_type_hints(called, include_extras=True)
    except (NameError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"model '{name}': the type hints of the function can't be read ({message_of(error)}): "
            f"{_ADVICE.format(kind='inputs')}"
        ) from None


def _named_hints(returned: Any) -> list[tuple[str | None, Any]]:
    if is_typeddict(returned):
        return list(get_type_hints(returned, include_extras=True).items())
    if get_origin(returned) is tuple:
        return [(None, each) for each in get_args(returned)]
    return [(None, returned)]


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) in (Union, UnionType):
        others = [each for each in get_args(hint) if each is not NoneType]
        if len(others) == 1:
            return others[0], True
    return hint, False


def _tensor_of(hint: Any, batching: bool) -> Tensor | None:
    """The tensor that a hint describes; None if incomplete."""
    if get_origin(hint) is Annotated:
        inner, *more = get_args(hint)
        return next((each for each in more if isinstance(each, Tensor)), None) or _tensor_of(inner, batching)
    if get_origin(hint) is not np.ndarray:
        return None
    shape, dtype = get_args(hint)
    dims = get_args(shape)
    element = next(iter(get_args(dtype)), None)
    if get_origin(shape) is not tuple or Ellipsis in dims or not isinstance(element, type):
        return None
    sizes = tuple(get_args(dim)[0] if get_origin(dim) is Literal else -1 for dim in dims)
    return Tensor(None, element, sizes[1:] if batching else sizes)


def _unsaid(name: str, kind: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"model '{name}': the type hints do not say enough of {what}: {_ADVICE.format(kind=kind)}"
    )

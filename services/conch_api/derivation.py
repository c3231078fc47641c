"""Derives inputs and outputs of a bound function from its type hints, or from one example call."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np
import numpy.typing as npt

from conch.core.errors import ConchError, InvalidArgumentError, message_of
from conch.core.tensor import Array
from conch_api.array_conversion import input_array, listed
from conch_api.coroutines import resolve_awaitable
from conch_api.decorators import Function
from conch_api.function_config import Tensor
from conch_api.function_io import Request

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


def from_example(
    name: str,
    function: Function,
    example: Mapping[str, npt.ArrayLike],
    inputs: Sequence[Tensor] | None,
    outputs: Sequence[Tensor] | None,
    batching: bool,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The inputs and outputs of one call: inputs have the example's dims, those of outputs are variable."""
    datatypes = {tensor.name: tensor.datatype for tensor in inputs or ()}
    arrays: dict[str, Array] = {}
    for label, value in example.items():
        array = input_array(label, value, datatypes.get(label)).view()
        array.flags.writeable = False  # belongs to the caller; the function gets a copy
        arrays[label] = array
    if inputs is None:
        inputs = [
            Tensor(label, array.dtype, _dims_of(label, array, batching)) for label, array in arrays.items()
        ]
    if outputs is not None:
        return inputs, outputs
    rows = next((len(array) for array in arrays.values()), 0) if batching else None
    try:
        returned = resolve_awaitable(function([Request(arrays, rows=rows)]))
        if isinstance(returned, Iterator):
            returned = next(returned)
        (answer,) = returned
        if isinstance(answer, BaseException):
            raise answer
        named = _answered(answer)
    except Exception as error:  # of user code
        text = (
            error.message if isinstance(error, ConchError) else f"{type(error).__name__}: {message_of(error)}"
        )
        raise InvalidArgumentError(f"model '{name}': the call with the example failed: {text}") from error
    return inputs, [_output_of(label, array, batching) for label, array in named]


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

"""Decorators that turn functions of arrays into functions of requests.

A bound function takes a list of `conch.Request` and returns as many results, each a mapping of arrays by name
or a sequence in the order of the outputs. `sample` and `batch` make such a function from one with arrays as
keyword arguments. Above them go decorators of requests (`fill_optionals`, `group_by_keys`,
`group_by_values`), below them those of arrays (`first_value`, `pad_batch`). All support generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, overload

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import Array, datatype_of
from conch.core.validation import shape_text
from conch_api.array_conversion import array_of, encoded, listed
from conch_api.coroutines import resolve_awaitable, resolve_awaitables
from conch_api.frames import answered_columns
from conch_api.function_io import Request
from conch_api.model_context import ModelContext, current_context, model_context

Outputs = Any
"""Arrays by name, or in the order of the outputs; a single array for a single output."""

Answers = Any
"""One `Outputs` per request in order, None for no response; or an iterator of such lists."""

Function = Callable[..., Any]

_NOTHING = object()
_MARK = "takes_requests"


def sample(function: Function) -> Function:
    """Calls a function once per request, with its inputs as keyword arguments; it returns the outputs.

    For models without a batch dimension. A generator yields any number of responses per request. Coroutines
    run concurrently.
    """

    @wraps(function)
    def run(*args: Any) -> Answers:
        *bound, requests = args
        alone = len(requests) == 1
        calls = [_answer(partial(function, *bound, **request), alone) for request in requests]
        answers = resolve_awaitables(calls, alone)
        return _together(answers) if any(isinstance(answer, Iterator) for answer in answers) else answers

    return _of_requests(run)


def batch(function: Function) -> Function:
    """Calls a function once per batch, with concatenated inputs as keyword arguments.

    Inputs are concatenated along the batch dimension; the outputs are split by request.
    """

    @wraps(function)
    def run(*args: Any) -> Answers:
        *bound, requests = args
        rows = [_rows(request) for request in requests]
        return _each(function(*bound, **_joined(requests)), lambda outputs: _split(outputs, rows))

    return _of_requests(run)


def takes_requests(function: Function) -> bool:
    """True if a decorator made a function of requests of it."""
    return bool(getattr(function, _MARK, False))


def _of_requests(function: Function) -> Function:
    function.__dict__[_MARK] = True  # `wraps` of decorators above copies it
    return function


@overload
def pad_batch(function: Function) -> Function: ...


@overload
def pad_batch(*, sizes: Sequence[int] = ()) -> Callable[[Function], Function]: ...


def pad_batch(function: Function | None = None, *, sizes: Sequence[int] = ()) -> Any:
    """Limits a function below `batch` to a few batch sizes by repeating the last row; outputs are cut back.

    Args:
        function: The function, if the decorator has no parentheses.
        sizes: The sizes; by default the batcher's preferred sizes and the maximum.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def run(*args: Any, **inputs: Array) -> Any:
            rows = len(next(iter(inputs.values()))) if inputs else 0
            size = min((size for size in sizes or _usual_sizes() if size >= rows), default=rows)
            if size == rows or not rows:
                return function(*args, **inputs)
            padded = {
                name: np.concatenate([array, np.repeat(array[-1:], size - rows, axis=0)])
                for name, array in inputs.items()
            }
            return _each(
                function(*args, **padded), lambda outputs: _mapped(outputs, lambda array: array[:rows])
            )

        return run

    return decorate if function is None else decorate(function)


def group_by_keys(function: Function) -> Function:
    """Calls a function of requests once per distinct set of inputs."""
    return _grouping(_names_of)(function)


def group_by_values(*names: str) -> Callable[[Function], Function]:
    """Calls a function of requests once per distinct combination of values of some inputs.

    A request whose rows differ shares a call only with requests that have the same rows.

    Args:
        names: The inputs; a missing input counts as a value.
    """
    if not names:
        raise TypeError("group_by_values: name at least one input")

    def key(request: Request) -> object:
        return tuple(_value_of(request.get(name), request.rows is not None) for name in names)

    return _grouping(key)


def fill_optionals(**defaults: Any) -> Callable[[Function], Function]:
    """Adds inputs that requests leave out.

    Args:
        defaults: Values by input, without the batch dimension. A value that is not an array is converted to
            the input's datatype; a scalar fills the input's dims.
    """
    if not defaults:
        raise TypeError("fill_optionals: give at least one default, by the name of its input")
    unbound: dict[str, Array] = {}
    for name, default in defaults.items():
        with _naming(name):
            unbound[name] = encoded(listed(default))
    known: tuple[ModelContext | None, Mapping[str, Array]] = None, unbound

    def fitting() -> Mapping[str, Array]:
        nonlocal known
        context, arrays = known
        found = current_context()
        if found is not context:
            arrays = unbound if found is None else _fitting(defaults, unbound, found)
            known = found, arrays
        return arrays

    def filled(request: Request, arrays: Mapping[str, Array]) -> Request:
        missing = {name: array for name, array in arrays.items() if name not in request}
        if not missing:
            return request
        if request.rows is not None:
            rows = request.rows
            missing = {name: np.repeat(array[np.newaxis], rows, axis=0) for name, array in missing.items()}
        return request.with_more(missing)

    def decorate(function: Function) -> Function:
        @wraps(function)
        def run(*args: Any) -> Answers:
            *bound, requests = args
            arrays = fitting()
            return function(*bound, [filled(request, arrays) for request in requests])

        return run

    return decorate


def first_value(*names: str, scalars: bool = True, strict: bool = True) -> Callable[[Function], Function]:
    """Passes one value of some inputs to a function below `batch`, instead of one per row.

    Args:
        names: The inputs; missing ones are skipped.
        scalars: True if arrays of one element are passed as that element.
        strict: True if differing rows are an error; below `group_by_values` they do not differ.
    """
    if not names:
        raise TypeError("first_value: name at least one input")

    def decorate(function: Function) -> Function:
        @wraps(function)
        def run(*args: Any, **inputs: Any) -> Any:
            for name in names:
                array = inputs.get(name)
                if array is not None:
                    inputs[name] = _first(name, array, scalars, strict)
            return function(*args, **inputs)

        return run

    return decorate


def _grouping(key: Callable[[Request], object]) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        @wraps(function)
        def run(*args: Any) -> Answers:
            *bound, requests = args
            groups: dict[object, list[int]] = {}
            for place, request in enumerate(requests):
                groups.setdefault(key(request), []).append(place)
            answers: list[Any] = [None] * len(requests)
            streams: list[tuple[list[int], Iterator[Any]]] = []
            alone = len(groups) == 1
            for places in groups.values():
                group = [requests[place] for place in places]
                answered = _answer(partial(_settling, function, *bound, group), alone)
                if isinstance(answered, Exception):
                    answered = [answered] * len(places)
                if isinstance(answered, Iterator):
                    streams.append((places, answered))
                    continue
                for place, answer in zip(places, _counted(answered, len(places)), strict=True):
                    answers[place] = answer
            return _one_by_one(streams, answers) if streams else answers

        return run

    return decorate


def _names_of(request: Request) -> object:
    return frozenset(request)


def _one_by_one(
    streams: Iterable[tuple[list[int], Iterator[Any]]], answers: list[Any]
) -> Iterator[list[Any]]:
    """Results of generator groups, one group after the other."""
    if any(answer is not None for answer in answers):
        yield answers
    for places, stream in streams:
        failed = False
        while not failed and (answered := _next(stream, len(answers) == len(places))) is not _NOTHING:
            failed = isinstance(answered, Exception)
            if failed:
                answered = [answered] * len(places)
            placed = [None] * len(answers)
            for place, answer in zip(places, _counted(answered, len(places)), strict=True):
                placed[place] = answer
            yield placed


def _together(answers: Sequence[Any]) -> Iterator[list[Any]]:
    """Steps of several generators, one of each per round."""
    streams = [answer if isinstance(answer, Iterator) else iter([answer]) for answer in answers]
    alone = len(streams) == 1
    going = True
    while going:
        turn = [_next(stream, alone) for stream in streams]
        going = any(answer is not _NOTHING for answer in turn)
        if going:
            yield [None if answer is _NOTHING else answer for answer in turn]
        # A generator that raised has ended.
        streams = [
            iter(()) if isinstance(answer, Exception) else stream
            for answer, stream in zip(turn, streams, strict=True)
        ]


def _answer(ask: Callable[[], Any], alone: bool) -> Any:
    """The result of a call, or its exception if other requests share the batch."""
    try:
        return ask()
    except Exception as error:  # of user code
        if alone:
            raise
        return error


def _settling(function: Function, *args: Any) -> Any:
    return resolve_awaitable(function(*args))


def _next(stream: Iterator[Any], alone: bool) -> Any:
    """The next item of an iterator, or its exception; `_NOTHING` at the end."""
    return _answer(partial(next, stream, _NOTHING), alone)


def _each(returned: Any, change: Callable[[Outputs], Any]) -> Any:
    """Applies a change to a result, or to each item that a generator yields."""
    returned = resolve_awaitable(returned)
    if isinstance(returned, Iterator):
        return (change(outputs) for outputs in returned)
    return change(returned)


def _mapped(outputs: Outputs, change: Callable[[Array], Array]) -> Outputs:
    """Applies a change to each array, keeping the form of the outputs."""
    if outputs is None:
        return None
    if isinstance(outputs, Mapping):
        return {name: change(listed(array)) for name, array in outputs.items()}
    if isinstance(outputs, list | tuple):
        return [change(listed(array)) for array in outputs]
    return change(listed(outputs))


def _split(outputs: Outputs, rows: Sequence[int]) -> list[Outputs]:
    """Splits the outputs of a batch by request."""
    total = sum(rows)
    if outputs is None:
        return [None] * len(rows)

    def check(array: Array) -> Array:
        if not array.ndim or len(array) != total:
            raise ValueError(
                f"an output has shape {list(array.shape)}, but the inputs of the batch have {total} rows"
            )
        return array

    outputs = _mapped(answered_columns(outputs), check)
    answers = []
    start = 0
    for count in rows:
        part = slice(start, start + count)
        answers.append(_mapped(outputs, lambda array, part=part: array[part]))  # type: ignore[misc]
        start += count
    return answers


def _rows(request: Request) -> int:
    if request.rows is not None:
        return request.rows
    shape = request.shared(next(iter(request))).shape if request else ()
    return shape[0] if shape else 1


def _joined(requests: Sequence[Request]) -> dict[str, Array]:
    first = requests[0]
    if len(requests) == 1:
        return dict(first)
    for request in requests:
        if request.keys() != first.keys():
            raise ValueError(
                f"requests of a batch have different inputs, {sorted(first)} and {sorted(request)}: use "
                f"group_by_keys or fill_optionals above batch"
            )
    return {name: np.concatenate([request.shared(name) for request in requests]) for name in first}


def _counted(answers: Any, count: int) -> Sequence[Any]:
    if not isinstance(answers, Sequence) or len(answers) != count:
        found = f"{len(answers)} of them" if isinstance(answers, Sequence) else type(answers).__name__
        raise ValueError(f"a function of {count} requests must return a list of {count} answers, not {found}")
    return answers


def _value_of(array: Array | None, rows: bool) -> object:
    """A hashable key of an array's values; equal rows count once."""
    if array is None:
        return None
    if rows and len(array) and all(np.array_equal(row, array[0]) for row in array[1:]):
        array = array[:1]
    return (
        array.shape,
        array.dtype.str,
        tuple(array.ravel().tolist()) if array.dtype == object else array.tobytes(),
    )


def _first(name: str, array: Array, scalars: bool, strict: bool) -> Any:
    if strict and any(not np.array_equal(row, array[0]) for row in array[1:]):
        raise InvalidArgumentError(f"input '{name}' must have the same value in all rows of a batch")
    if not len(array):
        raise InvalidArgumentError(f"input '{name}' has no rows, but a value of it is needed")
    value = array[0]
    return value.reshape(-1)[0] if scalars and isinstance(value, np.ndarray) and value.size == 1 else value


def _fitting(
    defaults: Mapping[str, Any], unbound: Mapping[str, Array], context: ModelContext
) -> dict[str, Array]:
    """The defaults converted for the inputs of a model."""
    tensors = zip(context.inputs, context.input_datatypes, context.input_dims, strict=False)
    arrays = dict(unbound)
    for name, datatype, dims in tensors:
        if name in defaults:
            with _naming(name):
                arrays[name] = _fitted(array_of(defaults[name], datatype), datatype, dims)
    return arrays


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Names the input in errors about its default."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"fill_optionals: the default of input '{name}': {error}") from None


def _fitted(array: Array, datatype: str, dims: tuple[int, ...]) -> Array:
    found = datatype_of(array)
    if found != datatype:
        raise ValueError(f"it has datatype {found}, but the input's is {datatype}")
    if not array.ndim:
        return np.full([max(dim, 1) for dim in dims], array[()], array.dtype)
    if len(array.shape) != len(dims) or any(
        dim not in (-1, size) for dim, size in zip(dims, array.shape, strict=True)
    ):
        raise ValueError(f"it has shape {shape_text(array.shape)}, but the input's is {shape_text(dims)}")
    return array


def _usual_sizes() -> tuple[int, ...]:
    context = model_context()
    return (*context.preferred_batch_sizes, context.max_batch_size)

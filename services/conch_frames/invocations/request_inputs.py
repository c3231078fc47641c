"""Requests as the inputs of a model, in as many parts as its batches need; and outputs of parts. Pure.

Columns are found by name. Arrays of more dimensions than a column's are inputs by their own names, or the
only input. A model of one matrix gets its columns in the model's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.tensor import Array, Tensor
from conch_frames.column import EXACT_WHOLES
from conch_frames.column_rules import ColumnRule, ModelColumns, ModelInput
from conch_frames.conversion import Table, column_array, table_tensors
from conch_frames.frame_error import NO_ROWS, FrameError
from conch_frames.interface import FrameInterface
from conch_frames.invocations.request_body import FrameRequest

_MOST_REQUESTS = 1 << 14
"""Requests to a model for one from a client: as many as a model's queue takes by default."""


def request_tensors(request: FrameRequest, interface: FrameInterface) -> dict[str, Tensor]:
    """The inputs of a request.

    Raises:
        InvalidArgumentError: The request does not fit the model; the text names the input, or column and row.
    """
    columns, data = interface.columns, request.data
    if isinstance(data, Table) and _has_arrays(data, columns):
        data = data.columns
    if isinstance(data, Table):
        inputs = table_tensors(data, columns)
    elif isinstance(data, dict):
        inputs = _named(data, columns)
    else:
        inputs = _only(data, columns)
    for name, value in request.params.items():
        if name not in interface.params:
            raise InvalidArgumentError(f"params: model '{columns.model}' has no param '{name}'; remove it")
        values = value if isinstance(value, list) else [value]
        inputs[name] = array_tensor(values, interface.params[name])
    return inputs


def _has_arrays(table: Table, columns: ModelColumns) -> bool:
    """True if a column of a table of JSON is an input with more than one value for each row."""
    return any(
        name not in columns.rules and name in columns.inputs and isinstance(values, list) and not table.texts
        for name, values in table.columns.items()
    )


def _named(data: Mapping[str, Any], columns: ModelColumns) -> dict[str, Tensor]:
    """Inputs of arrays by name."""
    if columns.matrix is not None and columns.matrix.name not in data:
        return table_tensors(_as_table(data), columns)
    needed = [name for name, each in columns.inputs.items() if not each.optional]
    if len(needed) == 1 and needed[0] not in data and columns.by_position:
        return table_tensors(_as_table(data), columns)
    for name in needed:
        if name not in data:
            has = ", ".join(map(repr, data)) or "none"
            raise InvalidArgumentError(
                f"the request has no '{name}', an input of model '{columns.model}'; it has {has}"
            )
    return {
        name: array_tensor(data[name], each, columns.rules.get(name))
        for name, each in columns.inputs.items()
        if name in data
    }


def _as_table(data: Mapping[str, Any]) -> Table:
    for name, values in data.items():
        if not isinstance(values, list):
            raise FrameError(name, None, "it must be a list of one value for each row")
    return Table(data)


def _only(data: Any, columns: ModelColumns) -> dict[str, Tensor]:
    """The input of an array without a name."""
    needed = [each for each in columns.inputs.values() if not each.optional] or list(columns.inputs.values())
    if columns.matrix is None and len(needed) != 1:
        raise InvalidArgumentError(
            f"model '{columns.model}' has several inputs: name each of {', '.join(map(repr, columns.inputs))}"
        )
    only = columns.matrix or needed[0]
    tensor = array_tensor(data, only, columns.rules.get(only.name))
    if (
        len(only.dims) == 2
        and only.dims[1] > 1
        and (len(tensor.shape) != 2 or tensor.shape[1] != only.dims[1])
    ):
        raise InvalidArgumentError(
            f"'{only.name}' has shape {list(tensor.shape)}, and model '{columns.model}' needs rows of "
            f"{only.dims[1]} values"
        )
    return {only.name: tensor}


def array_tensor(values: Any, of: ModelInput, rule: ColumnRule | None = None) -> Tensor:
    """Nested lists as an input, by the rules of a column; with a dimension of 1 behind where one is missing.

    Raises:
        FrameError: The values are no regular array, or one does not fit.
    """
    flat, shape = _flattened(values, of)
    if rule is not None and not flat:
        raise FrameError(rule.name, None, NO_ROWS)
    rule = rule or ColumnRule(of.name, of.datatype, of.optional)
    try:
        made = column_array(flat, rule)
    except FrameError as error:
        if error.row is None or len(shape) < 2:
            raise
        raise FrameError(error.column, error.row * shape[0] // len(flat), error.reason) from None
    array = made.reshape(shape)
    if array.ndim + 1 == len(of.dims):
        array = array[..., np.newaxis]
    return Tensor(of.name, of.datatype, array.shape, None, np.ascontiguousarray(array).reshape(array.shape))


def _flattened(values: Any, of: ModelInput) -> tuple[Any, tuple[int, ...]]:
    """The elements of nested lists in order, and the shape."""
    if not isinstance(values, list):
        return [values], ()
    if not any(isinstance(each, list) for each in values):
        return values, (len(values),)
    try:
        array: Array = np.asarray(values, object if of.datatype == "BYTES" else None)
        if array.dtype.kind == "f" and np.abs(array).max(initial=0) >= EXACT_WHOLES["FP64"]:
            array = np.asarray(values, object)
    except (ValueError, OverflowError):
        raise FrameError(of.name, None, "its values are no regular array") from None
    if array.dtype.kind in "OU":
        elements = array.reshape(-1).tolist()
        if any(isinstance(each, list) for each in elements):
            raise FrameError(of.name, None, "its values are no regular array")
        return elements, array.shape
    return array.reshape(-1), array.shape


def split_rows(inputs: dict[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    """The inputs of requests of at most so many rows each; 0 for any number.

    Raises:
        InvalidArgumentError: They are too many requests.
    """
    rows = {each.shape[0] if each.shape else 0 for each in inputs.values()}
    if most <= 0 or len(rows) != 1 or max(rows) <= most:
        return [inputs]
    (count,) = rows
    if count > most * _MOST_REQUESTS:
        raise InvalidArgumentError(
            f"{count} rows are more than {_MOST_REQUESTS} requests of {most} rows, the most rows that the "
            f"model takes at once: send fewer rows"
        )
    arrays = {name: (tensor.datatype, tensor.numpy()) for name, tensor in inputs.items()}
    return [
        {
            name: Tensor.from_array(name, array[start : start + most], datatype)
            for name, (datatype, array) in arrays.items()
        }
        for start in range(0, count, most)
    ]


def joined_rows(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The outputs of several requests as those of one. Raises InternalError: their shapes don't fit."""
    try:
        return [
            Tensor.from_array(same[0].name, np.concatenate([each.numpy() for each in same]), same[0].datatype)
            for same in zip(*parts, strict=True)
        ]
    except ValueError as error:
        raise InternalError(f"the outputs of a model's batches can't be joined: {error}") from None

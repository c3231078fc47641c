"""Converts values of callers and functions to arrays, exactly or with an error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import NUMPY_DTYPES, Array
from conch_api.frames import is_missing
from conch_frames.column import EXACT_WHOLES
from conch_frames.column_rules import ModelColumns
from conch_frames.conversion import column_array

_WHOLE = {NUMPY_DTYPES[name].itemsize: most for name, most in EXACT_WHOLES.items()}
"""Whole numbers up to which a float has each, by its bytes."""


def array_of(value: Any, datatype: str | None) -> Array:
    """Converts a value to an array of a datatype.

    Whole numbers and booleans stay what they are, None becomes NaN. Fractions of a list may be rounded; an
    array of floats keeps its type unless the other one holds all of its values.

    Raises:
        ValueError: The values would become other ones.
    """
    wanted = NUMPY_DTYPES.get(datatype or "")
    if isinstance(value, np.ndarray):
        if wanted is None or wanted.kind == "O" or value.dtype == wanted or value.dtype.kind not in "biufO":
            return encoded(value)
        if value.dtype.kind == "f":
            return value.astype(wanted) if np.can_cast(value.dtype, wanted) else value
        return _numbers(value, wanted, datatype)
    if datatype == "BYTES":
        return encoded(np.asarray(value, object))  # numpy's string types drop trailing zeros
    array: Array = np.asarray(value)
    if wanted is None:
        return encoded(array)
    if array.dtype.kind == "f" and array.size and np.any(np.abs(array) >= _WHOLE[2]):
        array = np.asarray(value, object)  # some may have been whole numbers
    return _numbers(array, wanted, datatype)


def _numbers(array: Array, wanted: np.dtype[Any], datatype: str | None) -> Array:
    """Converts an array of booleans, numbers or objects."""
    if array.dtype.kind == "O":
        array = _known_numbers(array, wanted, datatype)
    if array.size and (array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and wanted.kind == "b")):
        raise ValueError(f"values of type {array.dtype} can't become {datatype}")
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(wanted)
    if not array.size:
        return made
    most = _WHOLE[wanted.itemsize] if wanted.kind == "f" else _WHOLE[8]
    if array.dtype.kind in "iu" and wanted.kind == "f":
        kept = (array <= most) & (array >= (-most if array.dtype.kind == "i" else 0))
    elif array.dtype.kind == "f" and wanted.kind == "f":
        kept = np.isfinite(array) == np.isfinite(made)  # a finite value must stay finite
    else:
        kept = (array == made) & (np.abs(array) < most if array.dtype.kind == "f" else True)
    if not np.all(kept):
        raise ValueError(f"{array[~kept].ravel()[0]} does not fit {datatype}")
    return made


def _known_numbers(array: Array, wanted: np.dtype[Any], datatype: str | None) -> Array:
    """Converts an array of objects that are numbers, or missing where floats are wanted."""
    elements: list[Any] = array.ravel().tolist()
    missing = [each is None or type(each).__name__ == "NAType" for each in elements]
    if any(missing) and wanted.kind != "f":
        raise ValueError(f"a value is missing, which {datatype} can't be")
    for each, lacks in zip(elements, missing, strict=True):
        if not lacks and not isinstance(each, (bool, int, float, np.bool_, np.integer, np.floating)):
            raise ValueError(f"it has an element of {type(each).__name__} among its numbers")
        if (
            isinstance(each, (int, np.integer))
            and wanted.kind == "f"
            and abs(int(each)) > _WHOLE[wanted.itemsize]
        ):
            raise ValueError(f"{each} does not fit {datatype}, which has each whole number only below it")
    numbers = [math.nan if lacks else each for each, lacks in zip(elements, missing, strict=True)]
    return np.asarray(numbers).reshape(array.shape)


def input_array(name: str, value: Any, datatype: str | None) -> Array:
    """Converts an input."""
    try:
        return array_of(value, datatype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(f"input '{name}' can't be made an array: {error}") from None


def is_flat(value: Any) -> bool:
    """True for a value of one dimension: a list of plain values, or such an array."""
    if isinstance(value, list | tuple):
        return not (value and isinstance(value[0], list | tuple | np.ndarray))
    return getattr(value, "ndim", 0) == 1


def is_scalar(value: Any) -> bool:
    """True for a plain value, None among them."""
    return not isinstance(value, list | tuple) and getattr(value, "ndim", 0) == 0


def column_input(name: str, value: Any, datatype: str, columns: ModelColumns) -> Array:
    """Converts a value for each row, as the column of a frame.

    Raises:
        InvalidArgumentError: A value does not fit.
    """
    rule = columns.rules.get(name)
    if rule is None or datatype not in NUMPY_DTYPES:
        return as_column(input_array(name, value, "FP32" if datatype == "BF16" else datatype))
    values = value if isinstance(value, np.ndarray) and value.dtype.kind != "O" else list(value)
    if datatype == "BYTES":
        values = [None if is_missing(each) else each for each in values]  # pandas' null is NaN
    return as_column(column_array(values, rule))


def as_column(array: Array) -> Array:
    """Gives a value for each row a dim of its own."""
    return array[:, np.newaxis] if array.ndim == 1 else array


def as_sample(array: Array, dims: Sequence[int]) -> Array:
    """Gives a single value the dims of an input that may have one element."""
    if array.ndim or any(dim not in (1, -1) for dim in dims):
        return array
    return array.reshape((1,) * len(dims))


def listed(value: Any) -> Array:
    """As `np.asarray`, but strings in lists stay objects of their own length."""
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    return np.asarray(value, object if isinstance(first, bytes | str) else None)


def encoded(array: Array) -> Array:
    """Converts string elements to objects of `bytes`; numbers stay."""
    if array.dtype.kind not in "SUO":
        return array
    elements = array.ravel().tolist()
    if array.dtype.kind == "O" and all(type(element) is bytes for element in elements):
        return array
    texts = np.empty(len(elements), object)
    texts[:] = [_bytes(element) for element in elements]
    return texts.reshape(array.shape)


def _bytes(element: Any) -> bytes:
    if isinstance(element, bytes):
        return bytes(element)
    if isinstance(element, str):
        return element.encode()
    raise ValueError(f"it has an element of {type(element).__name__} among its strings")

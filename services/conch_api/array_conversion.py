"""Converts values of callers and functions to arrays, exactly or with an error."""

from __future__ import annotations

from typing import Any

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import NUMPY_DTYPES, Array


def array_of(value: Any, datatype: str | None) -> Array:
    """Converts a value to an array of a datatype; an array keeps its type, except for strings."""
    if isinstance(value, np.ndarray):
        return encoded(value)
    if datatype == "BYTES":
        return encoded(np.asarray(value, object))  # numpy's string types drop trailing zeros
    array: Array = np.asarray(value)
    wanted = NUMPY_DTYPES.get(datatype or "")
    if wanted is None or array.dtype == wanted:
        return encoded(array)
    if array.size and array.dtype.kind not in ("biuf" if wanted.kind == "f" else "biu"):
        raise ValueError(f"values of type {array.dtype} can't become {datatype}")
    with np.errstate(over="ignore"):
        made = array.astype(wanted)
    if array.size:
        # Rounding is accepted, but a finite value must stay finite.
        kept = np.isfinite(array) == np.isfinite(made) if wanted.kind == "f" else array == made
        if not np.all(kept):
            raise ValueError(f"not all of its values fit {datatype}")
    return made


def input_array(name: str, value: Any, datatype: str | None) -> Array:
    """Converts an input."""
    try:
        return array_of(value, datatype)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"input '{name}' can't be made an array: {error}") from None


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

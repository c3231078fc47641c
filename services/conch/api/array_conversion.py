"""What becomes an array of what callers and functions give: the values that they mean, or an error."""

from __future__ import annotations

from typing import Any

import numpy as np

from conch.core.errors import InvalidArgumentError
from conch.core.tensor import NUMPY_DTYPES, Array


def array_of(value: Any, datatype: str | None) -> Array:
    """An array of a datatype; one that is an array already stays what it is, but for strings.

    Args:
        value: What is to be one.
        datatype: Protocol name of the elements' type; None for what numpy finds.

    Raises:
        ValueError: It can't be one, or its values would become others.
    """
    if isinstance(value, np.ndarray):
        return encoded(value)
    if datatype == "BYTES":
        return encoded(np.asarray(value, object))  # no string type of numpy's: those end where zeros begin
    array: Array = np.asarray(value)
    wanted = NUMPY_DTYPES.get(datatype or "")
    if wanted is None or array.dtype == wanted:
        return encoded(array)
    if array.size and array.dtype.kind not in ("biuf" if wanted.kind == "f" else "biu"):
        raise ValueError(f"values of type {array.dtype} can't become {datatype}")
    with np.errstate(over="ignore"):
        made = array.astype(wanted)
    if array.size:
        # Floats may be rounded, but what is finite must not become infinite.
        kept = np.isfinite(array) == np.isfinite(made) if wanted.kind == "f" else array == made
        if not np.all(kept):
            raise ValueError(f"not all of its values fit {datatype}")
    return made


def input_array(name: str, value: Any, datatype: str | None) -> Array:
    """An input's array; see `array_of`.

    Raises:
        InvalidArgumentError: It can't be one.
    """
    try:
        return array_of(value, datatype)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"input '{name}' can't be made an array: {error}") from None


def listed(value: Any) -> Array:
    """As numpy makes an array, but strings in lists stay objects of their own length."""
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    return np.asarray(value, object if isinstance(first, bytes | str) else None)


def encoded(array: Array) -> Array:
    """An array with its strings, if it has such, as objects of `bytes`; numbers stay.

    Raises:
        ValueError: There are other objects.
    """
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

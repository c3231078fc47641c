"""Tensors from the elements of a JSON array."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from math import prod
from typing import Any, Final

import numpy as np

from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.tensor import ELEMENT_SIZES, NUMPY_DTYPES, Array, Buffer, Tensor, encode_bytes
from conch.core.validation import shape_text
from conch.frontends.http.jsontext.json_scanner import MOST_DEPTH, JsonDepthError
from conch.frontends.http.jsontext.json_values import WINDOW, BulkArray, flattened
from conch.frontends.http.jsontext.json_values import array as read_array
from conch.frontends.yield_gil import yield_gil

_MOST_ELEMENTS: Final = 2**63 - 1
_DATATYPES = frozenset(ELEMENT_SIZES.keys() - {"FP16", "BF16"} | {"BYTES"})
"""Datatypes with a JSON form."""
_CODES = {"FP32": "f", "FP64": "d"}
_NUMBERS = frozenset((int, float))
_SIGNED = frozenset(("INT8", "INT16", "INT32", "INT64"))
_LONG_STRING = 1 << 20
_TOO_MANY = "Unable to parse 'data': Shape does not match true shape of 'data' field"
_TOO_FEW = "Failed to parse 'data' field: shape does not match true shape"
_NO_NUMBER = "Unable to parse 'data': attempt to access JSON non-number as double"
_KIND_NAMES: dict[Any, str] = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number with a fraction",
    type(None): "null",
}
_WRONG_STRING = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"


def _check_size(name: str, datatype: str, shape: tuple[int, ...], most_bytes: int) -> None:
    """Checks the size of a tensor sent as JSON.

    Raises:
        InvalidArgumentError: It is too large; texts are Triton's.
    """
    if shape and max(shape) > _MOST_ELEMENTS:
        raise InvalidArgumentError(
            f"invalid shape for input '{name}': shape {shape_text(shape)} contains one or more invalid "
            f"dimensions"
        )
    count = prod(shape)
    if count > _MOST_ELEMENTS:
        raise InvalidArgumentError(
            f"invalid shape for input '{name}': shape {shape_text(shape)} causes total element count to "
            f"exceed maximum size of {_MOST_ELEMENTS}"
        )
    size = ELEMENT_SIZES.get(datatype, 1)
    if count * size > _MOST_ELEMENTS:
        raise InvalidArgumentError(
            f"byte size overflow for input '{name}': element count ({count}) * data type size ({size}) "
            f"exceeds maximum allowed size ({_MOST_ELEMENTS})"
        )
    if count * size > most_bytes and datatype != "BYTES":
        raise InvalidArgumentError(
            f"JSON input '{name}' has a byte_size ({count * size} bytes) that exceeds the maximum allowed "
            f"value of {most_bytes} bytes. Use --http-max-input-size to increase the limit."
        )


class _WrongElementsError(Exception):
    """The elements do not fit the tensor; `text` is Triton's."""

    def __init__(self, text: str, expected: str, got: str) -> None:
        super().__init__(text)
        self.text = text
        self.expected = expected
        self.got = got


def json_tensor(
    name: str, datatype: str, shape: tuple[int, ...], data: Any, most_bytes: int = sys.maxsize
) -> Tensor:
    """Returns a tensor from its JSON elements, however they are nested.

    Raises:
        JsonAccessError: The data is no array.
        InternalError: The number or type of the elements is wrong; texts begin with Triton's.
        InvalidArgumentError: It is too large, or nested too deep, or JSON has nothing for its datatype.
    """
    if datatype in ("FP16", "BF16") and 0 not in shape:
        raise InvalidArgumentError(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for "
            f"input {name}"
        )
    given = data if type(data) is list else read_array(data)
    count = prod(shape)
    if not 0 < count * ELEMENT_SIZES.get(datatype, 1) <= most_bytes:
        _check_size(name, datatype, shape, most_bytes)
    if not count or datatype not in _DATATYPES:
        return Tensor(name, datatype, shape, b"")  # the model's check reports the error
    code = _CODES.get(datatype)
    # Fast path for flat numbers; nested or wrong elements take the careful path, `_bytes`. Test of both:
    # tests/conch/unit/http/test_infer_request.py.
    if (
        code is not None
        and type(given) is list
        and len(given) == count
        and _NUMBERS.issuperset(map(type, given))
    ):
        try:
            return Tensor(name, datatype, shape, memoryview(array(code, given)).cast("B"))
        except OverflowError:
            pass  # a large integer, which numpy may still round
    try:
        return Tensor(name, datatype, shape, _bytes(given, datatype, count))
    except _WrongElementsError as wrong:
        raise InternalError(
            f"{wrong.text}: input '{name}' expects {wrong.expected}, got {wrong.got}"
        ) from None


def _bytes(given: list[Any] | BulkArray, datatype: str, count: int) -> Buffer:
    if isinstance(given, BulkArray):
        # Each piece is freed once it is read: freeing all at once would stall other threads.
        pieces, depth = given.release(), given.depth
    else:
        flat, depth = flattened(given)
        pieces = [flat]
    if depth > MOST_DEPTH:
        raise JsonDepthError
    if datatype == "BYTES":
        joined = bytearray()  # grows in steps; joining at once would hold the GIL
        for part in _parts(pieces):
            joined += _strings(part)
        return joined
    filled = 0
    whole = np.empty(count, NUMPY_DTYPES[datatype])
    for part in _parts(pieces):
        converted = _converted(part, datatype)
        if filled + len(converted) > count:
            raise _WrongElementsError(_TOO_MANY, f"{count} elements", "more")
        whole[filled : filled + len(converted)] = converted
        filled += len(converted)
    if filled < count:
        raise _WrongElementsError(_TOO_FEW, f"{count} elements", str(filled))
    return whole.data.cast("B") if count else b""


def _parts(pieces: list[list[Any] | Array]) -> Iterator[list[Any] | Array]:
    """Removes pieces from a list, the last first, and yields them in parts; yields the GIL between them."""
    done = 0
    while pieces:
        piece = pieces.pop()
        for start in range(0, len(piece), WINDOW):
            if done >= WINDOW:
                done = 0
                yield_gil()
            part = piece[start : start + WINDOW]
            yield part
            done += len(part)


def _converted(part: list[Any] | Array, datatype: str) -> Array:
    """Converts elements to an array of a datatype; integers are truncated to its width, as in Triton."""
    kinds: set[Any]
    kinds = set(map(type, part)) if isinstance(part, list) else {int if part.dtype.kind == "i" else float}
    dtype = NUMPY_DTYPES[datatype]
    if datatype == "BOOL":
        if kinds - {bool}:
            raise _wrong_type(datatype, "boolean", kinds - {bool})
        return np.array(part, dtype)
    if datatype in _CODES:
        if kinds - {int, float}:
            raise _WrongElementsError(_NO_NUMBER, datatype, _kind_names(kinds - {int, float}))
        with np.errstate(over="ignore"):  # too large numbers become infinite
            return np.array(part, np.float64).astype(dtype)
    signed = datatype in _SIGNED
    accessed = "signed-integer" if signed else "unsigned-integer"
    if kinds - {int}:
        raise _wrong_type(datatype, accessed, kinds - {int})
    if not signed and len(part) and np.min(part) < 0:
        raise _wrong_type(datatype, accessed, "a negative integer")
    try:
        return np.array(part, np.int64 if signed else np.uint64).astype(dtype)
    except OverflowError:
        raise _wrong_type(datatype, accessed, "an integer that is too large") from None


def _wrong_type(datatype: str, accessed: str, got: set[Any] | str) -> _WrongElementsError:
    text = f"Unable to parse 'data': attempt to access JSON non-{accessed} as {accessed}"
    return _WrongElementsError(text, datatype, got if isinstance(got, str) else _kind_names(got))


def _kind_names(kinds: set[Any]) -> str:
    """JSON names of Python types."""
    return " and ".join(sorted({_KIND_NAMES.get(kind, "an object") for kind in kinds}))


def _strings(part: list[Any] | Array) -> bytes:
    if not isinstance(part, list):
        raise _WrongElementsError(_WRONG_STRING, "BYTES", "a number")
    kinds = set(map(type, part)) - {str}
    if kinds:
        raise _WrongElementsError(_WRONG_STRING, "BYTES", _kind_names(kinds))
    return encode_bytes([_encoded(element) for element in part])


def _encoded(element: str) -> bytes:
    if len(element) <= _LONG_STRING:
        return element.encode("utf-8", "surrogateescape")
    slices = range(0, len(element), _LONG_STRING)
    return b"".join(
        [element[start : start + _LONG_STRING].encode("utf-8", "surrogateescape") for start in slices]
    )

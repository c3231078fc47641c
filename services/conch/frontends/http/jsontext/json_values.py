"""Typed access to JSON values, and long JSON arrays parsed in pieces.

orjson parses as many whole elements as fit into a window. It holds the GIL, so the window bounds the wait of
other threads. Pieces are flat, and hold numbers in arrays: millions of objects would take long to free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import orjson

from conch.core.errors import InternalError
from conch.core.tensor import Array, Buffer
from conch.frontends.yield_gil import yield_gil

T = TypeVar("T")


class JsonAccessError(InternalError):
    """A value is missing or of the wrong type. A client error, with Triton's status."""


def member(value: Any, name: str) -> Any:
    """Returns a member of an object.

    Raises:
        JsonAccessError: There is no such member, or the value is not an object.
    """
    if not isinstance(value, dict) or name not in value:
        raise JsonAccessError(f"attempt to access non-existing object member '{name}'")
    return value[name]


def parsed(read: Callable[[Any], T], value: Any, name: str, what: str = "parse") -> T:
    """Reads the value of a member. Raises JsonAccessError, which names the member: it has another type."""
    try:
        return read(value)
    except JsonAccessError as error:
        raise JsonAccessError(f"Unable to {what} '{name}': {error.message}") from None


def parsed_member(read: Callable[[Any], T], value: Any, name: str) -> T:
    """Reads a member of an object; raises as `parsed`, also if there is none."""
    try:
        return read(member(value, name))
    except JsonAccessError as error:
        raise JsonAccessError(f"Unable to parse '{name}': {error.message}") from None


def text(value: Any) -> str:
    """Returns a string; invalid UTF-8 in it is replaced."""
    if not isinstance(value, str):
        raise JsonAccessError("attempt to access JSON non-string as string")
    if value.isascii():
        return value
    if len(value) <= WINDOW:
        return _readable(value)
    parts = []
    for start in range(0, len(value), WINDOW):
        parts.append(_readable(value[start : start + WINDOW]))
        yield_gil()
    return "".join(parts)


def _readable(value: str) -> str:
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def boolean(value: Any) -> bool:
    """Returns a boolean."""
    if not isinstance(value, bool):
        raise JsonAccessError("attempt to access JSON non-boolean as boolean")
    return value


def unsigned(value: Any) -> int:
    """Returns an unsigned integer."""
    if type(value) is not int or value < 0:
        raise JsonAccessError("attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value


def array(value: Any) -> list[Any] | BulkArray:
    """Returns an array."""
    if not isinstance(value, list | BulkArray):
        raise JsonAccessError("attempt to access JSON non-array as array")
    return value


def elements(value: Any) -> list[Any]:
    """Returns an array, which is expected to be short, as a list."""
    return value if isinstance(value, list) else flattened(array(value))[0]


WINDOW = 64 * 1024
"""Bytes parsed at once."""

_SPACE = re.compile(rb"[ \t\r\n]*")
_NUMBERS = re.compile(rb"[-+0-9.eE, \t\r\n\[\]NaInfity]+")
_STRINGS = re.compile(rb'(?:[ \t\r\n]*"[^"\\\x00-\x1f]*(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*)*"[ \t\r\n]*,)+')
_WORDS = re.compile(rb"(?:[ \t\r\n]*(?:true|false|null)[ \t\r\n]*,)+")
_LEAST = 32
_WINDOWS_BETWEEN = 2


class BulkArray:
    """A long array: its elements in pieces, those of nested arrays flattened.

    Attributes:
        pieces: Lists, or arrays of 64-bit numbers.
        depth: Nesting depth; 1 without nested arrays.
        closes: True if the pieces include the array's end.
        flat: True if nested arrays stay elements, and NaN and infinities are left to the scanner.
    """

    __slots__ = ("_last", "closes", "depth", "flat", "pieces")

    def __init__(self, flat: bool = False) -> None:
        self.flat = flat
        self.pieces: list[list[Any] | Array] = []
        self.depth = 1
        self.closes = False
        self._last: list[Any] | None = None

    @property
    def taken(self) -> bool:
        """True if it has pieces."""
        return bool(self.pieces)

    def __len__(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    def release(self) -> list[list[Any] | Array]:
        """Returns its pieces, the last first, and empties it."""
        pieces, self.pieces, self._last = self.pieces[::-1], [], None
        return pieces

    def append(self, value: Any) -> None:
        """Adds one element."""
        flat, depth = ([value], 0) if self.flat else flattened(value)
        self.depth = max(self.depth, depth + 1)
        if self._last is None or len(self._last) > WINDOW:
            self._last = []
            self.pieces.append(self._last)
        self._last += flat

    def extend(self, other: BulkArray) -> None:
        """Adds the pieces of another array."""
        self.pieces += other.pieces
        self.depth = max(self.depth, other.depth)
        self._last = None

    def add(self, elements: list[Any], depth: int) -> None:
        """Adds a piece of elements nested `depth` deep; 1 if they are flat."""
        self._last = None
        self.depth = max(self.depth, depth)
        if depth > 1:
            elements = flattened(elements)[0]
        self.pieces.append(_compact(elements))


def flattened(value: Any) -> tuple[list[Any], int]:
    """Flattens nested arrays; returns the elements and the depth, 0 for a scalar."""
    if isinstance(value, BulkArray):
        return [element for piece in value.pieces for element in _elements(piece)], value.depth
    if not isinstance(value, list):
        return [value], 0
    depth = 1
    while True:
        kinds = set(map(type, value))
        if list not in kinds and BulkArray not in kinds:
            return value, depth
        if kinds != {list}:
            flat, more = _walked(value)
            return flat, depth + more
        value = list(chain.from_iterable(value))
        depth += 1


def _walked(value: list[Any]) -> tuple[list[Any], int]:
    """As `flattened`, for arrays mixed with scalars: visits each element once."""
    flat: list[Any] = []
    deepest = 0
    open_arrays = [iter(value)]
    while open_arrays:
        for each in open_arrays[-1]:
            if isinstance(each, list):
                deepest = max(deepest, len(open_arrays))
                open_arrays.append(iter(each))
                break
            if isinstance(each, BulkArray):
                deepest = max(deepest, len(open_arrays) - 1 + each.depth)
                flat += flattened(each)[0]
            else:
                flat.append(each)
        else:
            open_arrays.pop()
    return flat, deepest


def _elements(piece: list[Any] | Array) -> list[Any]:
    return piece if isinstance(piece, list) else piece.tolist()


def _compact(elements: list[Any]) -> list[Any] | Array:
    kinds = set(map(type, elements))
    if kinds == {float}:
        return np.array(elements, np.float64)
    if kinds == {int}:
        try:
            return np.array(elements, np.int64)
        except OverflowError:
            return elements
    return elements


def take_elements(text: Buffer, position: int, array: BulkArray) -> int:
    """Adds the simple elements from a position of a text to `array`, at most up to the array's end.

    Returns:
        The position of the next element, or behind the array if it `closes`.
    """
    windows = 0
    while True:
        windows += 1
        if not windows % _WINDOWS_BETWEEN:
            yield_gil()
        taken = _take_window(text, position, array)
        if taken == position or array.closes:
            return taken
        found = _SPACE.match(text, taken)
        assert found is not None
        position = found.end()


def _take_window(text: Buffer, position: int, array: BulkArray) -> int:
    most = min(position + WINDOW, len(text))
    byte = text[position] if position < most else 0
    if byte == 0x22:
        return _take_run(_STRINGS, text, position, most, array)
    if byte in b"tfn":
        return _take_run(_WORDS, text, position, most, array)
    found = _NUMBERS.match(text, position, most)
    if found is None:
        return position
    run = found.group()
    if array.flat and b"[" in run:
        run = run[: run.index(b"[")]
    if b"]" not in run and b"[" not in run:
        cut = run.rfind(b",")
        return _take(run[:cut], position, cut + 1, 1, array) if cut >= _LEAST else position
    levels = np.frombuffer(run, np.uint8)
    depth = np.cumsum((levels == 0x5B).astype(np.int32) - (levels == 0x5D))
    beyond = np.flatnonzero(depth < 0)
    if beyond.size:
        cut = int(beyond[0])
        if cut < _LEAST:
            return position
        deepest = int(depth[:cut].max(initial=0)) + 1
        taken = _take(run[:cut], position, cut + 1, deepest, array)
        array.closes = taken != position
        return taken
    commas = np.flatnonzero((levels == 0x2C) & (depth == 0))
    if not commas.size:
        return position
    cut = int(commas[-1])
    return _take(run[:cut], position, cut + 1, int(depth[:cut].max(initial=0)) + 1, array)


def _take_run(pattern: re.Pattern[bytes], text: Buffer, position: int, most: int, array: BulkArray) -> int:
    found = pattern.match(text, position, most)
    if found is None or found.end() - position < _LEAST:
        return position
    return _take(found.group()[:-1], position, found.end() - position, 1, array)


def _take(part: bytes, position: int, length: int, depth: int, array: BulkArray) -> int:
    """Parses whole elements; on failure takes none, and the scanner finds the error."""
    whole = b"[%b]" % part
    try:
        elements = orjson.loads(whole)
    except orjson.JSONDecodeError:
        if array.flat or (b"N" not in part and b"I" not in part):
            return position
        try:
            elements = json.loads(whole)  # accepts NaN and Infinity
        except (ValueError, RecursionError):
            return position
    if not elements:
        return position
    array.add(elements, depth)
    return position + length

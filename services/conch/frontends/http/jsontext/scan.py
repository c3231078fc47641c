"""An iterative JSON parser with the rules and the error texts of the parser that Triton uses.

It differs from others in what it takes (``NaN``, ``Inf``, ``Infinity``, bytes that are no UTF-8, a text that
ends at a NUL) and in what counts as an integer. Nesting costs memory, never stack. Long arrays are parsed in
pieces by a faster parser, each small enough not to hold up other threads.
"""

from __future__ import annotations

import re
from typing import Any, Final

from conch.core.tensor import Buffer
from conch.frontends.http.jsontext.bulk import WINDOW, BulkArray, take_elements
from conch.frontends.http.jsontext.errors import JsonSyntaxError
from conch.frontends.http.jsontext.strings import read_string

INT64_LEAST: Final = -(2**63)
UINT64_MOST: Final = 2**64 - 1

_SPACE = re.compile(rb"[ \t\r\n]*")
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(\.[0-9]*)?([eE][-+]?[0-9]*)?")
_WORDS: dict[bytes, Any] = {
    b"true": True,
    b"false": False,
    b"null": None,
    b"NaN": float("nan"),
    b"Infinity": float("inf"),
    b"Inf": float("inf"),
}
_FIRST = {0x74: (b"true",), 0x66: (b"false",), 0x6E: (b"null",), 0x4E: (b"NaN",), 0x49: (b"Infinity", b"Inf")}
_BULK_FROM = 64
_ELEMENTS_BETWEEN = 32
_OPENED: Final = object()
"""Stands for a value that is still to come."""


def scan(text: Buffer) -> Any:
    """Parses a text.

    Strings are decoded with ``surrogateescape``. Of members with the same name the first counts. Long arrays
    come as `BulkArray`.

    Raises:
        JsonSyntaxError: It is no JSON.
    """
    return _Scanner(text).document()


class _Scanner:
    """The state of one parse: the text, where it is, and the containers that are open."""

    def __init__(self, text: Buffer) -> None:
        self._text = text
        self._end = len(text)
        # Open containers, the innermost last; those of objects with the name of the member to come.
        self._stack: list[tuple[dict[str, Any] | list[Any] | BulkArray, str]] = []
        self._next_bulk = 0
        self._pause = 0
        self._position = 3 if text[:3] == b"\xef\xbb\xbf" else 0

    def document(self) -> Any:
        """The only value of the text."""
        self._space()
        if self._peek() == 0:
            raise JsonSyntaxError("The document is empty.", self._position)
        stack = self._stack
        value = self._value()
        while stack:
            value = self._ended(value) if value is not _OPENED else self._value()
        self._space()
        if self._peek() != 0:
            raise JsonSyntaxError("The document root must not be followed by other values.", self._position)
        return value

    def _value(self) -> Any:
        """The value that begins here; `_OPENED` for a container whose first value is due now."""
        byte = self._peek()
        if byte == 0x7B:
            self._position += 1
            self._space()
            if self._peek() == 0x7D:
                self._position += 1
                return {}
            self._stack.append(({}, self._name()))
            return _OPENED
        if byte != 0x5B:
            return self._scalar(byte)
        self._position += 1
        self._space()
        if self._peek() == 0x5D:
            self._position += 1
            return []
        bulk = self._bulk()
        if bulk is not None and bulk.closes:
            return bulk
        self._stack.append(([] if bulk is None else bulk, ""))
        return _OPENED

    def _ended(self, value: Any) -> Any:
        """Puts a value into the innermost container; gives the container if it ends, else `_OPENED`."""
        container, name = self._stack[-1]
        self._space()
        byte = self._peek()
        if isinstance(container, dict):
            container.setdefault(name, value)
            if byte == 0x2C:
                self._position += 1
                self._space()
                self._stack[-1] = (container, self._name())
                return _OPENED
            if byte != 0x7D:
                raise JsonSyntaxError("Missing a comma or '}' after an object member.", self._position)
        else:
            container.append(value)
            if byte == 0x2C:
                self._position += 1
                self._space()
                return self._more(container)
            if byte != 0x5D:
                raise JsonSyntaxError("Missing a comma or ']' after an array element.", self._position)
        self._position += 1
        self._stack.pop()
        return container

    def _more(self, container: list[Any] | BulkArray) -> Any:
        """Goes on with an array behind a comma."""
        if isinstance(container, list) and len(container) % _ELEMENTS_BETWEEN:
            return _OPENED
        more = self._bulk()
        if more is None:
            return _OPENED
        array = BulkArray()
        if isinstance(container, list):
            for element in container:
                array.append(element)
        else:
            array = container
        array.extend(more)
        _, name = self._stack.pop()
        if more.closes:
            return array
        self._stack.append((array, name))
        return _OPENED

    def _bulk(self) -> BulkArray | None:
        """Takes as many elements as can be had at once; the position is behind a comma or a bracket then."""
        if self._end - self._position < _BULK_FROM or self._position < self._next_bulk:
            return None
        array = BulkArray()
        self._position = take_elements(self._text, self._position, array)
        if array.taken:
            self._pause = 0
            if not array.closes:
                self._space()
            return array
        # Looked at a whole window in vain: with arrays nested in arrays that would be so at each of them.
        self._next_bulk = self._position + self._pause
        self._pause = min(self._pause * 2 + 16, WINDOW)
        return None

    def _peek(self) -> int:
        return self._text[self._position] if self._position < self._end else 0

    def _space(self) -> None:
        found = _SPACE.match(self._text, self._position)
        assert found is not None
        self._position = found.end()

    def _name(self) -> str:
        if self._peek() != 0x22:
            raise JsonSyntaxError("Missing a name for object member.", self._position)
        name, self._position = read_string(self._text, self._position)
        self._space()
        if self._peek() != 0x3A:
            raise JsonSyntaxError("Missing a colon after a name of object member.", self._position)
        self._position += 1
        self._space()
        return name

    def _scalar(self, byte: int) -> Any:
        if byte == 0x22:
            text, self._position = read_string(self._text, self._position)
            return text
        words = _FIRST.get(byte)
        if words is not None:
            return _WORDS[self._word(words)]
        return self._number(byte)

    def _word(self, words: tuple[bytes, ...]) -> bytes:
        for word in words:
            if self._text[self._position : self._position + len(word)] == word:
                self._position += len(word)
                return word
        # The position of the first byte that is wrong.
        word = words[0]
        position = self._position
        for expected in word:
            if position >= self._end or self._text[position] != expected:
                break
            position += 1
        raise JsonSyntaxError("Invalid value.", position)

    def _number(self, byte: int) -> int | float:
        start = self._position
        found = _NUMBER.match(self._text, start)
        if found is None:
            if byte == 0x2D:
                words = _FIRST.get(self._text[start + 1] if start + 1 < self._end else 0, ())
                self._position += 1
                if words and words[0] in (b"NaN", b"Infinity"):
                    return -float(_WORDS[self._word(words)])
            raise JsonSyntaxError("Invalid value.", self._position)
        fraction, exponent = found.groups()
        if fraction == b".":
            raise JsonSyntaxError("Miss fraction part in number.", found.end(1))
        if exponent is not None and exponent[-1] not in b"0123456789":
            raise JsonSyntaxError("Miss exponent in number.", found.end())
        self._position = found.end()
        digits = found.group()
        if fraction is None and exponent is None and len(digits) <= 20:
            whole = int(digits)
            if INT64_LEAST <= whole <= UINT64_MOST:
                return whole
        number = float(digits)
        if number in (float("inf"), float("-inf")):
            raise JsonSyntaxError("Number too big to be stored in double.", start)
        return number

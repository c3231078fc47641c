"""Iterative JSON parser with the rules and error texts of Triton's parser (RapidJSON).

Unlike other parsers it accepts ``NaN``, ``Inf``, ``Infinity`` and invalid UTF-8, ends a text at a NUL, and
has its own rule for integers. Nesting uses memory, never the stack. A faster parser reads long arrays in
pieces that are short enough to let other threads run. The limits on depth and members apply while parsing, so
that a hostile text costs no more than a valid one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import orjson

from conch.core.errors import InternalError, InvalidArgumentError
from conch.core.tensor import Buffer
from conch.frontends.http.jsontext.json_values import WINDOW, BulkArray, take_elements
from conch.frontends.yield_gil import yield_gil

_PLAIN = re.compile(rb'[^"\\\x00-\x1f]{0,65536}')
_ESCAPED_RUN = re.compile(
    rb'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})+"
)
_ESCAPED_WINDOW = 16 * 1024
_HEX = re.compile(rb"[0-9a-fA-F]{4}")
_ESCAPES = {
    0x22: b'"',
    0x5C: b"\\",
    0x2F: b"/",
    0x62: b"\b",
    0x66: b"\f",
    0x6E: b"\n",
    0x72: b"\r",
    0x74: b"\t",
}


def read_string(text: Buffer, position: int) -> tuple[str, int]:
    """Reads a string.

    Args:
        text: A JSON text.
        position: Position of its opening quotation mark.

    Returns:
        The string, and the position behind it. Invalid UTF-8 is decoded with ``surrogateescape``.

    Raises:
        JsonSyntaxError: It is not a valid string.
    """
    position += 1
    parts: list[str] = []
    pending = b""  # bytes of a character that the last piece has cut
    end = len(text)
    while True:
        found = _PLAIN.match(text, position)
        assert found is not None
        piece = pending + found.group()
        position = found.end()
        byte = text[position] if position < end else 0
        if byte == 0x22:
            parts.append(piece.decode("utf-8", "surrogateescape"))
            return "".join(parts) if len(parts) > 1 else parts[0], position + 1
        if byte == 0x5C:
            parts.append(piece.decode("utf-8", "surrogateescape"))
            pending = b""
            escaped, position = _escape(text, position)
            parts.append(escaped)
        elif byte == 0:
            reason = "Missing a closing quotation mark in string."
            if position < end:
                reason = "Invalid encoding in string."
            raise JsonSyntaxError(reason, position)
        elif byte < 0x20:
            raise JsonSyntaxError("Invalid escape character in string.", position)
        else:
            whole = _whole_characters(piece)
            parts.append(piece[:whole].decode("utf-8", "surrogateescape"))
            pending = piece[whole:]


def _escape(text: Buffer, start: int) -> tuple[str, int]:
    """Reads escapes, many at once if they are simple; returns their text and the position behind them."""
    run = _ESCAPED_RUN.match(text, start, start + _ESCAPED_WINDOW)
    if run is not None:
        try:
            escaped: str = orjson.loads(b'"%b"' % run.group())
        except orjson.JSONDecodeError:
            pass  # not UTF-8, or the window cuts a character
        else:
            return escaped, run.end()
    byte = text[start + 1] if start + 1 < len(text) else 0
    plain = _ESCAPES.get(byte)
    if plain is not None:
        return plain.decode(), start + 2
    if byte != 0x75:
        raise JsonSyntaxError("Invalid escape character in string.", start)
    code = _hex(text, start, start + 2)
    if not 0xD800 <= code <= 0xDFFF:
        return chr(code), start + 6
    low = 0
    if code <= 0xDBFF and text[start + 6 : start + 8] == b"\\u":
        low = _hex(text, start, start + 8)
    if not 0xDC00 <= low <= 0xDFFF:
        raise JsonSyntaxError("The surrogate pair in string is invalid.", start)
    return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)), start + 12


def _hex(text: Buffer, start: int, position: int) -> int:
    found = _HEX.match(text, position)
    if found is None:
        raise JsonSyntaxError("Incorrect hex digit after \\u escape in string.", start)
    return int(found.group(), 16)


def _whole_characters(piece: bytes) -> int:
    """Length of a piece of UTF-8 without a cut character at its end."""
    for back in range(1, min(4, len(piece)) + 1):
        byte = piece[-back]
        if byte < 0x80:
            return len(piece) - back + 1
        if byte >= 0xC0:
            return len(piece) - back
    return len(piece)


MOST_DEPTH: Final = 100
"""Deepest nesting of a tensor's elements."""
MOST_DOCUMENT_DEPTH: Final = 1024
"""Deepest nesting of a text; the fast parser has the same limit."""
MOST_MEMBERS: Final = 65536
"""Most objects and members together, of a text that is not short."""


class JsonSyntaxError(InternalError):
    """A text is not JSON. A client error, with Triton's status."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(f"failed to parse the request JSON buffer: {reason} at {position}")


class JsonDepthError(InvalidArgumentError):
    """A text is nested too deep; the message is Triton's."""

    def __init__(self) -> None:
        super().__init__(f"JSON nesting depth exceeds maximum allowed limit ({MOST_DEPTH})")


class JsonMembersError(InvalidArgumentError):
    """A text has too many objects and members."""

    def __init__(self) -> None:
        super().__init__(
            f"the request JSON has more than {MOST_MEMBERS} objects and members of objects; send large "
            f"tensors as arrays"
        )


class JsonValuesError(InvalidArgumentError):
    """A text has too many values."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the request JSON has more than {most} values")


INT64_LEAST: Final = -(2**63)
UINT64_MOST: Final = 2**64 - 1

_SPACE = re.compile(rb"[ \t\r\n]{0,65536}")
_SPACE_WINDOW = 65536
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
_VALUES_BETWEEN_PAUSES = 1024
_LONG_ARRAY = 4096
_OPENED: Final = object()
"""Placeholder of a value that is not parsed yet."""


class Pairs:
    """The members of an object in document order, duplicate names included.

    Attributes:
        members: Names and values.
    """

    __slots__ = ("members",)

    def __init__(self, members: Iterable[tuple[str, Any]] = ()) -> None:
        self.members = list(members)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.members)

    def setdefault(self, name: str, value: Any) -> None:
        """Adds a member; has the name of the method of `dict`."""
        self.members.append((name, value))


def scan(text: Buffer, pairs: bool = False, standard: bool = False, most_values: int | None = None) -> Any:
    """Parses a text.

    Strings are decoded with ``surrogateescape``. The first of several members with one name counts. Long
    arrays become `BulkArray`.

    Args:
        text: The text.
        pairs: True if objects become `Pairs` instead of `dict`.
        standard: True if NaN and infinities are errors, the last of several members with one name counts, and
            long arrays of arrays keep their form.
        most_values: Most values of the text; None for no limit.

    Raises:
        JsonSyntaxError: It is not JSON.
        JsonDepthError: It is nested too deep.
        JsonMembersError: It has too many objects and members.
        JsonValuesError: It has more than `most_values` values.
    """
    return _Scanner(text, Pairs if pairs else dict, standard, most_values).document()


class _Scanner:
    """State of one parse: text, position and open containers."""

    def __init__(
        self,
        text: Buffer,
        new_object: Callable[[], dict[str, Any] | Pairs],
        standard: bool,
        most_values: int | None,
    ) -> None:
        self._text = text
        self._end = len(text)
        self._new_object = new_object
        self._standard = standard
        self._most_values = most_values
        self._values = 0
        self._next_yield = _VALUES_BETWEEN_PAUSES
        self._members = 0
        # Open containers, the innermost last; an object has the name of its next member.
        self._stack: list[tuple[dict[str, Any] | Pairs | list[Any] | BulkArray, str]] = []
        self._next_bulk = 0
        self._pause = 0
        self._position = 3 if text[:3] == b"\xef\xbb\xbf" else 0

    def document(self) -> Any:
        """Parses the only value of the text."""
        self._space()
        if self._peek() == 0:
            raise JsonSyntaxError("The document is empty.", self._position)
        stack = self._stack
        value = self._value()
        while stack:
            if value is not _OPENED:
                value = self._ended(value)
                continue
            if len(stack) > MOST_DOCUMENT_DEPTH:
                raise JsonDepthError
            self._count_values(1)
            if self._values >= self._next_yield:
                self._next_yield = self._values + _VALUES_BETWEEN_PAUSES
                yield_gil()
            value = self._value()
        self._space()
        if self._peek() != 0:
            raise JsonSyntaxError("The document root must not be followed by other values.", self._position)
        return value

    def _value(self) -> Any:
        """Parses the value at the position; `_OPENED` for a container with values."""
        byte = self._peek()
        if byte == 0x7B:
            self._position += 1
            self._space()
            self._count()
            container = self._new_object()
            if self._peek() == 0x7D:
                self._position += 1
                return container
            self._stack.append((container, self._name()))
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
        """Adds a value to the innermost container; returns the container if it ends, else `_OPENED`."""
        container, name = self._stack[-1]
        self._space()
        byte = self._peek()
        if isinstance(container, dict | Pairs):
            if self._standard and isinstance(container, dict):
                container[name] = value
            else:
                container.setdefault(name, value)
            if byte == 0x2C:
                self._position += 1
                self._space()
                self._count()
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
        """Continues an array behind a comma."""
        if isinstance(container, list) and len(container) % _ELEMENTS_BETWEEN:
            return _OPENED
        more = self._bulk()
        short = not isinstance(container, list) or len(container) < _LONG_ARRAY
        if more is None and (short or self._standard):
            return _OPENED
        array = BulkArray(self._standard)
        if isinstance(container, list):
            for element in container:
                array.append(element)
        else:
            array = container
        if more is not None:
            array.extend(more)
        _, name = self._stack.pop()
        if more is not None and more.closes:
            return array
        self._stack.append((array, name))
        return _OPENED

    def _bulk(self) -> BulkArray | None:
        """Parses many elements at once; leaves the position behind a comma or a bracket."""
        if self._end - self._position < _BULK_FROM or self._position < self._next_bulk:
            return None
        array = BulkArray(self._standard)
        self._position = take_elements(self._text, self._position, array)
        if array.taken:
            self._count_values(len(array))
            self._pause = 0
            if not array.closes:
                self._space()
            return array
        # A window without result is expensive; nested arrays would repeat it for each array.
        self._next_bulk = self._position + self._pause
        self._pause = min(self._pause * 2 + 16, WINDOW)
        return None

    def _peek(self) -> int:
        return self._text[self._position] if self._position < self._end else 0

    def _space(self) -> None:
        while True:
            found = _SPACE.match(self._text, self._position)
            assert found is not None
            end = found.end()
            ended = end - self._position < _SPACE_WINDOW
            self._position = end
            if ended:
                return
            yield_gil()

    def _count(self) -> None:
        """Counts an object or a further member."""
        self._members += 1
        if self._members > MOST_MEMBERS:
            raise JsonMembersError

    def _count_values(self, count: int) -> None:
        self._values += count
        if self._most_values is not None and self._values > self._most_values:
            raise JsonValuesError(self._most_values)

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
        if words is not None and not (self._standard and byte in b"NI"):
            return _WORDS[self._word(words)]
        return self._number(byte)

    def _word(self, words: tuple[bytes, ...]) -> bytes:
        for word in words:
            if self._text[self._position : self._position + len(word)] == word:
                self._position += len(word)
                return word
        # The error has the position of the first wrong byte.
        word = words[0]
        position = self._position
        for expected in word:
            if position >= self._end or self._text[position] != expected:
                break
            position += 1
        raise JsonSyntaxError("Invalid value.", position)

    def _number(self, byte: int) -> int | float:
        start = self._position
        found = _NUMBER.match(self._text, start, start + WINDOW)
        if found is None:
            if byte == 0x2D and not self._standard:
                words = _FIRST.get(self._text[start + 1] if start + 1 < self._end else 0, ())
                self._position += 1
                if words and words[0] in (b"NaN", b"Infinity"):
                    return -float(_WORDS[self._word(words)])
            raise JsonSyntaxError("Invalid value.", self._position)
        if found.end() - start == WINDOW:
            raise JsonSyntaxError("Number too big to be stored in double.", start)
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

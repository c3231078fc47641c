"""Strings of a JSON text, as Triton's parser reads them: bytes that are no UTF-8 are kept."""

from __future__ import annotations

import re

import orjson

from conch.core.tensor import Buffer
from conch.frontends.http.jsontext.errors import JsonSyntaxError

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
        position: Where the string begins, with its quotation mark.

    Returns:
        The string, and the position behind it. Bytes that are no UTF-8 are decoded with ``surrogateescape``.

    Raises:
        JsonSyntaxError: It is none.
    """
    position += 1
    parts: list[str] = []
    pending = b""  # bytes of a character that the last piece ended in
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
    """What begins with an escape, many of them at once if they are plain, and the position behind it."""
    run = _ESCAPED_RUN.match(text, start, start + _ESCAPED_WINDOW)
    if run is not None:
        try:
            escaped: str = orjson.loads(b'"%b"' % run.group())
        except orjson.JSONDecodeError:
            pass  # not UTF-8, or the window ends inside of a character
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
    """Up to where a piece of UTF-8 surely ends with a whole character."""
    for back in range(1, min(4, len(piece)) + 1):
        byte = piece[-back]
        if byte < 0x80:
            return len(piece) - back + 1
        if byte >= 0xC0:
            return len(piece) - back
    return len(piece)

"""Reads one tool call, a JSON object, from text that comes in pieces.

The object's own members are parsed strictly; of the values inside only brackets and strings are followed. So
arguments go out as the model writes them, before they are complete, and malformed ones as they are.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import NamedTuple

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\n\r"
_IN_STRING = re.compile(r'[^"\\]*')
_IN_BRACKETS = re.compile(r'[^"\[\]{}]*')
_IN_SCALAR = re.compile(r"[^,}\s]*")


class _State(Enum):
    OPENING = auto()
    FIRST_KEY = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    IN_SCALAR = auto()
    COMMA = auto()
    DONE = auto()
    FAILED = auto()


class Read(NamedTuple):
    """Result of a piece: the position behind the text read, the name when the call begins, and arguments."""

    position: int
    name: str | None
    arguments: str


class CallReader:
    """Reads an object with ``name`` and ``arguments`` or ``parameters``.

    The call begins when the name is known and the arguments have begun; text that fails before is no call,
    and `raw` has it.

    Args:
        name: The name, if it stands before; the object is the arguments then.
    """

    def __init__(self, name: str = "") -> None:
        self._state = _State.VALUE if name else _State.OPENING
        self._raw: list[str] = []
        self._key = _ARGUMENTS[0] if name else ""
        self._keys: set[str] = set()
        self._name = name or None
        self._after_value = _State.DONE if name else _State.COMMA
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._taken: list[str] | None = None  # where the value goes; None if it has no meaning
        self._arguments: list[str] = []  # those not given out
        self._begun = False

    @property
    def begun(self) -> bool:
        """True if the call has begun."""
        return self._begun

    @property
    def done(self) -> bool:
        """True if the object is complete."""
        return self._state is _State.DONE

    @property
    def failed(self) -> bool:
        """True if the text is no call, or stops being one."""
        return self._state is _State.FAILED

    def raw(self) -> str:
        """The text read so far, if it is no call."""
        return "".join(self._raw)

    def feed(self, text: str, start: int) -> Read:
        """Reads to the end of the object, a character that does not fit, or the end of the text."""
        position = start
        while position < len(text) and not (self.done or self.failed):
            position = self._step(text, position)
        if not self._begun:
            self._raw.append(text[start:position])
        return self._given_out(position)

    def _given_out(self, position: int) -> Read:
        if self._name is None or not self._arguments:
            return Read(position, None, "")
        name = None if self._begun else self._name
        if name is not None:
            self._begun = True
            self._raw.clear()
        arguments = "".join(self._arguments)
        self._arguments.clear()
        return Read(position, name, arguments)

    def _step(self, text: str, position: int) -> int:
        """Reads a character or a run of them; returns the position behind."""
        state = self._state
        if state is _State.IN_VALUE or state is _State.IN_KEY:
            return self._read_nested(text, position)
        if state is _State.IN_SCALAR:
            return self._read_scalar(text, position)
        character = text[position]
        if character in _SPACE:
            return position + 1
        if state is _State.VALUE:
            return self._begin_value(character, position)
        following = _FOLLOWING.get((state, character), _State.FAILED)
        if following is _State.IN_KEY:
            self._begin_token(['"'], in_string=True)
        if following is _State.DONE and not (self._name and self._keys.intersection(_ARGUMENTS)):
            following = _State.FAILED
        self._state = following
        return position + (following is not _State.FAILED)

    def _begin_token(self, taken: list[str] | None, in_string: bool = False) -> None:
        self._taken = taken
        self._depth, self._in_string, self._escaped = 0, in_string, False

    def _begin_value(self, character: str, position: int) -> int:
        arguments = self._key in _ARGUMENTS
        fits = character not in ",:}]"
        if self._key == "name":
            fits = character == '"'
        elif arguments:
            fits = character in '{"n'
        if not fits:
            self._state = _State.FAILED
            return position
        if arguments and character == "{":
            self._begin_token(self._arguments)
        else:
            self._begin_token([] if arguments or self._key == "name" else None)
        self._state = _State.IN_VALUE if character in '{["' else _State.IN_SCALAR
        return position

    def _read_nested(self, text: str, start: int) -> int:
        """Reads a string, object or array up to its end."""
        position = start
        if self._escaped:
            self._escaped = False
            position += 1
        else:
            position = (_IN_STRING if self._in_string else _IN_BRACKETS).match(text, position).end()  # type: ignore[union-attr]
            if position < len(text):
                character = text[position]
                position += 1
                if character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = not self._in_string
                else:
                    self._depth += 1 if character in "{[" else -1
        piece = text[start:position]
        if self._taken is not None:
            self._taken.append(piece)
        ends = piece[-1:] in ('"', "}", "]") and not self._escaped
        if self._depth == 0 and not self._in_string and ends:
            self._end_token()
        return position

    def _read_scalar(self, text: str, start: int) -> int:
        end = _IN_SCALAR.match(text, start).end()  # type: ignore[union-attr]
        if self._taken is not None:
            self._taken.append(text[start:end])
        if end < len(text):
            self._end_token()
        return end

    def _end_token(self) -> None:
        is_key = self._state is _State.IN_KEY
        self._state = _State.COLON if is_key else self._after_value
        if self._taken is None or self._taken is self._arguments:
            return
        try:
            value = json.loads("".join(self._taken))
        except ValueError:
            self._state = _State.FAILED
            return
        if is_key:
            self._take_key(value)
        elif self._key == "name":
            self._name = value
            if not value:
                self._state = _State.FAILED
        elif self._key in _ARGUMENTS:
            self._arguments.append(_as_arguments(value))

    def _take_key(self, key: str) -> None:
        role = _ARGUMENTS if key in _ARGUMENTS else (key,)
        if self._keys.intersection(role):
            self._state = _State.FAILED
        self._key = key
        self._keys.add(key)


def _as_arguments(value: object) -> str:
    """Arguments that are no object: the JSON text in a string, or none."""
    return value.strip() or "{}" if isinstance(value, str) else "{}"


_FOLLOWING = {
    (_State.OPENING, "{"): _State.FIRST_KEY,
    (_State.FIRST_KEY, '"'): _State.IN_KEY,
    (_State.FIRST_KEY, "}"): _State.DONE,
    (_State.KEY, '"'): _State.IN_KEY,
    (_State.COLON, ":"): _State.VALUE,
    (_State.COMMA, ","): _State.KEY,
    (_State.COMMA, "}"): _State.DONE,
}

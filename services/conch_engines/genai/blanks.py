"""A bound for blanks in JSON: grammars allow any number between values, and a greedy model may never end."""

from __future__ import annotations

from typing import Final

MOST_BLANKS: Final = 256
"""Blanks in a row, as an answer that is indented in the deepest schema has."""


class Blanks:
    """Counts the blanks at the end of a JSON text that comes in pieces, but those within strings."""

    __slots__ = ("_count", "_escaped", "_quoted")

    def __init__(self) -> None:
        self._count = 0
        self._quoted = self._escaped = False

    def endless(self, text: str) -> bool:
        """Takes a piece; true if there are too many blanks."""
        for character in text:
            if not self._quoted and character.isspace():
                self._count += 1
                continue
            self._count = 0
            if character == '"' and not self._escaped:
                self._quoted = not self._quoted
            self._escaped = character == "\\" and not self._escaped
        return self._count > MOST_BLANKS

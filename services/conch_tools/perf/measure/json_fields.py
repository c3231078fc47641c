"""Reads the fields of a results file; an error names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ResultsFormatError(ValueError):
    """A results file that can't be read; the text names the field."""


class Fields:
    """One JSON object."""

    def __init__(self, found: object, where: str) -> None:
        if not isinstance(found, dict):
            raise ResultsFormatError(f"{where} must be a JSON object")
        self._found: dict[str, Any] = found
        self._where = where

    def text(self, key: str) -> str:
        """A string."""
        value = self._get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def whole(self, key: str, missing: int | None = None) -> int:
        """An integer of at least 0; ``missing``, if given, where there is none."""
        value = self._get(key) if missing is None else self._found.get(key, missing)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(key, "an integer of at least 0")
        return value

    def number(self, key: str) -> float:
        """A number."""
        value = self._get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self._get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def items(self, key: str) -> list[Any]:
        """A list."""
        value = self._get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        values = self.items(key)
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(key, "a list of strings")
        return tuple(values)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object."""
        value = self._get(key)
        if not isinstance(value, dict):
            raise self._wrong(key, "a JSON object")
        return value

    def numbers(self, key: str) -> dict[str, float]:
        """An object of numbers."""
        inner = Fields(self.mapping(key), f"{self._where}.{key}")
        return {name: inner.number(name) for name in self.mapping(key)}

    def wholes(self, key: str) -> dict[str, int]:
        """An object of integers of at least 0."""
        inner = Fields(self.mapping(key), f"{self._where}.{key}")
        return {name: inner.whole(name) for name in self.mapping(key)}

    def strings(self, key: str) -> dict[str, str]:
        """An object of strings."""
        inner = Fields(self.mapping(key), f"{self._where}.{key}")
        return {name: inner.text(name) for name in self.mapping(key)}

    def has(self, key: str) -> bool:
        """True if the object has the key."""
        return key in self._found

    def maybe(self, key: str) -> object:
        """Any value; None where it is null."""
        return self._get(key)

    def _get(self, key: str) -> Any:
        if key not in self._found:
            raise ResultsFormatError(f"{self._where} has no '{key}'")
        return self._found[key]

    def _wrong(self, key: str, wanted: str) -> ResultsFormatError:
        return ResultsFormatError(f"{self._where}.{key} must be {wanted}")

"""Parses the settings of a cache, ``--cache-config <name>,<setting>=<value>``."""

from __future__ import annotations

from collections.abc import Mapping

from conch.core.errors import InvalidArgumentError

_NS_PER_S = 1_000_000_000
_MOST_S = 10**9
_COMMA = "; each setting needs a --cache-config of its own"


class Settings:
    """The settings of one cache.

    Args:
        cache: Name of the cache in messages, such as ``LocalCache``.
        given: The settings.
        known: The names of all settings.

    Raises:
        InvalidArgumentError: A setting is unknown.
    """

    def __init__(self, cache: str, given: Mapping[str, str], known: tuple[str, ...]) -> None:
        self._cache = cache
        self._given = given
        for name in given:
            if name not in known:
                raise self.error(f"there is no setting '{name}', only {', '.join(known)}")

    def error(self, problem: str) -> InvalidArgumentError:
        """An error in Triton's form."""
        return InvalidArgumentError(f"Failed to initialize {self._cache}: {problem}")

    def text(self, name: str, default: str | None = None) -> str | None:
        """A setting as text."""
        return self._given.get(name, default)

    def number(self, name: str, default: int, least: int = 0, most: int = 2**63 - 1) -> int:
        """A whole number. Raises InvalidArgumentError: it is not, or out of range."""
        text = self._given.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
            hint = _COMMA if "," in text else ""
            raise self.error(f"'{name}' must be a whole number from {least} to {most}, got '{text}'{hint}")
        return int(text)

    def flag(self, name: str) -> bool:
        """``true`` or ``false``; false by default. Raises InvalidArgumentError: it is neither."""
        text = self._given.get(name, "false")
        if text not in ("true", "false"):
            raise self.error(f"'{name}' must be true or false, got '{text}'")
        return text == "true"

    def seconds(self, name: str) -> int:
        """A time in seconds, possibly with decimals, as nanoseconds; 0 by default.

        Raises:
            InvalidArgumentError: It is not above 0.
        """
        text = self._given.get(name)
        if text is None:
            return 0
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 1 / _NS_PER_S <= value <= _MOST_S:
            hint = _COMMA if "," in text else ""
            raise self.error(f"'{name}' must be a number of seconds above 0, got '{text}'{hint}")
        return int(value * _NS_PER_S)

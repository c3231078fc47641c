"""Stop strings for models that know none: the answer is cut at the first."""

from __future__ import annotations

from collections.abc import Sequence

from conch.core.errors import InvalidArgumentError
from conch_llm.language.markers import MarkerSearch


class StopStrings:
    """Cuts text that comes in pieces at the stop string that ends first.

    Args:
        stop: The strings.
        include: True if the text ends with the stop string (``include_stop_str_in_output``).

    Raises:
        InvalidArgumentError: A string is empty.
    """

    __slots__ = ("_include", "_search")

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        if not all(stop):
            raise InvalidArgumentError("stop: a stop string may not be empty")
        self._search = MarkerSearch(stop)
        self._include = include

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._search.found or None

    def feed(self, text: str) -> str:
        """Takes a piece and returns what may be sent; nothing after a match."""
        search = self._search
        if search.found:
            return ""
        ready = search.feed(text)
        return ready + search.found if self._include else ready

    def end(self) -> str:
        """Ends the text; returns the beginning of a stop string that was kept back."""
        return self._search.end()

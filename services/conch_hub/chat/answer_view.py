"""Shows an answer in a terminal as it comes: as Markdown if rich is installed, else as plain text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol

from conch_hub.safe_text import safe


class AnswerView(Protocol):
    """Shows one answer."""

    def reason(self, text: str) -> None:
        """Shows more of the reasoning."""

    def add(self, text: str) -> None:
        """Shows more of the answer."""


class PlainView:
    """Writes text as it comes; an `AnswerView`."""

    def reason(self, text: str) -> None:
        """Writes it, as the answer."""
        self.add(text)

    def add(self, text: str) -> None:
        """Writes it."""
        sys.stdout.write(safe(text, "\n\t"))
        sys.stdout.flush()


@contextmanager
def answer_view() -> Iterator[AnswerView]:
    """A view of one answer on standard output, for a block; what has come is shown at its end in any case."""
    if has_rich():
        from conch_hub.chat.markdown_view import markdown_view

        with markdown_view() as shown:
            yield shown
        return
    plain = PlainView()
    try:
        yield plain
    finally:
        plain.add("\n")


def has_rich() -> bool:
    """True if answers are shown as Markdown."""
    return find_spec("rich") is not None

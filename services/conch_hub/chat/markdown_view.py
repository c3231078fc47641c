"""Shows an answer as Markdown, with rich.

Finished paragraphs scroll away with the terminal, and only the last one is drawn again with each piece, so
that a long answer costs no more for each piece than a short one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from conch_hub.safe_text import safe

_BLANK = re.compile(r"\n[ \t]*\n(?=\S)")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})", re.MULTILINE)
_SPARE_LINES = 2  # of the terminal


class AnswerMarkdown(Markdown):
    """Markdown whose HTML is text, such as ``<think>``: rich leaves it out."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.parsed = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).parse(text)


@dataclass(frozen=True, slots=True)
class _Tail:
    """The last lines of Markdown that fit into the terminal; made when it is drawn, not for each piece."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        most = max(console.height - _SPARE_LINES, 1)
        lines = console.render_lines(AnswerMarkdown(self.text), options.update(height=None), pad=False)
        for line in lines[-most:]:
            yield from line
            yield Segment.line()


class MarkdownView:
    """An `AnswerView`.

    Args:
        live: The part of the terminal that is drawn again.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self._rest = self._reasoning = ""

    def reason(self, text: str) -> None:
        """Shows reasoning in a dim colour, line by line."""
        *lines, self._reasoning = (self._reasoning + safe(text, "\n\t")).split("\n")
        for line in lines:
            self._live.console.print(Text(line, "dim"))
        self._live.update(Text(self._reasoning, "dim"))

    def add(self, text: str) -> None:
        """Shows more of the answer."""
        self._end_reasoning()
        self._rest += safe(text, "\n\t")
        end = finished(self._rest)
        if end:
            self._live.console.print(AnswerMarkdown(self._rest[:end]))
            self._live.console.print()
            self._rest = self._rest[end:]
        self._live.update(self._unfinished())

    def finish(self) -> None:
        """Prints the rest in its place for good."""
        self._end_reasoning()
        self._live.update(Text())
        if self._rest:
            self._live.console.print(AnswerMarkdown(self._rest))

    def _unfinished(self) -> RenderableType:
        """The last paragraph, or the end of one that is longer than the terminal."""
        return _Tail(self._rest)

    def _end_reasoning(self) -> None:
        if self._reasoning:
            self._live.console.print(Text(self._reasoning, "dim"))
            self._reasoning = ""


@contextmanager
def markdown_view() -> Iterator[MarkdownView]:
    """A view on standard output, for a block; what has come is shown at its end in any case."""
    with Live(console=Console(), transient=True, refresh_per_second=12, vertical_overflow="crop") as live:
        view = MarkdownView(live)
        try:
            yield view
        finally:
            view.finish()


def finished(text: str) -> int:
    """End of the paragraphs of a text that more text can't change: those before its last blank line.

    A blank line in a fenced block of code, or before an indented line, such as the next paragraph of a list's
    item, ends nothing.
    """
    end = 0
    for found in _BLANK.finditer(text):
        if not _in_fence(text[end : found.start() + 1]):
            end = found.end()
    return end


def _in_fence(text: str) -> bool:
    """True if a block of code is open at the end of a text."""
    fence = ""
    for found in _FENCE.finditer(text):
        if not fence:
            fence = found[1]
        elif found[1].startswith(fence):
            fence = ""
    return bool(fence)

"""A progress bar on a terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import IO

_WIDTH = 30
_PAUSE_S = 0.1
_COLUMNS = 80
"""Width of a terminal that does not tell it."""


def _rows(done: float) -> str:
    return f"{done:,.0f} rows"


class ProgressBar:
    """Shows how much is done, and how much in a second; nothing where the file is no terminal.

    Args:
        out: The file.
        before: Amount that was done before.
        amount: Writes an amount, such as ``5 rows``.
    """

    def __init__(self, out: IO[str], before: int = 0, amount: Callable[[float], str] = _rows) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._before = before
        self._amount = amount
        self._began = time.monotonic()
        self._next_s = 0.0

    def show(self, done: int, fraction: float) -> None:
        """Shows the amount and, if it is known, the fraction of the whole; at most ten times a second."""
        now = time.monotonic()
        if not self._terminal or now < self._next_s:
            return
        self._next_s = now + _PAUSE_S
        rate = (done - self._before) / max(now - self._began, 1e-9)
        bar = ""
        if fraction:
            cells = int(fraction * _WIDTH)
            bar = f"[{'#' * cells}{'.' * (_WIDTH - cells)}] {fraction:4.0%}  "
        text = f"{bar}{self._amount(done)}, {self._amount(rate)}/s"
        columns = os.get_terminal_size(self._out.fileno()).columns or _COLUMNS
        if len(text) >= columns:  # a line that wraps would stay
            text = text[len(bar) :][: columns - 1]
        print(f"\r\x1b[K{text}", end="", file=self._out, flush=True)

    def clear(self) -> None:
        """Removes the bar."""
        if self._terminal:
            print(end="\r\x1b[K", file=self._out, flush=True)

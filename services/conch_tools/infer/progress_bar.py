"""A progress bar on a terminal."""

from __future__ import annotations

import time
from typing import IO

_WIDTH = 30
_PAUSE_S = 0.1


class ProgressBar:
    """Shows how many rows are done; nothing where the file is no terminal.

    Args:
        out: The file.
        rows: Rows that were done before.
    """

    def __init__(self, out: IO[str], rows: int = 0) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._before = rows
        self._began = time.monotonic()
        self._next_s = 0.0

    def show(self, rows: int, fraction: float) -> None:
        """Shows rows and, if it is known, the fraction of the whole; at most ten times a second."""
        now = time.monotonic()
        if not self._terminal or now < self._next_s:
            return
        self._next_s = now + _PAUSE_S
        rate = (rows - self._before) / max(now - self._began, 1e-9)
        bar = ""
        if fraction:
            done = int(fraction * _WIDTH)
            bar = f"[{'#' * done}{'.' * (_WIDTH - done)}] {fraction:4.0%}  "
        print(f"\r\x1b[K{bar}{rows:,} rows, {rate:,.0f} rows/s", end="", file=self._out, flush=True)

    def clear(self) -> None:
        """Removes the bar."""
        if self._terminal:
            print(end="\r\x1b[K", file=self._out, flush=True)

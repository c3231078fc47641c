"""The live table of `conch top`.

A thread reads the server, so that keys work while it does not answer; the main thread draws.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from conch_tools.connection import Endpoint
from conch_tools.top.screen import Ended, Screen
from conch_tools.top.table import SORTS, head_lines, table_lines
from conch_tools.top.watching import TopView, top


class _Feed:
    """Views as they come, from a thread."""

    def __init__(self, endpoint: Endpoint, interval_s: float) -> None:
        self.news, self._tell = socket.socketpair()
        self.view: TopView | None = None
        self._over = threading.Event()
        self._views = top(endpoint, interval_s, self._over)
        # A daemon: the process does not wait for a server that does not answer.
        threading.Thread(target=self._run, name="conch-top", daemon=True).start()

    def close(self) -> None:
        """Ends the thread after the view that it waits for."""
        self._over.set()
        self.news.close()

    def _run(self) -> None:
        with self._tell:
            for view in self._views:
                self.view = view
                with suppress(OSError):  # the other end is closed
                    self._tell.send(b".")


def show_live(endpoint: Endpoint, interval_s: float, sort: str) -> tuple[int, TopView | None]:
    """Shows views until a key or a signal ends it.

    Returns:
        The exit code, and the first view if its server was not there.
    """
    feed = _Feed(endpoint, interval_s)
    try:
        feed.news.recv(1)
        first = feed.view
        assert first is not None, "the thread has told of it"
        if first.error is not None:
            return 0, first
        last = first
        with Screen(sys.stdin.fileno(), sys.stdout.fileno()) as screen:
            while True:
                view = feed.view or first
                last = view if view.error is None else last
                width, height = screen.size()
                screen.show(*_frame(view, last, sort, width, height))
                for key in screen.wait(feed.news):
                    if key in "qQ":
                        return 0, None
                    if key == "s":
                        sort = SORTS[(SORTS.index(sort) + 1) % len(SORTS)]
    except Ended as ended:
        return ended.code, None
    finally:
        feed.close()


def _frame(view: TopView, last: TopView, sort: str, width: int, height: int) -> tuple[Sequence[str], int]:
    """Lines that fill the terminal at most, and the number of the table's heading."""
    head = [*head_lines(view, last, width), ""]
    keys = f"q quit, s sort ({sort})"[:width]
    rows = max(0, height - len(head) - 2)
    lines = [*head, *table_lines(last.models, sort, width, rows)]
    return [*lines[: height - 1], keys], len(head)

"""SIGHUP: log files are opened anew, so that what rotates them can take the old ones away."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol


class Reopenable(Protocol):
    """Something with a file."""

    def reopen(self) -> None:
        """Has the file opened anew; is called from a signal handler."""


@contextmanager
def reopened_at_hangup(logs: Sequence[Reopenable]) -> Iterator[None]:
    """Opens the files of logs anew at each SIGHUP while the block runs; for the main thread.

    Args:
        logs: Logs with files; without any, the signal does what it always does.
    """
    if not logs:
        yield
        return

    def on_hangup(number: int, frame: FrameType | None) -> None:
        for each in logs:
            each.reopen()

    before = signal.signal(signal.SIGHUP, on_hangup)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)

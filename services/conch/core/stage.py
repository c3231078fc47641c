"""The life of a server: its stages, in the order in which it goes through them.

``STARTING -> SERVING | FAILED -> DRAINING -> STOPPING``. Any of them may be skipped, none is gone back to.
"""

from __future__ import annotations

import threading
from enum import IntEnum

from conch.core.clock import Clock, monotonic_ns


class Stage(IntEnum):
    """Where a server is in its life."""

    STARTING = 0
    """The models of the start are being loaded."""
    SERVING = 1
    """It takes requests."""
    FAILED = 2
    """It could not start, and is up to say so."""
    DRAINING = 3
    """It says that it is not ready, so that nobody sends it more, and goes on answering what comes."""
    STOPPING = 4
    """It takes nothing new, and finishes what it has."""


class Life:
    """The stage that a server is in; the one place that changes it, from any thread.

    Args:
        clock: Monotonic time in nanoseconds.

    Attributes:
        stage: The stage now.
    """

    def __init__(self, clock: Clock = monotonic_ns) -> None:
        self.stage = Stage.STARTING
        self._clock = clock
        self._lock = threading.Lock()
        self._since_ns: dict[Stage, int] = {}

    def advance(self, stage: Stage) -> bool:
        """Goes on to a stage, unless the server is in it or beyond it already.

        Returns:
            Whether the stage has changed.
        """
        with self._lock:
            if stage <= self.stage:
                return False
            self.stage = stage
            self._since_ns[stage] = self._clock()
            return True

    def seconds_in(self, stage: Stage) -> float:
        """How long ago a stage began; 0 for one that never did."""
        since_ns = self._since_ns.get(stage)
        return 0.0 if since_ns is None else (self._clock() - since_ns) / 1e9

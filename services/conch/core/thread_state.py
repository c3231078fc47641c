"""State that threads have of their own; no class of a compiled module can derive from `threading.local`."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any


class RunnerThread(threading.local):
    """State of a thread that runs or finishes batches.

    Attributes:
        bypasses: True if it bypasses claims.
        received: Outcomes to finish next, each with its runner and batch; None if it finishes none.
    """

    bypasses: bool = False
    received: deque[Any] | None = None


class LoopThread(threading.local):
    """The `IoLoop` that a thread runs, or None."""

    loop: Any = None

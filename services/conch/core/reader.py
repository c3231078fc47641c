"""Clients of decoupled models, which may read more slowly than the models respond."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol


class Reader(Protocol):
    """The client of a decoupled model's request, which may read more slowly than the model responds.

    Responders take every response; a model that responds asks the reader whether to go on. Any thread.
    """

    @property
    def backpressure(self) -> bool:
        """True if the client has so much left to read that the model should wait."""

    def when_writable(self, work: Callable[[], object]) -> None:
        """Calls `work` once: now unless the client is behind, else when it has caught up or has left.

        `work` returns at once, on any thread.
        """

    def wait_until_writable(self) -> None:
        """Blocks while the client is behind."""
        if self.backpressure:
            read = threading.Event()
            self.when_writable(read.set)
            read.wait()

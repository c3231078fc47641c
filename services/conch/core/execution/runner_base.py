"""Base class of runners, for their parts: lock, clock, queue, and the methods that the parts call."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from conch.core.backend import BackendInstance
from conch.core.clock import Clock
from conch.core.scheduling.scheduler import Scheduler


class RunnerBase(ABC):
    """A runner, as its parts see it.

    Attributes:
        lock: The lock of the model version.
        clock: Monotonic time in nanoseconds.
        scheduler: The queue; called with the lock held.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self.lock = threading.Lock()
        self.clock = clock
        self.scheduler = scheduler

    @abstractmethod
    def wake_if_due(self, now: int) -> None:
        """Wakes a thread if a batch is or will be due and no claim exists; called with the lock held."""

    @abstractmethod
    def needed(self, now: int) -> Sequence[BackendInstance]:
        """The idle instances for which a batch is due, with their resources or not; with the lock held."""

    @abstractmethod
    def settle_limits(self) -> None:
        """Settles the limits, after requests have left the queue without running; without the lock."""

    @abstractmethod
    def check_drained(self) -> bool:
        """True if the runner closes and is drained; then lets `close` and the threads end. Lock held."""

    @abstractmethod
    def run_thread(self, woken: threading.Condition) -> None:
        """Runs batches on one of the model's threads, until the runner is closed."""

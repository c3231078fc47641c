"""The threads of one model version, which run what no other thread has claimed."""

from __future__ import annotations

import threading

from conch.core.execution.runner_base import RunnerBase
from conch.core.scheduling.queue import NEVER


class ModelThreads:
    """The threads of a runner, started on demand.

    All calls but `join` hold the runner's lock.

    Attributes:
        timed_ns: Time at which the thread that waits for a delayed batch wakes; `NEVER` if none waits.
    """

    __slots__ = ("_name", "_runner", "_sleeping", "_threads", "timed_ns")

    def __init__(self, name: str, runner: RunnerBase) -> None:
        self._name = name
        self._runner = runner
        self._sleeping: list[threading.Condition] = []
        self._threads: list[threading.Thread] = []
        self.timed_ns = NEVER

    def wake(self, most: int) -> None:
        """Wakes a thread, or starts one if there are fewer than `most`."""
        if self._sleeping:
            self._sleeping.pop().notify()
        elif len(self._threads) < most:
            # One condition for each thread: it has been woken exactly if it has left `_sleeping`, also if its
            # wait times out at that moment.
            woken = threading.Condition(self._runner.lock)
            name = f"conch-{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._runner.run_thread, args=(woken,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def wake_all(self) -> None:
        """Wakes all sleeping threads."""
        while self._sleeping:
            self._sleeping.pop().notify()

    def sleep(self, woken: threading.Condition, now_ns: int, until_ns: int) -> None:
        """Waits on the calling thread until it is woken; for the first one also until a batch is due."""
        timed = until_ns < self.timed_ns
        if timed:
            self.timed_ns = until_ns
        self._sleeping.append(woken)
        woken.wait((until_ns - now_ns) / 1e9 if timed else None)
        if woken in self._sleeping:
            self._sleeping.remove(woken)  # its wait timed out
        if timed:
            self.timed_ns = NEVER

    def join(self) -> None:
        """Waits for all threads, without the lock."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

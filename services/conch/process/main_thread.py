"""Runs a server as a process: starts it, waits for a signal, stops it.

Threads: the main thread only waits, for signals and for the threads that start and stop the server. So a
signal takes effect at any time: the first one also cancels a long start, the second one ends the process.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Startable(Protocol):
    """A server for `run_until_signal`."""

    def start(self) -> None:
        """Returns when the server serves; raises if it is stopped meanwhile."""

    def stop(self) -> bool:
        """Stops from any thread, also during the start; True if everything was finished."""


class Task:
    """Runs `work` on a new daemon thread, then calls `done` there."""

    def __init__(self, name: str, work: Callable[[], object], done: Callable[[], None]) -> None:
        self._work = work
        self._done = done
        self.ended = False
        self.result: object = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # boundary: the work; `get` raises its error
            self.error = error
        finally:
            self.ended = True
            self._done()

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()

    def get(self) -> object:
        """Waits for the work; returns its result or raises its error."""
        self.join()
        if self.error is not None:
            raise self.error
        return self.result


class Signals:
    """Waits for SIGTERM, SIGINT and other wake-ups.

    Attributes:
        asked: True if a signal has come. A second one ends the process at once with 128 plus its number.

    Args:
        flush: Called before that end, to write out the log.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self.asked = False
        self._flush = flush
        # The signal itself writes here, so a wait that is about to begin does not miss it.
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        os.set_blocking(self._read, False)

    def wake(self) -> None:
        """Makes `wait_for` check its condition again; from any thread."""
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            pass  # a full pipe wakes too

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds, checked after each signal and `wake`. For the main thread."""
        while not condition():
            select.select([self._read], [], [])
            os.read(self._read, select.PIPE_BUF)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Handles the signals while the block runs."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self.asked:
                self._flush()
                os._exit(128 + number)
            self.asked = True

        before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
        descriptor = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._read)
            os.close(self._write)


def run_until_signal(
    server: Startable, started: Callable[[], None], flush: Callable[[], None] = logging.shutdown
) -> int:
    """Starts a server, waits for a signal and stops the server; for the main thread.

    Calls `started` on the starting thread once the server serves. Returns 0 if everything was finished; else
    calls `flush` and ends the process with 1. Raises the error of a failed start.
    """
    signals = Signals(flush)
    with signals.caught():

        def work() -> None:
            server.start()
            started()  # on this thread, as it may read storage that hangs

        start = Task("conch-start", work, signals.wake)
        signals.wait_for(lambda: start.ended or signals.asked)
        if start.ended:
            start.get()
        signals.wait_for(lambda: signals.asked)
        stop = Task("conch-stop", server.stop, signals.wake)
        signals.wait_for(lambda: stop.ended)
        if stop.get():
            start.join()
            return 0
        log.error("Exit timeout expired. Exiting immediately.")
        # A normal exit would wait for threads that still run a model.
        flush()
        os._exit(1)

"""A server as a process: started, run until a signal says stop, and stopped.

The main thread does nothing but wait, for signals and for the threads that start and stop the server, so
that it answers a signal at any time: one during a long start gives that up, a second one ends the process.
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
    """What `run` runs."""

    def start(self) -> None:
        """Starts it, and returns when it serves; ends early, with an error, if it is stopped."""

    def stop(self) -> bool:
        """Stops it; from any thread, also while it starts. Returns whether everything was finished."""


class Task:
    """Something that runs on a thread of its own.

    Args:
        name: Name of the thread.
        work: What it does.
        done: Called when it has ended.
    """

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
        except BaseException as error:
            self.error = error  # for the main thread to raise
        finally:
            self.ended = True
            self._done()

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()

    def get(self) -> object:
        """What the work has returned, once it has ended.

        Raises:
            BaseException: What the work has raised.
        """
        self.join()
        if self.error is not None:
            raise self.error
        return self.result


class Signals:
    """The signals that ask the process to end, and a way to wait for them and for other things.

    Attributes:
        asked: Whether there was one. A second one ends the process at once with 128 and its number: whoever
            asks twice does not want to wait.

    Args:
        flush: Called before that: has what was logged written, if it can be written soon.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self.asked = False
        self._flush = flush
        # A signal writes here itself, whenever it comes, so none is missed by a wait that is about to begin.
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        os.set_blocking(self._read, False)

    def wake(self) -> None:
        """Has `wait_for` look again; from any thread."""
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            pass  # full of reasons to look

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds; looks after every signal and `wake`. For the main thread."""
        while not condition():
            select.select([self._read], [], [])
            os.read(self._read, select.PIPE_BUF)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Takes the signals while the block runs."""

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


def run(server: Startable, started: Callable[[], None], flush: Callable[[], None] = logging.shutdown) -> int:
    """Starts a server, runs it until a signal, and stops it; for the main thread.

    Args:
        server: The server.
        started: Called once it serves, on the thread that has started it.
        flush: Called before the process ends here: has what was logged written.

    Returns:
        The exit code: 0 if all was finished. Where it was not, the process ends here with 1.

    Raises:
        BaseException: The server could not be started.
    """
    signals = Signals(flush)
    with signals.caught():

        def work() -> None:
            server.start()
            started()  # here, as it may look at storage, which may hang

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
        # Threads that still run a model would hold up a normal exit.
        flush()
        os._exit(1)

"""Which thread of a worker reads its socket.

Whoever waits for something that a message brings reads meanwhile, unless another thread already does: so
that a single client's request, or the reply to a model's call, finds its thread without a detour over
another. While the main thread is in `execute` for long, a second thread reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from conch.workers.connection.packet_channel import ChannelClosedError

_TICK_S = 0.02
"""How long an execution lasts before another thread reads; each tick takes the interpreter from the model."""

_IDLE_TICKS = 5
"""Without an execution for so many ticks the second thread sleeps until there is one."""


class Reading:
    """The right to read.

    Args:
        step: Receives one message and does what it says; must not block for anything else.
        ready: Waits for so many seconds until there is one; returns whether there is.
    """

    def __init__(self, step: Callable[[], None], ready: Callable[[float], bool]) -> None:
        self._step = step
        self._ready = ready
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._busy = False
        self._waiting = 0

    @property
    def busy(self) -> bool:
        """Whether somebody reads."""
        return self._busy

    def until(self, done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits for something, and reads meanwhile if nobody else does.

        Args:
            done: Whether it has come; must be cheap and hold no locks.
            timeout_s: How long to wait; None for as long as it takes.

        Returns:
            Whether it has come.
        """
        lock, changed = self._lock, self._changed
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        left = None
        with lock:
            while not done():
                if deadline is not None:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                if self._busy:
                    self._waiting += 1
                    try:
                        changed.wait(left)
                    finally:
                        self._waiting -= 1
                    continue
                self._busy = True
                try:  # a signal's handler may raise as soon as it is released
                    lock.release()
                    if left is None or self._ready(left):
                        self._step()
                finally:
                    lock.acquire()
                    self._busy = False
                    if self._waiting:
                        changed.notify_all()
        return True

    def forked(self) -> None:
        """Says that this process is a fork: whoever read or waited is not there any more."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._busy = False
        self._waiting = 0


class Watch:
    """The second thread: it reads when the main thread has not for a while.

    Args:
        reading: The right to read.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._count = 0
        self._executing = False
        self._asleep = False
        self._at_once = False
        self._bell = threading.Lock()  # locked until somebody rings
        self._bell.acquire()
        threading.Thread(target=self._run, name="conch-watch", daemon=True).start()

    def begin(self) -> None:
        """Says that the main thread begins to execute."""
        self._count += 1
        self._executing = True
        if self._asleep:
            self._asleep = False
            self._ring()

    def end(self) -> None:
        """Says that the main thread is going to read again."""
        self._executing = False

    def attend(self) -> None:
        """Has messages read at once although the main thread executes: a thread is going to wait for one."""
        if self._executing and not self._reading.busy and not self._at_once:
            self._at_once = True
            self._ring()

    def _ring(self) -> None:
        try:
            self._bell.release()
        except RuntimeError:
            pass  # somebody else has rung

    def _idle(self) -> bool:
        return not self._executing

    def _run(self) -> None:
        idle = 0
        while True:
            count = self._count
            rung = self._bell.acquire(timeout=_TICK_S)
            if self._executing and (self._at_once or (not rung and self._count == count)):
                self._at_once = False
                try:
                    self._reading.until(self._idle)
                except ChannelClosedError:
                    return
                idle = 0
                continue
            self._at_once = False
            idle = idle + 1 if self._count == count else 0
            if idle < _IDLE_TICKS:
                continue
            idle = 0
            self._asleep = True
            if self._executing or self._count != count:
                self._asleep = False  # it has begun since; it may have rung too, which only costs a turn
                continue
            self._bell.acquire()

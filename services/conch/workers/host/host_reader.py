"""Chooses the thread of a worker that reads its socket.

A thread that waits for a message reads, unless another one already does: a single client's request or the
reply to a call reaches its thread without a detour. During a long `execute` a backup thread reads.

Owns: the right to read. Threads and locks: one lock, and one of each waiting thread, so that a message wakes
only those that wait for it; `conch-backup-reader` is the backup thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from conch.ipc.channel import ChannelClosedError

_TICK_S = 0.02
"""Length of an execution after which the backup thread reads; each tick takes the GIL from the model."""

_IDLE_TICKS = 5
"""Idle ticks after which the backup thread sleeps until the next execution."""


class HostReader:
    """Lets one thread at a time read.

    Args:
        step: Receives and handles one message; must not block otherwise.
        ready: Waits up to so many seconds for a message; False on a timeout.
    """

    def __init__(self, step: Callable[[], None], ready: Callable[[float], bool]) -> None:
        self._step = step
        self._ready = ready
        self._lock = threading.Lock()
        self._busy = False
        self._waiting: list[_Waiting] = []

    @property
    def busy(self) -> bool:
        """True while a thread reads."""
        return self._busy

    def until(self, done: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Waits until `done()`; reads unless another thread does.

        Args:
            done: Must be cheap and take no locks; any thread may call it.
            timeout_s: None for no limit.

        Returns:
            False on a timeout.
        """
        lock = self._lock
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        left = None
        lock.acquire()
        try:  # a signal handler may raise once the lock is released
            while not done():
                if deadline is not None:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                if self._busy:
                    self._wait(done, left)
                    continue
                self._busy = True
                try:
                    lock.release()
                    if left is None or self._ready(left):
                        self._step()
                finally:
                    lock.acquire()
                    self._busy = False
                    if self._waiting:
                        self._wake_done()
        finally:
            if self._waiting and not self._busy:
                self._waiting.pop().woken.release()  # it reads next
            lock.release()
        return True

    def _wait(self, done: Callable[[], object], timeout_s: float | None) -> None:
        """Waits until another thread has read what this one waits for, or leaves; needs the lock."""
        waiting = _Waiting(done)
        self._waiting.append(waiting)
        try:
            self._lock.release()
            waiting.woken.acquire(timeout=-1 if timeout_s is None else timeout_s)
        finally:
            self._lock.acquire()
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def _wake_done(self) -> None:
        """Wakes the threads whose wait is over; needs the lock."""
        for waiting in [each for each in self._waiting if each.done()]:
            self._waiting.remove(waiting)
            waiting.woken.release()

    def forked(self) -> None:
        """Resets in a fork, which has no threads that read or wait."""
        self._lock = threading.Lock()
        self._busy = False
        self._waiting = []


class _Waiting:
    """A thread that waits for what another one reads."""

    __slots__ = ("done", "woken")

    def __init__(self, done: Callable[[], object]) -> None:
        self.done = done
        self.woken = threading.Lock()  # locked until it is woken
        self.woken.acquire()


class BackupReader:
    """A thread that reads while the main thread executes for long.

    1. The main thread calls `arm`; the backup thread ticks every `_TICK_S`.
    2. If one execution spans a whole tick, the backup thread reads until `disarm`.
    3. After `_IDLE_TICKS` without an execution it sleeps; `arm` wakes it.
    4. `read_now` makes it read at once, for a coroutine that waits for a reply.
    """

    def __init__(self, reading: HostReader) -> None:
        self._reader = reading
        self._count = 0
        self._executing = False
        self._asleep = False
        self._at_once = False
        self._wake = threading.Lock()  # locked until the thread is woken
        self._wake.acquire()
        threading.Thread(target=self._run, name="conch-backup-reader", daemon=True).start()

    def arm(self) -> None:
        """Called as the main thread begins to execute: the backup thread reads if that takes long."""
        self._count += 1
        self._executing = True
        if self._asleep:
            self._asleep = False
            self._wake_up()

    def disarm(self) -> None:
        """Called before the main thread reads again."""
        self._executing = False

    def read_now(self) -> None:
        """Reads at once although the main thread executes: a coroutine will wait for a message."""
        if self._executing and not self._reader.busy and not self._at_once:
            self._at_once = True
            self._wake_up()

    def _wake_up(self) -> None:
        try:
            self._wake.release()
        except RuntimeError:
            pass  # woken already

    def _idle(self) -> bool:
        return not self._executing

    def _run(self) -> None:
        idle = 0
        while True:
            count = self._count
            woken = self._wake.acquire(timeout=_TICK_S)
            if self._executing and (self._at_once or (not woken and self._count == count)):
                self._at_once = False
                try:
                    self._reader.until(self._idle)
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
                self._asleep = False  # an execution began meanwhile; a spare wake-up does no harm
                continue
            self._wake.acquire()

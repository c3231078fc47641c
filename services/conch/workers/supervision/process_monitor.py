"""The thread that has workers forked, reads their output, learns of their ends and runs their timers.

The kernel ends a template with the *thread* that started it (``PR_SET_PDEATHSIG``), and workers with their
template, so one thread starts all templates and lives as long as any. Callbacks on it must not block.

Owns: the selector, timers, queued calls. Threads and locks: `conch-workers`; a lock for queues.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, TypeVar

from conch.core.clock import Clock, monotonic_ns

log = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_WAIT_S = 3600.0
"""Longest single wait; the kernel allows 24 days."""


class Timer:
    """A scheduled call."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Cancels the call unless it has started."""
        self._call = None

    def fire(self) -> None:
        """Runs the call unless it was cancelled."""
        call, self._call = self._call, None
        if call is not None:
            call()


class ProcessMonitor:
    """Runs calls, timers and descriptor readers on one thread, which ends with its last holder.

    Attributes:
        fork_servers: The `ForkServer` of each environment; only on the thread.
    """

    def __init__(self, clock: Clock = monotonic_ns) -> None:
        self.clock = clock
        self.fork_servers: dict[object, Any] = {}
        self._lock = threading.Lock()
        self._holders = 0
        self._thread: threading.Thread | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[int, int, Timer]] = []
        self._numbers = itertools.count()
        self._wake_fd = -1
        self._selector: selectors.BaseSelector | None = None

    def hold(self) -> None:
        """Keeps the thread running until the matching `release`.

        Raises:
            OSError: No descriptor is free; nothing is held.
        """
        with self._lock:
            if self._thread is None:
                self._start()
            self._holders += 1

    def release(self) -> None:
        """Ends one `hold`; the thread ends with the last."""
        with self._lock:
            self._holders -= 1
            self._wake()

    def call(self, function: Callable[[], None]) -> None:
        """Queues a call; needs a holder."""
        with self._lock:
            self._calls.append(function)
            self._wake()

    def run(self, function: Callable[[], T]) -> T:
        """Runs a function on the thread and waits for its result; not on that thread itself."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # boundary: the function; the caller of `run` gets its error
                future.set_exception(error)

        self.call(call)
        return future.result()

    def at(self, time_ns: int, function: Callable[[], None]) -> Timer:
        """Schedules a call; needs a holder."""
        timer = Timer(function)
        with self._lock:
            heapq.heappush(self._timers, (time_ns, next(self._numbers), timer))
            if self._timers[0][2] is timer:
                self._wake()
        return timer

    def watch(self, fd: int, function: Callable[[], object]) -> None:
        """Calls a function whenever a descriptor is readable; only on the thread."""
        assert self._selector is not None, "the thread runs"
        self._selector.register(fd, selectors.EVENT_READ, function)

    def unwatch(self, fd: int) -> None:
        """Stops watching a descriptor, before it is closed; only on the thread."""
        assert self._selector is not None, "the thread runs"
        self._selector.unregister(fd)

    def _start(self) -> None:
        with ExitStack() as undo:
            wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, wake_fd)
            selector = undo.enter_context(selectors.DefaultSelector())
            selector.register(wake_fd, selectors.EVENT_READ, self._woken)
            thread = threading.Thread(target=self._run, args=(selector,), name="conch-workers", daemon=True)
            undo.callback(self._forget)
            self._wake_fd, self._selector = wake_fd, selector
            thread.start()
            undo.pop_all()
        self._thread = thread

    def _forget(self) -> None:
        self._wake_fd, self._selector = -1, None

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _woken(self) -> None:
        os.eventfd_read(self._wake_fd)

    def _run(self, selector: selectors.BaseSelector) -> None:
        while True:
            with self._lock:
                calls, self._calls = self._calls, deque()
                due = self._due()
                if not calls and not due and self._holders <= 0:
                    # Under the lock: the next holder starts a new thread.
                    selector.close()
                    os.close(self._wake_fd)
                    self._wake_fd, self._selector, self._thread = -1, None, None
                    self._timers.clear()
                    return
                timeout = None
                if calls or due:
                    timeout = 0.0
                elif self._timers:
                    timeout = min(max(self._timers[0][0] - self.clock(), 0) / 1e9, _LONGEST_WAIT_S)
            for function in (*calls, *(timer.fire for timer in due)):
                _guarded(function)
            del calls, due
            for key, _ in selector.select(timeout):
                if key.fd in selector.get_map():  # an earlier callback may have removed it
                    _guarded(key.data)

    def _due(self) -> list[Timer]:
        now = self.clock()
        due = []
        while self._timers and self._timers[0][0] <= now:
            due.append(heapq.heappop(self._timers)[2])
        return due


def _guarded(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception:  # the thread serves all workers
        log.exception("a step in the supervision of Python workers failed")

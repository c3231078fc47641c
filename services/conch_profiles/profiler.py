"""The thread that counts samples, for all profiles of a server.

It collects for a moment, so that many small requests are counted together, then counts, and rests for `_REST`
times the processor time that it took, at most `_MOST_REST_S`: it takes some 0.1 % of a processor. Others run
between columns.

Threads and locks: one thread, a daemon, from `start` to `close`; one condition.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from conch.core.clock import Clock, monotonic_ns

if TYPE_CHECKING:  # needs datasketches, and servers that profile nothing have none
    from conch_profiles.input_profile import InputProfile

log = logging.getLogger(__name__)

_COLLECT_S = 0.05
_REST = 1000
_MOST_REST_S = 5.0
_PIECE_NS = 1_000_000
_MOMENT_S = 0.0001


class Profiler:
    """Counts the samples of profiles.

    Args:
        clock: Monotonic time in nanoseconds.
        used: Processor time of the calling thread in nanoseconds.
    """

    def __init__(self, clock: Clock = monotonic_ns, used: Clock = time.thread_time_ns) -> None:
        self._clock = clock
        self._used = used
        self._condition = threading.Condition()
        self._waiting: list[InputProfile] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._piece_ns = 0

    def start(self) -> None:
        """Starts the thread; a second call has no effect, nor has one after `close`."""
        with self._condition:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="conch-profiles", daemon=True)
                self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Ends the thread; True if it ended in time. What is not counted is lost."""
        with self._condition:
            self._closed.set()
            self._condition.notify_all()
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def count_soon(self, profile: InputProfile) -> None:
        """Has the samples of a profile counted; called with the first one of each time it is open."""
        with self._condition:
            self._waiting.append(profile)
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._waiting and not self._closed.is_set():
                    self._condition.wait()
            if self._closed.wait(_COLLECT_S):
                return
            with self._condition:
                profiles, self._waiting = self._waiting, []
            spent_ns = self._count(profiles)
            if self._closed.wait(min(spent_ns * _REST / 1e9, _MOST_REST_S)):
                return
            for profile in profiles:
                profile.reopen()

    def _count(self, profiles: Sequence[InputProfile]) -> int:
        """Counts, and returns the nanoseconds of processor time that it took."""
        begun_ns, self._piece_ns = self._used(), self._clock()
        for profile in profiles:
            try:
                profile.fold(self._pause)
            except Exception:  # boundary: inputs of clients; the samples are lost, and others are taken
                log.exception("samples of inputs could not be counted")
        return self._used() - begun_ns

    def _pause(self) -> None:
        """Lets other threads run, once a millisecond: one that computes keeps the interpreter for 5 ms."""
        if self._clock() - self._piece_ns > _PIECE_NS:
            self._closed.wait(_MOMENT_S)
            self._piece_ns = self._clock()

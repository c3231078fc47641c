"""Lines on their way out: whoever has one leaves it in a queue of bounded size, and one thread writes.

So nobody ever waits for a full disk, or for a pipe that nobody reads. What finds the queue full is dropped
and counted, and the count is told once there is room.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from conch.core.clock import Clock, monotonic_ns
from conch.observability.sinks import Sink

T = TypeVar("T")
Given_co = TypeVar("Given_co", covariant=True)

CAPACITY = 16 * 2**20
"""How much may wait, in bytes."""

_MOST_AT_ONCE = 256
_SHORTEST_WAIT_S = 0.001


class Delayed(Protocol[Given_co]):
    """Gives items of its own accord when their time has come."""

    def next_ns(self) -> int | None:
        """No item is due before this time; None while there is none to come."""

    def due(self, now_ns: int | None) -> Iterable[Given_co]:
        """Takes out the items whose time has come; all of them at None, as nothing is written later."""


class _Nudge:
    """Makes the thread look at what it has been told; `done` is set when it has."""

    def __init__(self) -> None:
        self.done = threading.Event()


class LineWriter(Generic[T]):
    """Writes lines on a thread of its own.

    Args:
        name: Name of the thread.
        sink: Where to; it is closed with the writer.
        render: Makes the line, without its end, of an item; runs on the thread.
        dropped: Called with how many items were dropped since the last call, on the thread, when one could be
            written again; gives an item to write, or None.
        failed: Called with what is wrong when the file could not be opened anew; gives an item, or None.
        delayed: Items that come by themselves; None for none.
        capacity: How much may wait, in bytes.
        gather_s: How long to let items gather before the next ones are written: with many small ones, waking
            up for each costs more than writing it.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        render: Callable[[T], str],
        dropped: Callable[[int], T | None],
        failed: Callable[[OSError], T | None],
        delayed: Delayed[T] | None = None,
        capacity: int = CAPACITY,
        gather_s: float = 0.0,
        clock: Clock = monotonic_ns,
    ) -> None:
        self._sink = sink
        self._render = render
        self._tell_dropped = dropped
        self._tell_failed = failed
        self._delayed = delayed
        self._capacity = capacity
        self._gather_s = gather_s
        self._clock = clock
        # Both may be entered again by the thread that is in them, as signal handlers and finalizers log too.
        self._queue: queue.SimpleQueue[tuple[T, int] | _Nudge] = queue.SimpleQueue()
        self._lock = threading.RLock()  # guards the numbers
        self._held = 0
        self._dropped = 0
        self._reopen = False
        self._closing = False
        self._hurry = threading.Event()  # there is no time to gather
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T, size: int) -> None:
        """Leaves an item to be written; never waits. After `close` nothing is taken any more.

        Args:
            item: The item.
            size: How many bytes it takes up, roughly.
        """
        if os.getpid() != self._process:
            line = self._line(item)  # after a fork the thread is not there
            self._out([] if line is None else [line])
            return
        with self._lock:
            if self._closing:
                return  # it ends; whoever closes it has said all that matters
            if self._held and self._held + size > self._capacity:
                self._dropped += 1
                return
            self._held += size
        self._queue.put((item, size))

    def nudge(self) -> None:
        """Has the thread look at its delayed items."""
        self._queue.put(_Nudge())

    def reopen(self) -> None:
        """Has the file opened anew, soon; may be called from a signal handler."""
        self._reopen = True
        self.nudge()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was put before has been written; False if it was not in time."""
        if os.getpid() != self._process or not self._thread.is_alive():
            return True
        nudge = _Nudge()
        self._hurry.set()
        self._queue.put(nudge)
        return nudge.done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Writes what there is and ends.

        Returns:
            Whether it was done in time. If not, the thread is left to itself and keeps no process alive.
        """
        if os.getpid() != self._process:
            return True
        with self._lock:
            first = not self._closing
            self._closing = True
        self._hurry.set()
        self.nudge()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if first:
            self._sink.close()
        return True

    def _run(self) -> None:
        while True:
            items, size, nudges = self._gather()
            if self._reopen:
                self._reopen = False
                self._open_anew()
            if self._delayed is not None:
                items += self._delayed.due(None if self._closing else self._clock())
            self._write(items)
            with self._lock:
                self._held -= size
                ended = self._closing and self._queue.empty()
            for nudge in nudges:
                nudge.done.set()
            if ended:
                return
            if self._gather_s and self._queue.empty():
                self._hurry.wait(self._gather_s)
                if not self._closing:
                    self._hurry.clear()

    def _gather(self) -> tuple[list[T], int, list[_Nudge]]:
        """Waits until there is something to do, and takes it."""
        items: list[T] = []
        nudges: list[_Nudge] = []
        size = 0
        try:
            found = self._queue.get(timeout=self._patience_s())
            while True:
                if isinstance(found, _Nudge):
                    nudges.append(found)
                else:
                    items.append(found[0])
                    size += found[1]
                if len(items) >= _MOST_AT_ONCE:
                    break
                found = self._queue.get_nowait()
        except queue.Empty:
            pass
        return items, size, nudges

    def _patience_s(self) -> float | None:
        next_ns = None if self._delayed is None else self._delayed.next_ns()
        return None if next_ns is None else max((next_ns - self._clock()) / 1e9, _SHORTEST_WAIT_S)

    def _write(self, items: list[T]) -> None:
        lines = [line for item in items if (line := self._line(item)) is not None]
        written = self._out(lines)
        with self._lock:
            self._dropped += len(items) - (len(lines) if written else 0)
            count = self._dropped if written else 0
        if count:
            item = self._tell_dropped(count)
            line = None if item is None else self._line(item)
            if line is None or self._out([line]):
                with self._lock:
                    self._dropped -= count

    def _out(self, lines: list[str]) -> bool:
        """Writes lines; False if there are none, or they can't be written."""
        if not lines:
            return False
        try:
            self._sink.write("".join(lines))
        except (OSError, ValueError):  # a full disk, a pipe without a reader, a closed stream
            return False
        return True

    def _line(self, item: T) -> str | None:
        try:
            return self._render(item) + "\n"
        except Exception:
            return None  # it is counted among the dropped

    def _open_anew(self) -> None:
        try:
            self._sink.reopen()
        except OSError as error:
            item = self._tell_failed(error)
            if item is not None:
                self._write([item])

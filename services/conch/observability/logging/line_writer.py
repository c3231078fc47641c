"""Writes lines on one thread from a bounded queue, so that logging never blocks on a full disk or pipe.

Items that find the queue full are dropped and counted; the count is written once there is room.
Owns the queue and the sink. Threads: `put` from any thread and from signal handlers; one writing thread.
After a fork the child has no writing thread and writes directly.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable
from logging import Logger
from typing import Generic, TypeVar

from conch.core.clock import Clock, monotonic_ns
from conch.observability.logging.log_sinks import Sink

T = TypeVar("T")

CAPACITY = 16 * 2**20
"""Capacity of the queue in bytes."""

RECORD_BYTES = 512
"""Approximate size of a record without its texts."""

_MOST_AT_ONCE = 256
_RECORD_GATHER_S = 0.05
_RECORD_CLOSE_S = 2.0
_SHORTEST_WAIT_S = 0.001


class LineSource(Generic[T]):
    """Formats a writer's items, and has delayed ones; all methods run on the writer's thread."""

    def line(self, item: T) -> str:
        """An item's line, without its end."""
        raise NotImplementedError

    def dropped_items(self, count: int) -> T | None:
        """Takes the number of dropped items when writing works again; gives an item to write, or None."""
        raise NotImplementedError

    def reopen_failed(self, error: OSError) -> T | None:
        """Takes the error of a reopening; gives an item to write, or None."""
        raise NotImplementedError

    def next_ns(self) -> int | None:
        """A lower bound of the next time at which a delayed item is due; None if none is pending."""
        return None

    def due(self, now_ns: int | None) -> Iterable[T]:
        """Removes and returns the due items; all items if `now_ns` is None."""
        return ()


class _CheckDelayed:
    """Wakes the writing thread, which sets `done` after a round."""

    def __init__(self) -> None:
        self.done = threading.Event()


class LineWriter(Generic[T]):
    """Writes lines on its own thread.

    Args:
        name: Name of the thread.
        sink: Output, closed with the writer.
        source: Makes the lines.
        capacity: Capacity of the queue in bytes.
        gather_s: Seconds to gather items before the next write: waking up costs more than writing one.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        source: LineSource[T],
        capacity: int = CAPACITY,
        gather_s: float = 0.0,
        clock: Clock = monotonic_ns,
    ) -> None:
        self._sink = sink
        self._source = source
        self._capacity = capacity
        self._gather_s = gather_s
        self._clock = clock
        # Both are reentrant: signal handlers and finalizers log too.
        self._queue: queue.SimpleQueue[tuple[T, int] | _CheckDelayed] = queue.SimpleQueue()
        self._lock = threading.RLock()  # guards the counts
        self._queued_bytes = 0
        self._dropped = 0
        self._reopen = False
        self._closing = False
        self._hurry = threading.Event()  # skip gathering
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Items dropped and not reported yet."""
        return self._dropped

    def put(self, item: T, size: int) -> None:
        """Queues an item of about `size` bytes; never blocks. Ignored after `close`."""
        if os.getpid() != self._process:
            line = self._line(item)  # a forked child has no thread
            self._write_lines([] if line is None else [line])
            return
        with self._lock:
            if self._closing:
                return
            if self._queued_bytes and self._queued_bytes + size > self._capacity:
                self._dropped += 1
                return
            self._queued_bytes += size
        self._queue.put((item, size))

    def check_delayed(self) -> None:
        """Makes the thread check its delayed items."""
        self._queue.put(_CheckDelayed())

    def reopen(self) -> None:
        """Reopens the file soon; signal-safe."""
        self._reopen = True
        self.check_delayed()

    def flush(self, timeout_s: float) -> bool:
        """Waits until earlier items are written; False on timeout."""
        if os.getpid() != self._process or not self._thread.is_alive():
            return True
        check = _CheckDelayed()
        self._hurry.set()
        self._queue.put(check)
        return check.done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Writes queued items and ends; on timeout returns False and leaves the daemon thread running."""
        if os.getpid() != self._process:
            return True
        with self._lock:
            first = not self._closing
            self._closing = True
        self._hurry.set()
        self.check_delayed()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if first:
            self._sink.close()
        return True

    def _run(self) -> None:
        while True:
            items, size, checks = self._gather()
            if self._reopen:
                self._reopen = False
                self._reopen_sink()
            items += self._source.due(None if self._closing else self._clock())
            self._write(items)
            with self._lock:
                self._queued_bytes -= size
                ended = self._closing and self._queue.empty()
            for check in checks:
                check.done.set()
            if ended:
                return
            if self._gather_s and self._queue.empty():
                self._hurry.wait(self._gather_s)
                if not self._closing:
                    self._hurry.clear()

    def _gather(self) -> tuple[list[T], int, list[_CheckDelayed]]:
        """Waits for work and takes it from the queue."""
        items: list[T] = []
        checks: list[_CheckDelayed] = []
        size = 0
        try:
            found = self._queue.get(timeout=self._wait_s())
            while True:
                if isinstance(found, _CheckDelayed):
                    checks.append(found)
                else:
                    items.append(found[0])
                    size += found[1]
                if len(items) >= _MOST_AT_ONCE:
                    break
                found = self._queue.get_nowait()
        except queue.Empty:
            pass
        return items, size, checks

    def _wait_s(self) -> float | None:
        next_ns = self._source.next_ns()
        return None if next_ns is None else max((next_ns - self._clock()) / 1e9, _SHORTEST_WAIT_S)

    def _write(self, items: list[T]) -> None:
        lines = [line for item in items if (line := self._line(item)) is not None]
        written = self._write_lines(lines)
        with self._lock:
            self._dropped += len(items) - (len(lines) if written else 0)
            count = self._dropped if written else 0
        if count:
            item = self._source.dropped_items(count)
            line = None if item is None else self._line(item)
            if line is None or self._write_lines([line]):
                with self._lock:
                    self._dropped -= count

    def _write_lines(self, lines: list[str]) -> bool:
        """Writes lines; False if there are none or writing fails."""
        if not lines:
            return False
        try:
            self._sink.write("".join(lines))
        except (OSError, ValueError):  # a full disk, a pipe without a reader, a closed stream
            return False
        return True

    def _line(self, item: T) -> str | None:
        try:
            return self._source.line(item) + "\n"
        except Exception:  # the top of the thread, and of threads that log; counted as dropped
            return None

    def _reopen_sink(self) -> None:
        try:
            self._sink.reopen()
        except OSError as error:
            item = self._source.reopen_failed(error)
            if item is not None:
                self._write([item])


class RecordLog(LineSource[T]):
    """A log of calls with a line for each record, such as the access log; a subclass makes the lines.

    Args:
        name: For its messages: ``access log``.
        sink: Output, closed with the log.
        logger: Logs lost lines.
    """

    def __init__(self, name: str, sink: Sink, logger: Logger) -> None:
        self._name = name
        self._logger = logger
        self._writer = LineWriter(f"conch-{name.replace(' ', '-')}", sink, self, gather_s=_RECORD_GATHER_S)

    def reopen(self) -> None:
        """Reopens the file soon; signal-safe."""
        self._writer.reopen()

    def close(self) -> bool:
        """Writes queued records and ends; False on a timeout of the file."""
        return self._writer.close(_RECORD_CLOSE_S)

    def dropped_items(self, count: int) -> None:
        """Logs that lines were dropped."""
        self._logger.warning(
            "lines of the %s were dropped, as they could not be written: %d", self._name, count
        )

    def reopen_failed(self, error: OSError) -> None:
        """Logs that the file could not be reopened."""
        self._logger.warning(
            "the %s could not be opened anew, the old file is written to: %s", self._name, error
        )

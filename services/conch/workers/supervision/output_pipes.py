"""The pipes from which the server reads a process's output: lines for the log, and the end of its errors.

Owns: the reading ends. Threads and locks: all on the monitor's thread, but `errors`, which any thread reads.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from functools import partial

from conch.workers.supervision.output_capture import Lines, Tail
from conch.workers.supervision.process_monitor import ProcessMonitor

printed = logging.getLogger("conch.workers.output")
"""Logs what processes print."""

_READ_BYTES = 65_536
_MOST_AT_END_BYTES = 1 << 20
"""Most bytes read after the process has ended: its children may still print."""


class OutputPipes:
    """Reads standard output and standard error of one process.

    Args:
        monitor: Its thread reads.
        name: Stands before each line in the log.
    """

    def __init__(self, monitor: ProcessMonitor, name: str) -> None:
        self._monitor = monitor
        self._name = name
        self._tail = Tail()
        self._streams: list[_Stream] = []

    @property
    def errors(self) -> str:
        """The last lines of standard error."""
        return self._tail.text()

    def open(self) -> tuple[int, int]:
        """Opens the pipes; returns the ends to write to, which the caller closes.

        Raises:
            OSError: No descriptor is free; nothing is open.
        """
        with ExitStack() as undo:
            undo.callback(self._close)
            ends: list[int] = []
            for level, tail in ((logging.INFO, None), (logging.WARNING, self._tail)):
                reader, writer = os.pipe()
                undo.callback(os.close, writer)
                ends.append(writer)
                with ExitStack() as unwatched:
                    unwatched.callback(os.close, reader)
                    os.set_blocking(reader, False)
                    stream = _Stream(reader, level, tail, Lines(self._monitor.clock))
                    self._monitor.watch(reader, partial(self._read, stream))
                    unwatched.pop_all()
                self._streams.append(stream)
            undo.pop_all()
        return ends[0], ends[1]

    def finish(self) -> None:
        """Reads what the ended process has left, and closes."""
        for stream in [*self._streams]:
            left = _MOST_AT_END_BYTES
            while left > 0 and (read := self._read(stream)) > 0:
                left -= read
        for stream in self._streams:
            for line in stream.lines.end():
                printed.log(stream.level, "%s: %s", self._name, line)
        self._close()

    def _read(self, stream: _Stream) -> int:
        """Reads what is available; returns its size, 0 at the end of the stream, -1 if nothing is."""
        try:
            data = os.read(stream.fd, _READ_BYTES)
        except BlockingIOError:
            return -1
        except OSError:
            data = b""
        if stream.tail is not None:
            stream.tail.add(data)
        for line in stream.lines.feed(data) if data else stream.lines.end():
            printed.log(stream.level, "%s: %s", self._name, line)
        if not data:
            self._forget(stream)
        return len(data)

    def _close(self) -> None:
        for stream in [*self._streams]:
            self._forget(stream)

    def _forget(self, stream: _Stream) -> None:
        self._monitor.unwatch(stream.fd)
        self._streams.remove(stream)
        os.close(stream.fd)


class _Stream:
    """The server's end of an output pipe; `tail` keeps the last bytes, `lines` splits it for the log."""

    __slots__ = ("fd", "level", "lines", "tail")

    def __init__(self, fd: int, level: int, tail: Tail | None, lines: Lines) -> None:
        self.fd = fd
        self.level = level
        self.tail = tail
        self.lines = lines

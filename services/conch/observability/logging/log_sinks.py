"""Outputs of log lines: a reopenable file, a descriptor, or a Python stream."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import TextIO


class Sink:
    """An output for text; one thread at a time uses it."""

    def write(self, text: str) -> None:
        """Writes a whole text; blocks as long as needed. Raises OSError: it can't be written."""
        raise NotImplementedError

    def reopen(self) -> None:
        """Reopens the file by name after a rename, if there is one; keeps the old one on failure.

        Raises:
            OSError: It can't be opened.
        """

    def close(self) -> None:
        """Closes the output, if it has no other owner."""


class DescriptorSink(Sink):
    """Writes unbuffered to a descriptor that it does not own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._torn = False  # the last write ended within a line

    def write(self, text: str) -> None:
        """Writes a whole text."""
        if self._torn:
            text = "\n" + text
        data = text.encode(errors="backslashreplace")
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
                self._torn = bool(left) and data[-len(left) - 1 : -len(left)] != b"\n"
            except BlockingIOError:  # a sharer of the descriptor made it non-blocking
                waiting = select.poll()
                waiting.register(self._descriptor, select.POLLOUT)
                waiting.poll()


class FileSink(DescriptorSink):
    """Appends to a file; raises OSError if it can't be opened."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        super().__init__(self._open())

    def reopen(self) -> None:
        """Reopens the file by name."""
        before, self._descriptor = self._descriptor, self._open()
        os.close(before)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


class StreamSink(Sink):
    """Writes to a stream without a descriptor."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Writes a whole text."""
        self._stream.write(text)
        self._stream.flush()


def sink_of(stream: TextIO) -> Sink:
    """A sink for a stream; bypasses its buffer if it has a descriptor."""
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError, ValueError):
        return StreamSink(stream)
    stream.flush()  # keeps earlier prints in order
    return DescriptorSink(descriptor)

"""Where lines go: a file that can be opened anew, a descriptor, or a stream of Python's."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Protocol, TextIO


class Sink(Protocol):
    """Takes text; one thread at a time uses it."""

    def write(self, text: str) -> None:
        """Writes all of a text, and returns when that is done, however long it takes.

        Raises:
            OSError: It can't be written.
        """

    def reopen(self) -> None:
        """Opens the file by its name anew, after it was renamed; goes on with the old one if it can't.

        Raises:
            OSError: It can't be opened.
        """

    def close(self) -> None:
        """Closes what it has opened."""


class DescriptorSink:
    """Writes to a file descriptor, without a buffer that others could be made to wait for.

    Args:
        descriptor: The descriptor; others may use it too.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._torn = False  # the last text ends in the middle of a line, as there was no room for the rest

    def write(self, text: str) -> None:
        """Writes all of a text; see `Sink`."""
        if self._torn:
            text = "\n" + text
        data = text.encode(errors="backslashreplace")
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
                self._torn = bool(left) and data[-len(left) - 1 : -len(left)] != b"\n"
            except BlockingIOError:  # somebody who shares the descriptor has made it so
                waiting = select.poll()
                waiting.register(self._descriptor, select.POLLOUT)
                waiting.poll()

    def reopen(self) -> None:
        """Does nothing: it has no name."""

    def close(self) -> None:
        """Does nothing: it belongs to others."""


class FileSink(DescriptorSink):
    """Appends to a file.

    Args:
        path: Its name.

    Raises:
        OSError: It can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        super().__init__(self._open())

    def reopen(self) -> None:
        """Opens the file by its name anew; see `Sink`."""
        before, self._descriptor = self._descriptor, self._open()
        os.close(before)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


class StreamSink:
    """Writes to a stream that has no descriptor."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Writes all of a text; see `Sink`."""
        self._stream.write(text)
        self._stream.flush()

    def reopen(self) -> None:
        """Does nothing: it has no name."""

    def close(self) -> None:
        """Does nothing: it belongs to others."""


def sink_of(stream: TextIO) -> Sink:
    """A sink for a stream, past its buffer where it has a descriptor."""
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError, ValueError):
        return StreamSink(stream)
    stream.flush()  # what was printed before comes before
    return DescriptorSink(descriptor)

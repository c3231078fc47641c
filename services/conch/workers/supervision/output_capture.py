"""Splits a worker's output into log lines within a rate limit, and keeps its end. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from conch.core.clock import Clock, monotonic_ns

TAIL_BYTES = 65_536
"""Bytes of output kept for a crash report."""

LINE_BYTES = 4_096
"""Longest logged line, in bytes."""

LINES_PER_SECOND = 100
_WINDOW_NS = 1_000_000_000


class Tail:
    """The last `most` bytes of a stream."""

    def __init__(self, most: int = TAIL_BYTES) -> None:
        self._most = most
        self._output = bytearray()

    def add(self, data: bytes) -> None:
        """Adds a chunk."""
        self._output += data[-self._most :]
        if len(self._output) > 2 * self._most:
            del self._output[: -self._most]

    def text(self) -> str:
        """The kept end as text, without a partial first line."""
        kept = bytes(self._output[-self._most :])
        if len(self._output) > self._most:
            kept = kept.partition(b"\n")[2] or kept
        return kept.decode(errors="replace")


class Lines:
    """Splits a stream into lines for the log: at most `per_second`, each of at most `longest` bytes."""

    def __init__(
        self, clock: Clock = monotonic_ns, per_second: int = LINES_PER_SECOND, longest: int = LINE_BYTES
    ) -> None:
        self._clock = clock
        self._per_second = per_second
        self._longest = longest
        self._begun = b""
        self._cut = 0  # bytes of the current line that were cut off
        self._window_ends_ns = 0
        self._told = 0
        self._left_out = 0

    def feed(self, data: bytes) -> Iterator[str]:
        """Adds a chunk; returns the lines to log."""
        if self._full():
            # Skips the split: a model may print faster than lines can be logged.
            self._leave_out(data.count(b"\n"))
            self._keep(data[data.rfind(b"\n") + 1 :])
            return
        if data.isspace() and b"\n" in data:
            # Blank lines are not logged and end only the current line.
            self._keep(data[: data.find(b"\n")])
            yield from self._end()
            self._keep(data[data.rfind(b"\n") + 1 :])
            return
        *lines, rest = data.split(b"\n")
        for number, line in enumerate(lines):
            if self._full():
                self._leave_out(len(lines) - number)
                break
            if self._begun or (line and not line.isspace()):
                self._keep(line)
                yield from self._end()
        self._keep(rest)

    def end(self) -> Iterator[str]:
        """Returns the last lines to log at the end of the stream."""
        if self._begun or self._cut:
            yield from self._end()
        yield from self._admitted()

    def _full(self) -> bool:
        """True while the rate limit is used up."""
        return self._told >= self._per_second and self._clock() < self._window_ends_ns

    def _leave_out(self, count: int) -> None:
        """Skips and counts lines; the first may have started in an earlier chunk."""
        if count:
            self._left_out += count
            self._begun, self._cut = b"", 0

    def _keep(self, data: bytes) -> None:
        room = self._longest - len(self._begun)
        self._begun += data[:room]
        self._cut += max(len(data) - room, 0)

    def _end(self) -> Iterator[str]:
        line, cut = self._begun, self._cut
        self._begun, self._cut = b"", 0
        text = line.decode(errors="replace").rstrip()
        if not text:
            return
        now = self._clock()
        if now >= self._window_ends_ns:
            yield from self._admitted()
            self._window_ends_ns, self._told = now + _WINDOW_NS, 0
        if self._told >= self._per_second:
            self._left_out += 1
            return
        self._told += 1
        yield f"{text} ... ({cut} more bytes)" if cut else text

    def _admitted(self) -> Iterator[str]:
        if self._left_out:
            yield f"({self._left_out} more lines are left out: a worker may log {self._per_second} a second)"
            self._left_out = 0

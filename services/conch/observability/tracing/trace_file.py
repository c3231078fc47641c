"""`TraceFile`: writes traces to Triton's trace files.

A setting with a log frequency collects so many traces for each indexed file. The others append to one file at
once; it ends with `]` after each write, so that readers find valid JSON. A setting with a count and rate 1
has an indexed file of its own. What cannot be written is dropped and counted; the next write tries again.
Owns collected texts and the ends of files; no descriptor stays open. Threads: the tracer's, and the one that
closes it after that.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from conch.core.clock import Clock, monotonic_ns
from conch.observability.exporters import DropCounter
from conch.observability.tracing.trace import Trace
from conch.observability.tracing.trace_records import tree_text
from conch.observability.tracing.trace_settings import TraceSetting
from conch.observability.tracing.trace_sink import TraceSink

log = logging.getLogger(__name__)

_MOST_HELD = 16 * 2**20
"""Characters that a setting collects before its file is written early."""

_BETWEEN_WARNINGS_NS = 60 * 10**9
_REMEMBERED = 64
# Without a wait for the reader of a named pipe, which is refused later.
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK


class _Array:
    """A file with one JSON array, which grows."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._end = 0  # where `]` stands; 0 before anything is written

    def append(self, text: str) -> None:
        """Adds elements; raises OSError, after which the array is as before if the disk allows it."""
        descriptor = os.open(self.path, _OPEN, 0o644)
        try:
            end = self._end
            if end and os.fstat(descriptor).st_size <= end:
                end = 0  # moved away or emptied by another program
            data = (("," if end else "[") + text + "]").encode()
            try:
                if not end:
                    with suppress(OSError):  # no regular file
                        os.ftruncate(descriptor, 0)
                _write_all(descriptor, data, end)
            except OSError:
                closing = b"]" if end else b"[]"
                with suppress(OSError):  # what was written before keeps its valid end
                    _write_all(descriptor, closing, end)
                    os.ftruncate(descriptor, end + len(closing))
                raise
            self._end = end + len(data) - 1
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left = left[written:]
        offset += written


class _Collected:
    """Traces of one setting that are not written yet."""

    def __init__(self, setting: TraceSetting) -> None:
        self.setting = setting
        self.texts: list[str] = []
        self.size = 0
        self.sampled = 0
        self.indexed: _Array | None = None

    def add(self, root: Trace, text: str) -> None:
        """Takes a tree."""
        self.texts.append(text)
        self.size += len(text)
        self.sampled += root.reason == "sampled"

    @property
    def counts_down(self) -> bool:
        """True if traces go to an indexed file, as in Triton, without a log frequency: a count at rate 1."""
        values = self.setting.values
        return values.count > 0 and values.rate == 1

    @property
    def full(self) -> bool:
        """True if a file must be written now."""
        if self.size >= _MOST_HELD:
            return True
        values = self.setting.values
        if not values.log_frequency:
            return False
        if len(self.texts) >= values.log_frequency:
            return True
        return self.counts_down and not self.setting.remaining and self.sampled >= values.count


class TraceFile(TraceSink):
    """Writes traces to files.

    Args:
        drops: Counts traces that could not be written, as ``disk``.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(self, drops: DropCounter, clock: Clock = monotonic_ns) -> None:
        self._drops = drops
        self._clock = clock
        self._collected: dict[TraceSetting, _Collected] = {}
        # A request in flight may end after its setting was replaced.
        self._replaced: deque[TraceSetting] = deque(maxlen=_REMEMBERED)
        self._files: dict[str, _Array] = {}
        self._indices: dict[str, int] = {}  # next index by file name
        self._warn_ns: int | None = None
        self._unreported = 0

    def write(self, roots: Sequence[Trace]) -> None:
        """Writes trees, or collects them."""
        touched: dict[TraceSetting, _Collected] = {}
        for root in roots:
            setting = root.setting
            if not setting.values.file or not (text := tree_text(root)):
                continue
            collected = self._collected.get(setting)
            if collected is None:
                collected = self._collected[setting] = _Collected(setting)
            collected.add(root, text)
            touched[setting] = collected
            if collected.full:
                self._put_out(collected)
        for setting, collected in touched.items():
            if setting in self._replaced:
                self._put_out(collected)
                del self._collected[setting]
            elif not setting.values.log_frequency:
                self._put_out(collected)

    def replaced(self, setting: TraceSetting) -> None:
        """Writes what a setting that was replaced has collected."""
        collected = self._collected.pop(setting, None)
        if collected is not None:
            self._put_out(collected)
        self._replaced.append(setting)

    def close(self, deadline_s: float) -> None:
        """Writes what is collected; drops what is left at a time of the monotonic clock."""
        for collected in self._collected.values():
            if time.monotonic() < deadline_s:
                self._put_out(collected)
            elif collected.texts:
                self._drops.add("shutdown", len(collected.texts))
        self._collected.clear()

    def _put_out(self, collected: _Collected) -> None:
        """Writes what a setting has collected."""
        texts, collected.texts, collected.size = collected.texts, [], 0
        if not texts:
            return
        file = self._file_of(collected)
        try:
            file.append(",".join(texts))
        except OSError as error:
            self._failed(file.path, error, len(texts))
            return
        if collected.setting.values.log_frequency:
            collected.indexed = None

    def _file_of(self, collected: _Collected) -> _Array:
        """The setting's next indexed file, or the one file."""
        path = collected.setting.values.file
        if not (collected.setting.values.log_frequency or collected.counts_down):
            if path not in self._files:
                self._files[path] = _Array(path)
            return self._files[path]
        if collected.indexed is None:
            index = self._indices.get(path, 0)
            self._indices[path] = index + 1
            collected.indexed = _Array(f"{path}.{index}")
        return collected.indexed

    def _failed(self, path: str, error: OSError, number: int) -> None:
        self._drops.add("disk", number)
        self._unreported += number
        now = self._clock()
        if self._warn_ns is None or now >= self._warn_ns:
            self._warn_ns = now + _BETWEEN_WARNINGS_NS
            reason = error.strerror or error
            log.warning("failed creating trace file: %s: %s; traces lost: %d", path, reason, self._unreported)
            self._unreported = 0

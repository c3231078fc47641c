"""Counts the ends of calls, second by second, for one load process."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable

from conch_tools.perf.load.calls import LoadCall
from conch_tools.perf.measure.records import CallRecord
from conch_tools.perf.measure.slices import Slice

_SECOND_NS = 1_000_000_000
_LATE_NS = 1_000_000


class Recorder:
    """Fills a `Slice` for each second, by the ends of calls.

    Args:
        begin_ns: Start of the load, monotonic.
        give: Takes each slice when its second is over.
    """

    def __init__(self, begin_ns: int, give: Callable[[Slice], object]) -> None:
        self._begin_ns = begin_ns
        self._give = give
        self._ends_ns = begin_ns + _SECOND_NS
        self._slice = Slice(0)
        self._new_times()

    def _new_times(self) -> None:
        self._latency, self._service = array("q"), array("q")
        self._first, self._between = array("q"), array("q")
        self._next_one, self._token = array("q"), array("q")

    def sent(self, ready_ns: int, now_ns: int) -> None:
        """Counts a call that is sent, and could have been since a time."""
        if now_ns >= self._ends_ns:
            self._turn(now_ns)
        self._slice.sent += 1
        if now_ns - ready_ns > _LATE_NS:
            self._slice.late += 1

    def shed(self, now_ns: int) -> None:
        """Counts a call that is never sent."""
        if now_ns >= self._ends_ns:
            self._turn(now_ns)
        self._slice.shed += 1

    def responded(self, call: LoadCall, now_ns: int) -> None:
        """Counts a response of a stream."""
        if now_ns >= self._ends_ns:
            self._turn(now_ns)
        if call.last_ns:
            self._between.append(now_ns - call.last_ns)
            if call.responses == 1:
                self._next_one.append(now_ns - call.last_ns)
        else:
            call.first_ns = now_ns
            self._first.append(now_ns - call.sent_ns)

    def ended(self, call: LoadCall, error: str, now_ns: int) -> None:
        """Counts an end."""
        if now_ns >= self._ends_ns:
            self._turn(now_ns)
        if error:
            self._slice.errors[error] += 1
            return
        self._slice.answered += 1
        self._slice.responses += call.responses
        last_ns = call.last_ns or now_ns
        self._latency.append(last_ns - call.due_ns)
        self._service.append(last_ns - call.sent_ns)
        if call.responses > 1 and call.first_ns:
            self._token.append((last_ns - call.first_ns) // (call.responses - 1))
        if call.kept is not None:
            self._slice.records.append(
                CallRecord(call.request.row, call.request.sequence_id, call.sent_ns, call.kept)
            )

    def sequence_ended(self, now_ns: int) -> None:
        """Counts a sequence."""
        if now_ns >= self._ends_ns:
            self._turn(now_ns)
        self._slice.sequences += 1

    def failed(self, error: str, now_ns: int) -> None:
        """Counts an error that is no call's end."""
        if now_ns >= self._ends_ns:
            self._turn(now_ns)
        self._slice.errors[error] += 1

    def passed(self, now_ns: int) -> None:
        """Gives the slices of seconds that are over, also of those without calls."""
        while now_ns >= self._ends_ns:
            self._turn(self._ends_ns)

    def finish(self) -> None:
        """Gives the last slice; what comes after it does not count."""
        self._fold()
        self._ends_ns = sys.maxsize

    def _turn(self, now_ns: int) -> None:
        self._fold()
        second = (now_ns - self._begin_ns) // _SECOND_NS
        self._slice = Slice(second)
        self._ends_ns = self._begin_ns + (second + 1) * _SECOND_NS
        self._new_times()

    def _fold(self) -> None:
        found = self._slice
        found.latency.record(self._latency)
        found.service.record(self._service)
        found.first.record(self._first)
        found.between.record(self._between)
        found.next_one.record(self._next_one)
        found.token.record(self._token)
        self._give(found)

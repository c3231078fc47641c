"""Times of one request for the page that tries requests, in front of access log and traces.

Threads and locks: the threads that handle the request, each field once.
"""

from __future__ import annotations

from typing import Any

from conch.core.errors import ConchError
from conch.core.request import InferenceRequest, RequestModel, RunTimes, SpanRecord, Watch
from conch.core.request_log import Caller, RequestLog

_PROTOCOL = "http"
"""Of the page's requests in access log and traces; the audit log names the console's port."""


class TimedRequests:
    """A `RequestLog` that notes the times of each request, and passes all on to the server's, as of HTTP.

    Args:
        within: The server's; None for none.
    """

    on = True

    def __init__(self, within: RequestLog | None) -> None:
        self._within = within
        self.adds_metadata = within is not None and within.adds_metadata

    def begin(
        self,
        request: InferenceRequest,
        model: RequestModel,
        protocol: str,
        caller: Caller | None,
        bytes_in: int,
    ) -> None:
        """See `RequestLog`."""
        if self._within is not None and self._within.on:
            self._within.begin(request, model, _PROTOCOL, caller, bytes_in)
        model.statistics.watched = True
        request.watch = TimedWatch(request.watch)

    def refuse(
        self,
        request: InferenceRequest | None,
        error: ConchError,
        protocol: str,
        caller: Caller | None,
        bytes_in: int,
        received_ns: int,
    ) -> None:
        """See `RequestLog`."""
        if self._within is not None:
            self._within.refuse(request, error, _PROTOCOL, caller, bytes_in, received_ns)


class TimedWatch:
    """A `Watch` that keeps the times of the batch.

    Args:
        within: The watch of access log and traces; None for none.
    """

    def __init__(self, within: Watch | None) -> None:
        self._within = within
        self._times: RunTimes | None = None
        self.bytes_out = 0

    @property
    def times(self) -> RunTimes | None:
        """See `Watch`."""
        return self._times

    @times.setter
    def times(self, times: RunTimes | None) -> None:
        self._times = times
        if self._within is not None:
            self._within.times = times

    def run(self, times: RunTimes) -> None:
        """See `Watch`."""
        self._times = times
        if self._within is not None:
            self._within.run(times)

    def step(self, request: InferenceRequest, model: RequestModel, kind: str = "ensemble-step") -> None:
        """See `Watch`."""
        if self._within is not None:
            self._within.step(request, model, kind)

    def refused(self, request: InferenceRequest, error: ConchError) -> None:
        """See `Watch`."""
        if self._within is not None:
            self._within.refused(request, error)

    def add_span(self, span: SpanRecord) -> None:
        """See `Watch`."""
        if self._within is not None:
            self._within.add_span(span)

    @property
    def trace_context(self) -> str:
        """See `Watch`."""
        return "" if self._within is None else self._within.trace_context


def timing(request: InferenceRequest, now_ns: int) -> dict[str, Any]:
    """Microseconds of the stages of a request that has ended; the batch that it ran in."""
    found: dict[str, Any] = {"total_us": (now_ns - request.received_ns) / 1000, "stages": []}
    watch = request.watch
    times = None if watch is None else watch.times
    if times is None or not request.queued_ns:
        return found
    end = times.end_ns or now_ns
    input_end = times.input_end_ns or times.start_ns
    output_start = times.output_start_ns or end
    marks = (request.received_ns, request.queued_ns, times.start_ns, input_end, output_start, end, now_ns)
    names = ("receive", "queue", "input", "infer", "output", "respond")
    found["stages"] = [
        [name, max(after - before, 0) / 1000]
        for name, before, after in zip(names, marks, marks[1:], strict=False)
    ]
    found["batch"] = {"rows": times.size, "requests": times.requests}
    return found

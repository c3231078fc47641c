"""`Tracer`: samples requests, and hands what has ended to the sinks.

The request path makes `Trace` objects and appends ended trees to a queue. The thread `conch-trace` looks at
the queue every `_INTERVAL_S`, keeps trees whose subrequests have not ended for up to `_MOST_WAIT_NS`, and
writes the others. A full queue drops the newest; drops are counted.

Threads and locks: `begin`, `child` and `end` from any thread, without locks; a lock guards starting and
closing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from random import Random

from conch.core.request import InferenceRequest, RunTimes, TracedBatch
from conch.core.request_log import Caller
from conch.observability.exporters import DropCounter, SpanOptions
from conch.observability.tracing.trace import Trace
from conch.observability.tracing.trace_context import format_traceparent, parse_traceparent
from conch.observability.tracing.trace_options import TailRules
from conch.observability.tracing.trace_settings import (
    SettingListener,
    TraceSetting,
    TraceSettings,
    ratio_threshold,
)
from conch.observability.tracing.trace_sink import TraceSink

log = logging.getLogger(__name__)

_INTERVAL_S = 0.1
_MOST_WAIT_NS = 10**9
_MOST_QUEUED = 8192
_SECOND_NS = 10**9


class Tracer(SettingListener):
    """Traces the requests of a server.

    Args:
        settings: Global and per-model settings.
        sinks: Take the traces.
        drops: Counts lost traces.
        tail: Rules that keep traces of requests after their end.
        spans: Settings of mode ``opentelemetry``; None for mode ``triton``.

    Attributes:
        settings: As given.
        propagates: True if callers' spans are continued: in mode ``opentelemetry``.
        returns_traceparent: True if the answer to a request that is sampled names its root span.
        drops: As given.
    """

    def __init__(
        self,
        settings: TraceSettings,
        sinks: Sequence[TraceSink] = (),
        drops: DropCounter | None = None,
        tail: TailRules | None = None,
        spans: SpanOptions | None = None,
    ) -> None:
        self.propagates = spans is not None
        spans = spans or SpanOptions()
        self.settings = settings
        self._sinks = sinks
        self.drops = drops or DropCounter()
        self._tail = tail or TailRules()
        self._by_id = spans.ratio > 0
        self._threshold = ratio_threshold(spans.ratio)
        # Requests that neither their rate nor their caller samples.
        self._keeps_some = bool(self._tail) or self._by_id
        self._follows_unsampled = spans.follows_unsampled
        self._batch_spans = spans.batch_spans
        self.returns_traceparent = spans.returns_traceparent
        self._number = count(1).__next__
        # Its own, as models may seed the generator of `random`.
        self._bits = Random().getrandbits
        self._queue: deque[Trace | TraceSetting] = deque()
        self._waiting: list[Trace] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._second = self._in_second = 0
        settings.add_listener(self)

    @property
    def on(self) -> bool:
        """True if any model is traced."""
        return self.settings.on

    def setting_replaced(self, setting: TraceSetting) -> None:
        """Has the sinks write what they collected for a setting, after the traces that ended before."""
        self._queue.append(setting)

    def begin(
        self, request: InferenceRequest, model: str, protocol: str, caller: Caller | None
    ) -> Trace | None:
        """The trace of a client's request; None if it is not traced."""
        setting = self.settings.of(model)
        if not setting.on:
            return None
        span = None
        if self.propagates and caller is not None and (text := caller.header("traceparent")):
            span = parse_traceparent(text, caller.header("tracestate"))
        sampled = setting.sample()
        if span is not None and (span.sampled or self._follows_unsampled):
            sampled = True
        if not sampled and not self._keeps_some:
            return None
        trace_id = self._bits(128) if span is None else span.trace_id
        if not sampled and self._by_id:
            sampled = setting.sample_id(trace_id, self._threshold)
            if not sampled and not self._tail:
                return None
        trace = Trace(self._number(), setting, None, protocol, trace_id, self._bits(64))
        trace.caller = span
        if caller is not None:
            trace.read_ns = caller.read_ns
            if self.propagates:
                trace.path, trace.client, trace.agent = (
                    caller.path,
                    caller.client,
                    caller.header("user-agent"),
                )
        if sampled:
            trace.reason = "sampled"
            if self.returns_traceparent and caller is not None:
                trace.root_id = self._bits(64)
                caller.add_response_metadata("traceparent", format_traceparent(trace_id, trace.root_id, True))
        return trace

    def child(self, parent: Trace, protocol: str) -> Trace:
        """The trace of a subrequest."""
        trace = Trace(self._number(), parent.setting, parent, protocol, parent.trace_id, self._bits(64))
        trace.reason = parent.reason
        return trace

    def linked(self, trace: Trace) -> Trace:
        """The trace of a copy of a sampled request: of its own, with a link."""
        copy = Trace(self._number(), trace.setting, None, "shadow", self._bits(128), self._bits(64))
        copy.link = trace.trace_id, trace.span_id
        copy.reason = "sampled"
        return copy

    def join_batch(self, trace: Trace, times: RunTimes) -> None:
        """Links a sampled request and the span of its batch; called by the thread that runs the batch."""
        if not self._batch_spans:
            return
        if times.batch is None:
            times.batch = TracedBatch(self._bits(128), self._bits(64), times.requests, [])
        times.batch.members.append((trace.trace_id, trace.span_id))

    def end_trace(self, trace: Trace, now_ns: int) -> None:
        """Ends a trace; a root that is kept is written soon."""
        if trace.parent is not None:
            trace.ended_ns = now_ns
            return
        if not trace.reason:
            tail = self._tail
            if tail.failed and trace.error is not None:
                trace.reason = "failed"
            elif tail.slow_ns and now_ns - trace.received_ns > tail.slow_ns:
                trace.reason = "slow"
            else:
                return
            if not self._within_limit(now_ns):
                self.drops.add("limit", 1)
                return
        trace.ended_ns = now_ns
        if len(self._queue) >= _MOST_QUEUED:
            self.drops.add("queue_full", 1)
            return
        self._queue.append(trace)
        if self._thread is None:
            self._start()

    def close(self, timeout_s: float) -> None:
        """Writes what has ended, and closes the sinks, within a time."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._closing.set()
            thread = self._thread
        if thread is not None:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
            if thread.is_alive():
                self.drops.add("shutdown", len(self._queue) + len(self._waiting))
                return
        self._write(final=True)
        for sink in self._sinks:
            sink.close(deadline_s)

    def _within_limit(self, now_ns: int) -> bool:
        # Without a lock: a few too many in a second do no harm.
        second = now_ns // _SECOND_NS
        if second != self._second:
            self._second, self._in_second = second, 0
        self._in_second += 1
        return self._in_second <= self._tail.limit

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="conch-trace", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(_INTERVAL_S):
            try:
                self._write(final=False)
            except Exception:  # the top of the thread, which has to go on
                log.exception("traces could not be written")

    def _write(self, final: bool) -> None:
        """Writes trees that are complete, or have waited long enough."""
        queue = self._queue
        items = [*self._waiting, *(queue.popleft() for _ in range(len(queue)))]
        self._waiting = []
        ready: list[Trace] = []
        now = time.monotonic_ns()
        for item in items:
            if isinstance(item, TraceSetting):
                self._hand_over(ready)
                ready = []
                for sink in self._sinks:
                    sink.replaced(item)
            elif final or now - item.ended_ns > _MOST_WAIT_NS or _complete(item):
                ready.append(item)
            else:
                self._waiting.append(item)
        self._hand_over(ready)

    def _hand_over(self, roots: list[Trace]) -> None:
        if roots:
            for sink in self._sinks:
                sink.write(roots)


def _complete(trace: Trace) -> bool:
    return bool(trace.ended_ns) and all(_complete(child) for child in trace.children)

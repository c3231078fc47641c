"""`OtlpExporter`: sends traces to an OpenTelemetry collector.

The thread `conch-otlp` waits for a batch or the delay, makes spans of trees, and sends them; it tries again
with growing pauses where the protocol allows it. Owns the queue, bounded in spans: a tree that does not fit
is dropped as a whole, and counted. A collector that hangs holds up this thread only.
Threads and locks: the tracer's thread writes, any closes; one condition guards queue and counts.
Used by: `open_tracing`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from conch.core.errors import UnavailableError
from conch.observability.metrics.trace_metrics import ExportCounts
from conch.observability.tracing.otlp_options import HTTP_JSON, OtlpOptions
from conch.observability.tracing.trace import Trace
from conch.observability.tracing.trace_setting import TraceSetting
from conch.observability.tracing.trace_sink import DropCounter

if TYPE_CHECKING:
    from conch.observability.tracing.otlp_transport import Outcome

log = logging.getLogger(__name__)

MOST_BYTES = 4 * 2**20
"""Of one request."""

_JSON_GROWTH = 4  # of a message that is JSON, at most about
_MOST_TRIES = 6
_FIRST_PAUSE_S, _MOST_PAUSE_S, _MOST_ASKED_S = 1.0, 30.0, 300.0
_BETWEEN_WARNINGS_S = 60.0
_ABORT_S = 0.5  # for the thread to end after its send was aborted


class OtlpExporter:
    """A `TraceSink` that exports.

    Args:
        options: Where and how.
        drops: Counts lost spans.
        first_pause_s: Before the second try; it doubles with each further one.

    Raises:
        UnavailableError: The package of the messages is missing.
        InvalidArgumentError: The certificate can't be used.
    """

    def __init__(
        self, options: OtlpOptions, drops: DropCounter, first_pause_s: float = _FIRST_PAUSE_S
    ) -> None:
        try:
            from conch.observability.tracing.otlp_spans import SpanEncoder, span_count
            from conch.observability.tracing.otlp_transport import open_transport
        except ModuleNotFoundError as error:
            raise UnavailableError(
                f"trace mode opentelemetry needs a package that is missing ({error.name}): "
                "pip install 'conch[opentelemetry]'"
            ) from None
        self._options = options
        self._drops = drops
        self._first_pause_s = first_pause_s
        self._most_bytes = MOST_BYTES // (_JSON_GROWTH if options.protocol == HTTP_JSON else 1)
        self._encoder = SpanEncoder(options)
        self._span_count = span_count
        self._transport = open_transport(options)
        self._changed = threading.Condition()
        self._queue: deque[tuple[Trace, int]] = deque()
        self._queued = 0  # spans
        self._sending = 0  # spans out of the queue whose fate is open
        self._exported = 0
        self._exports = {"ok": 0, "partial": 0, "retried": 0, "failed": 0}
        self._closing = False
        self._deadline_s = float("inf")
        self._thread: threading.Thread | None = None
        self._warn_s = 0.0

    def counts(self) -> ExportCounts:
        """Numbers for the metrics port."""
        with self._changed:
            return ExportCounts(self._exported, dict(self._exports), self._queued)

    def write(self, roots: Sequence[Trace]) -> None:
        """Queues trees; see `TraceSink`."""
        lost = 0
        with self._changed:
            for root in roots:
                number = self._span_count(root)
                if self._closing or self._queued + number > self._options.queue_size:
                    lost += number
                else:
                    self._queue.append((root, number))
                    self._queued += number
            closing = self._closing
            if self._queue:
                if self._thread is None and not closing:
                    self._thread = threading.Thread(target=self._run, name="conch-otlp", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        if lost:
            self._drops.add("shutdown" if closing else "queue_full", lost)
            if not closing:  # Triton's text
                log.debug("BatchSpanProcessor queue is full - dropping span.")

    def replaced(self, setting: TraceSetting) -> None:
        """Does nothing: spans are not collected by setting; see `TraceSink`."""

    def close(self, deadline_s: float) -> None:
        """Sends what is queued until a monotonic time, drops the rest, and ends; see `TraceSink`."""
        with self._changed:
            self._closing, self._deadline_s = True, deadline_s
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
            if thread.is_alive():
                self._transport.abort()
                thread.join(_ABORT_S)
        with self._changed:
            lost = self._queued + self._sending
            self._queue.clear()
            self._queued = self._sending = 0
        if lost:
            self._drops.add("shutdown", lost)
            log.warning("stopped before %d spans were exported to %s", lost, self._address)
        if thread is None or not thread.is_alive():
            self._transport.close()

    @property
    def _address(self) -> str:
        return self._options.url.geturl()

    def _run(self) -> None:
        while roots := self._next():
            try:
                for request, number in self._encoder.requests(
                    roots, self._options.batch_size, self._most_bytes
                ):
                    self._deliver(request, number)
            except Exception as error:  # the thread must go on
                log.exception("spans could not be exported")
                self._settle(self._sending, "export_failed", "failed", repr(error))
            with self._changed:
                lost, self._sending = self._sending, 0
            if lost:
                self._drops.add("shutdown", lost)

    def _next(self) -> list[Trace]:
        """Waits for trees and takes a batch of them; empty when the exporter ends."""
        options = self._options
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            self._changed.wait_for(
                lambda: self._queued >= options.batch_size or self._closing, options.delay_s
            )
            if self._closing and time.monotonic() >= self._deadline_s:
                return []
            roots: list[Trace] = []
            while self._queue:
                root, number = self._queue[0]
                if roots and self._sending + number > options.batch_size:
                    break
                self._queue.popleft()
                roots.append(root)
                self._queued -= number
                self._sending += number
            return roots

    def _deliver(self, request: bytes, number: int) -> None:
        """Sends a request, again and again if need be, and counts its spans."""
        pause_s = self._first_pause_s
        for left in reversed(range(_MOST_TRIES)):
            timeout_s = min(self._options.timeout_s, self._deadline_s - time.monotonic())
            if timeout_s <= 0:
                return  # counted by the thread at its end
            outcome = self._transport.send(request, timeout_s)
            if outcome.taken:
                self._taken(outcome, number)
                return
            if not outcome.again:
                self._settle(number, "rejected", "failed", outcome.error)
                return
            if not left:
                break
            if self._closing:
                return  # counted by the thread at its end
            self._settle(0, "", "retried", outcome.error)
            wait_s = min(max(pause_s * random.uniform(0.8, 1.2), outcome.after_s), _MOST_ASKED_S)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
            with self._changed:
                # The end of the server is worth a last try at once.
                self._changed.wait_for(lambda: self._closing, wait_s)
        self._settle(number, "export_failed", "failed", outcome.error)

    def _taken(self, outcome: Outcome, number: int) -> None:
        rejected = min(outcome.rejected, number)
        with self._changed:
            if self._sending:
                self._exported += number - rejected
        self._settle(number, "rejected", "partial" if rejected else "ok", outcome.error, rejected)

    def _settle(self, number: int, reason: str, result: str, error: str, lost: int | None = None) -> None:
        """Counts a try, and the spans whose fate it decided."""
        lost = number if lost is None else lost
        with self._changed:
            self._exports[result] += 1
            if number and not self._sending:
                return  # `close` has counted them
            self._sending = max(self._sending - number, 0)
        if lost:
            self._drops.add(reason, lost)
        if error:
            self._warn(result, error, lost)

    def _warn(self, result: str, error: str, lost: int) -> None:
        now = time.monotonic()
        if now >= self._warn_s:
            self._warn_s = now + _BETWEEN_WARNINGS_S
            log.warning(
                "exporting spans to %s: %s; %s, %d spans dropped; further errors are counted for a minute",
                self._address,
                error,
                result,
                lost,
            )

"""`OtlpExporter`: sends the items of one signal to an OpenTelemetry collector.

A thread waits for a batch or the delay, encodes it, and sends it; it tries again with growing pauses where
the protocol allows it. Owns the queue, bounded in items: what does not fit is dropped, and counted. A
collector that hangs holds up this thread only. docs/adr/0007-otlp-exporter.md says why this is not
OpenTelemetry's SDK.
Threads and locks: `export` and `close` from any thread; one condition guards queue and counts.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from conch.observability.exporters import LOGS, METRICS, TRACES, DropCounter, ExportCounts
from conch_otlp.endpoint import HTTP_JSON, OtlpEndpoint, QueueLimits
from conch_otlp.transport import SendOutcome, open_transport

log = logging.getLogger(__name__)

_MOST_BYTES = 4 * 2**20  # of one request
_JSON_GROWTH = 4  # of a message that is JSON, at most about
_MOST_TRIES = 6
_MOST_PAUSE_S, _MOST_ASKED_S = 30.0, 300.0
_BETWEEN_WARNINGS_S = 60.0
_ABORT_S = 0.5  # for the thread to end after its send was aborted
_ITEMS = {TRACES: "spans", METRICS: "data points of metrics", LOGS: "log records"}

Item = TypeVar("Item")
Queued = TypeVar("Queued")
Item_contra = TypeVar("Item_contra", contravariant=True)


class Encoder(Protocol[Item_contra, Queued]):
    """Makes export requests of the items of one signal."""

    def queued(self, items: Sequence[Item_contra]) -> Iterable[tuple[Queued, int]]:
        """Entries of the queue for items, each with the number that it counts; on the caller's thread."""

    def requests(self, queued: Sequence[Queued], most: int, most_bytes: int) -> Iterable[tuple[bytes, int]]:
        """Requests within limits, each with its number of items; on the exporter's thread."""


class OtlpExporter(Generic[Item, Queued]):
    """Exports one signal; an `Exporter`.

    Args:
        endpoint: Address of the collector.
        limits: Limits of the queue.
        encoder: Makes requests.
        drops: Counts lost items.
        first_pause_s: Seconds before the second try; they double with each further one.

    Raises:
        InvalidArgumentError: The certificate can't be used.
    """

    def __init__(
        self,
        endpoint: OtlpEndpoint,
        limits: QueueLimits,
        encoder: Encoder[Item, Queued],
        drops: DropCounter,
        first_pause_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._limits = limits
        self._encoder = encoder
        self._what = _ITEMS[endpoint.signal]
        self._drops = drops
        self._first_pause_s = first_pause_s
        self._most_bytes = _MOST_BYTES // (_JSON_GROWTH if endpoint.protocol == HTTP_JSON else 1)
        self._transport = open_transport(endpoint)
        self._changed = threading.Condition()
        self._queue: deque[tuple[Queued, int]] = deque()
        self._queued = 0
        self._sending = 0  # items out of the queue whose fate is open
        self._exported = 0
        self._exports = {"ok": 0, "partial": 0, "retried": 0, "failed": 0}
        self._closing = False
        self._deadline_s = float("inf")
        self._thread: threading.Thread | None = None
        self._warn_s = 0.0

    @property
    def drops(self) -> DropCounter:
        """Lost items."""
        return self._drops

    def counts(self) -> ExportCounts:
        """Numbers for the metrics port."""
        with self._changed:
            return ExportCounts(self._exported, dict(self._exports), self._queued)

    def export(self, items: Sequence[Item]) -> None:
        """Queues items; a tree of traces waits, or is dropped, as a whole."""
        queued = list(self._encoder.queued(items))
        lost = 0
        with self._changed:
            for item, number in queued:
                if self._closing or self._queued + number > self._limits.queue_size:
                    lost += number
                else:
                    self._queue.append((item, number))
                    self._queued += number
            closing = self._closing
            if self._queue:
                if self._thread is None and not closing:
                    name = f"conch-otlp-{self._endpoint.signal}"
                    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                    self._thread.start()
                self._changed.notify_all()
        if lost:
            self._drops.add("shutdown" if closing else "queue_full", lost)
            if not closing and self._endpoint.signal == TRACES:  # Triton's text
                log.debug("BatchSpanProcessor queue is full - dropping span.")

    def close(self, deadline_s: float) -> None:
        """Sends what is queued until a monotonic time, drops the rest, and ends."""
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
            log.warning("stopped before %d %s were exported to %s", lost, self._what, self._address)
        if thread is None or not thread.is_alive():
            self._transport.close()

    @property
    def _address(self) -> str:
        return self._endpoint.url.geturl()

    def _run(self) -> None:
        while items := self._next():
            try:
                batch_size = self._limits.batch_size
                for request, number in self._encoder.requests(items, batch_size, self._most_bytes):
                    self._deliver(request, number)
            except Exception as error:  # the top of the thread, which has to go on
                log.exception("%s could not be exported", self._what)
                self._settle(self._sending, "export_failed", "failed", repr(error))
            with self._changed:
                lost, self._sending = self._sending, 0
            if lost:
                self._drops.add("shutdown", lost)

    def _next(self) -> list[Queued]:
        """Waits for items and takes a batch of them; empty when the exporter ends."""
        limits = self._limits
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            self._changed.wait_for(lambda: self._queued >= limits.batch_size or self._closing, limits.delay_s)
            if self._closing and time.monotonic() >= self._deadline_s:
                return []
            items: list[Queued] = []
            while self._queue:
                item, number = self._queue[0]
                if items and self._sending + number > limits.batch_size:
                    break
                self._queue.popleft()
                items.append(item)
                self._queued -= number
                self._sending += number
            return items

    def _deliver(self, request: bytes, number: int) -> None:
        """Sends a request, again and again if need be, and counts its items."""
        pause_s = self._first_pause_s
        for left in reversed(range(_MOST_TRIES)):
            timeout_s = min(self._endpoint.timeout_s, self._deadline_s - time.monotonic())
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

    def _taken(self, outcome: SendOutcome, number: int) -> None:
        rejected = min(outcome.rejected, number)
        with self._changed:
            if self._sending:
                self._exported += number - rejected
        self._settle(number, "rejected", "partial" if rejected else "ok", outcome.error, rejected)

    def _settle(self, number: int, reason: str, result: str, error: str, lost: int | None = None) -> None:
        """Counts a try, and the items whose fate it decided."""
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
                "exporting %s to %s: %s; %s, %d %s dropped; further errors are counted for a minute",
                self._what,
                self._address,
                error,
                result,
                lost,
                self._what,
            )

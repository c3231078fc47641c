"""Statistics of a model version, as defined by Triton's statistics extension.

Durations are in nanoseconds. Locks: one per model version, taken once per executed batch.

A request is counted once: with its batch (`record_batch`), with its last response if that comes apart from
the batch (`record_request`), or where it leaves the queue without running (`record_rejection` and others).
An execution is counted with its batch, or by `record_execution`.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum

from conch.core.latencies import FirstResponses, Latencies
from conch.core.request import InferenceRequest
from conch.core.scheduling.scheduler import Batch
from conch.core.statistics_snapshot import (
    BatchDurations,
    Duration,
    Gauges,
    ResponseCounters,
    ResponseKind,
    StatisticsSnapshot,
)
from conch.core.summaries import CACHE_HIT, CACHE_MISS, REQUEST, Summaries

__all__ = ["BatchDurations", "Duration", "ModelStatistics", "StatisticsSnapshot"]

QUEUED, RUNNING = "queued", "running"
"""Stages in which a request can be cancelled."""
TIMEOUT, QUEUE_FULL = "timeout", "queue_full"
"""Reasons for rejection: the queue policy's timeout expired, or the queue was full."""


_KEPT = struct.Struct("<16q")
"""Totals kept of an evicted model: small, as there may be thousands of such models."""


class RequestEnd(Enum):
    """Result with which a request leaves its batch."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RUNS_AGAIN = "runs again"
    """Rescheduled: only the time of this run is counted."""
    OPEN = "open"
    """Its model responds later; the request is counted with its last response."""


class ModelStatistics:
    """Counters of a model version: plain integers rather than `Duration` objects, for speed.

    Args:
        gauges: Returns the current gauges of the version.

    Attributes:
        watched: True once a request has a watch; until then, recording skips the check.
        identity: Identifies these counters without a reference to them or their model.
    """

    __slots__ = (
        "_batches",
        "_bytes_copied",
        "_cancelled",
        "_execution_count",
        "_fail_ns",
        "_failed",
        "_failed_in_model",
        "_first_responses",
        "_first_with_last",
        "_gauges",
        "_hit_ns",
        "_hits",
        "_infer_ns",
        "_inference_count",
        "_input_ns",
        "_last_inference_ns",
        "_latencies",
        "_lock",
        "_miss_ns",
        "_misses",
        "_output_ns",
        "_queue_ns",
        "_rejected",
        "_responses",
        "_succeeded",
        "_success_ns",
        "_summaries",
        "identity",
        "watched",
    )

    def __init__(self, gauges: Callable[[], Gauges] = Gauges) -> None:
        self._gauges = gauges
        self.watched = False
        self.identity = object()
        self._failed_in_model = 0
        self._rejected: dict[str, int] = {}
        self._cancelled: dict[str, int] = {QUEUED: 0, RUNNING: 0}
        self._responses = ResponseCounters()
        self._latencies: Latencies | None = None
        self._first_responses: FirstResponses | None = None
        self._first_with_last = True
        self._summaries: Summaries | None = None
        self._lock = threading.Lock()
        self._last_inference_ns = 0
        self._inference_count = 0
        self._execution_count = 0
        self._succeeded = 0
        self._success_ns = 0
        self._failed = 0
        self._fail_ns = 0
        self._queue_ns = 0
        self._input_ns = 0
        self._infer_ns = 0
        self._output_ns = 0
        self._bytes_copied = 0
        self._hits = 0
        self._hit_ns = 0
        self._misses = 0
        self._miss_ns = 0
        # By batch size: executions, then nanoseconds of input, inference and output.
        self._batches: dict[int, list[int]] = {}

    def keep_latencies(self) -> None:
        """Enables latency histograms; costs about 0.2 µs per request."""
        with self._lock:
            self._latencies = Latencies()

    def keep_summaries(self) -> None:
        """Enables quantile summaries; costs about 1 µs per request."""
        with self._lock:
            self._summaries = Summaries()

    def quantiles(self, now_ns: int, wanted: Sequence[float]) -> list[list[float]] | None:
        """Recent latency quantiles by stage (see `summaries`); None if summaries are disabled."""
        if self._summaries is None:
            return None
        with self._lock:
            return self._summaries.quantiles(now_ns, wanted)

    def keep_first_responses(self, bounds_ms: Sequence[float], decoupled: bool) -> None:
        """Enables the histogram of time to first response.

        Args:
            bounds_ms: Ascending upper bounds of all buckets but the last, in milliseconds.
            decoupled: True if `record_first_response` records them; otherwise the end of the request does.
        """
        with self._lock:
            self._first_responses = FirstResponses(bounds_ms)
            self._first_with_last = not decoupled

    def record_first_response(self, ns: int) -> None:
        """Records a decoupled request's time to first response."""
        if self._first_responses is not None:
            with self._lock:
                self._first_responses.add(ns)

    def record_batch(self, batch: Batch, ends: Sequence[RequestEnd], execution: bool = True) -> None:
        """Records a batch that has run, and the requests that end with it.

        Args:
            batch: The batch, with its start and end.
            ends: End of each of its requests, without fillers.
            execution: True if the execution is counted here too, if any request ran to an end in it.
        """
        requests = batch.requests
        if batch.fillers:
            requests = [request for request in requests if not request.filler]
        start, end = batch.compute_start_ns, batch.compute_end_ns
        # Times that the backend has not set: preparing inputs, or outputs, took none.
        input_end = batch.compute_input_end_ns or start
        output_start = batch.compute_output_start_ns or end
        input_ns, infer_ns, output_ns = input_end - start, output_start - input_end, end - output_start
        size = batch.size
        rows = size - batch.fillers
        success_ns = queue_ns = 0
        runs = count = ends.count(RequestEnd.SUCCEEDED)
        with self._lock:
            if count != len(ends):
                again, queue_ns = self._add_others(requests, ends, start, end)
                runs += again
                requests = [requests[index] for index, how in enumerate(ends) if how is RequestEnd.SUCCEEDED]
                rows = sum(request.batch_size for request in requests)
            if not runs:
                return
            for request in requests:
                success_ns += end - request.received_ns
                queue_ns += start - request.queued_ns
            if self._latencies is not None:
                self._latencies.add_all(requests, (start, end), input_ns, infer_ns, output_ns)
            if self._first_responses is not None:
                self._first_responses.add_all(requests, end)
            if self._summaries is not None:
                self._summaries.add_all(requests, (start, end), input_ns, infer_ns, output_ns)
            self._last_inference_ns = end
            self._inference_count += rows
            self._succeeded += count
            self._success_ns += success_ns
            self._queue_ns += queue_ns
            self._input_ns += input_ns * runs
            self._infer_ns += infer_ns * runs
            self._output_ns += output_ns * runs
            if execution:
                self._execution_count += 1
                self._bytes_copied += batch.bytes_copied
                row = self._batches.get(size) or self._batches.setdefault(size, [0, 0, 0, 0])
                row[0] += 1
                row[1] += input_ns
                row[2] += infer_ns
                row[3] += output_ns

    def record_execution(self, batch: Batch, end_ns: int) -> None:
        """Records the execution of a batch of which requests may end before it or after it."""
        input_end = batch.compute_input_end_ns or batch.compute_start_ns
        output_start = batch.compute_output_start_ns or end_ns
        with self._lock:
            self._execution_count += 1
            self._bytes_copied += batch.bytes_copied
            row = self._batches.setdefault(batch.size, [0, 0, 0, 0])
            row[0] += 1
            row[1] += input_end - batch.compute_start_ns
            row[2] += output_start - input_end
            row[3] += end_ns - output_start

    def record_request(
        self, request: InferenceRequest, how: RequestEnd, times: tuple[int, int, int], output_ns: int = 0
    ) -> None:
        """Records a request that ends apart from its batch.

        Args:
            request: The request.
            how: Its end.
            times: Start of the batch, end of input preparation, and time of the last response.
            output_ns: Time spent sending responses.
        """
        start, input_end, end = times
        total_ns, queue_ns = end - request.received_ns, start - request.queued_ns
        input_ns, infer_ns = input_end - start, end - input_end - output_ns
        with self._lock:
            if how is not RequestEnd.SUCCEEDED:
                self._add_failure(how, total_ns)
                return
            self._last_inference_ns = max(self._last_inference_ns, end)
            self._inference_count += request.batch_size
            self._succeeded += 1
            self._success_ns += total_ns
            self._queue_ns += queue_ns
            self._input_ns += input_ns
            self._infer_ns += infer_ns
            self._output_ns += output_ns
            if self._first_responses is not None and self._first_with_last:
                self._first_responses.add(total_ns)
            if self._latencies is not None:
                self._latencies.add(total_ns, queue_ns)
                self._latencies.add_compute(1, input_ns, infer_ns, output_ns)
            if self._summaries is not None:
                self._summaries.add(end, REQUEST, total_ns, queue_ns, input_ns, infer_ns, output_ns)

    def _add_others(
        self, requests: Sequence[InferenceRequest], ends: Sequence[RequestEnd], start_ns: int, end_ns: int
    ) -> tuple[int, int]:
        """Adds failures; returns the number of requests that run again, and their time in the queue.

        Of those, the sums have all runs; counts and histograms only have the last one.
        """
        again = queue_ns = 0
        for request, how in zip(requests, ends, strict=True):
            if how is RequestEnd.RUNS_AGAIN:
                again += 1
                queue_ns += start_ns - request.queued_ns
            elif how in (RequestEnd.FAILED, RequestEnd.CANCELLED):
                self._add_failure(how, end_ns - request.received_ns)
        return again, queue_ns

    def _add_failure(self, how: RequestEnd, ns: int) -> None:
        """Adds a request that failed in its model, or was cancelled there; called with the lock held."""
        self._failed += 1
        self._fail_ns += ns
        if how is RequestEnd.CANCELLED:
            self._cancelled[RUNNING] += 1
        else:
            self._failed_in_model += 1

    def record_failure(self, ns: int, in_model: bool = False) -> None:
        """Records a request that failed `ns` after receipt, in its model or before execution."""
        with self._lock:
            self._failed += 1
            self._failed_in_model += in_model
            self._fail_ns += ns

    def record_rejection(self, ns: int, reason: str) -> None:
        """Records a request that was removed from the queue or refused by it."""
        with self._lock:
            self._failed += 1
            self._fail_ns += ns
            self._rejected[reason] = self._rejected.get(reason, 0) + 1

    def record_cancellation(self, ns: int, stage: str) -> None:
        """Records a request that was cancelled in a stage."""
        with self._lock:
            self._failed += 1
            self._fail_ns += ns
            self._cancelled[stage] += 1

    def record_response(self, index: int, kind: ResponseKind, infer_ns: int) -> None:
        """Records a decoupled response before it is sent."""
        with self._lock:
            self._responses.add(index, kind, infer_ns)

    def record_response_output(self, index: int, kind: ResponseKind, output_ns: int) -> None:
        """Adds the time spent sending a response."""
        with self._lock:
            self._responses.add_output(index, kind, output_ns)

    @property
    def requests_per_execution(self) -> float:
        """Mean number of requests per execution; 0 before the first."""
        with self._lock:
            return self._succeeded / self._execution_count if self._execution_count else 0.0

    def record_hit(self, lookup_ns: int, queue_ns: int, success_ns: int) -> None:
        """Records a response cache hit.

        Args:
            lookup_ns: Time of the lookup.
            queue_ns: Wait before the lookup.
            success_ns: Time from receipt to response.
        """
        with self._lock:
            self._hits += 1
            self._hit_ns += lookup_ns
            self._queue_ns += queue_ns
            self._success_ns += success_ns
            if self._first_responses is not None:
                self._first_responses.add(success_ns)
            if self._latencies is not None:
                self._latencies.add(success_ns, queue_ns)
            if self._summaries is not None:
                now = time.monotonic_ns()
                self._summaries.add(now, REQUEST, success_ns, queue_ns)
                self._summaries.add(now, CACHE_HIT, lookup_ns)

    def record_miss(self, ns: int, count: int = 1) -> None:
        """Records a response cache miss; a count of 0 adds time to an earlier miss."""
        with self._lock:
            self._misses += count
            self._miss_ns += ns
            if self._summaries is not None and count:
                self._summaries.add(time.monotonic_ns(), CACHE_MISS, ns)

    @property
    def mark(self) -> tuple[int, ...]:
        """A value that changes with the counters, except single responses'; cheaper than a snapshot."""
        with self._lock:
            return (
                self._succeeded,
                self._failed,
                self._failed_in_model,
                self._hits,
                self._misses,
                self._miss_ns,
                self._execution_count,
                self._queue_ns,
                self._infer_ns,
                self._bytes_copied,
                0 if self._first_responses is None else self._first_responses.total,
            )

    @property
    def ended(self) -> tuple[int, int]:
        """Requests that have ended, and those of them that failed though their client still waited."""
        with self._lock:
            failed = self._failed - sum(self._cancelled.values())
            return self._succeeded + self._hits + failed, failed

    def keep(self) -> bytes:
        """The totals in a few bytes, for `add_kept`; without those by batch size, response and reason."""
        with self._lock:
            return _KEPT.pack(
                self._last_inference_ns,
                self._inference_count,
                self._execution_count,
                self._succeeded,
                self._success_ns,
                self._failed,
                self._fail_ns,
                self._failed_in_model,
                self._queue_ns,
                self._input_ns,
                self._infer_ns,
                self._output_ns,
                self._hits,
                self._hit_ns,
                self._misses,
                self._miss_ns,
            )

    def add_kept(self, kept: bytes) -> None:
        """Adds the totals of the same version before it was evicted."""
        last_inference_ns, *counts = _KEPT.unpack(kept)
        with self._lock:
            self._last_inference_ns = max(self._last_inference_ns, last_inference_ns)
            self._inference_count += counts[0]
            self._execution_count += counts[1]
            self._succeeded += counts[2]
            self._success_ns += counts[3]
            self._failed += counts[4]
            self._fail_ns += counts[5]
            self._failed_in_model += counts[6]
            self._queue_ns += counts[7]
            self._input_ns += counts[8]
            self._infer_ns += counts[9]
            self._output_ns += counts[10]
            self._hits += counts[11]
            self._hit_ns += counts[12]
            self._misses += counts[13]
            self._miss_ns += counts[14]

    def gauges(self) -> Gauges:
        """Current gauges of the version."""
        return self._gauges()

    def snapshot(self) -> StatisticsSnapshot:
        """A consistent copy of all counters, with the gauges of about the same time."""
        pending, running, _, _ = self.gauges()
        with self._lock:
            count = self._succeeded
            return StatisticsSnapshot(
                last_inference_ms=_wall_clock_ms(self._last_inference_ns),
                inference_count=self._inference_count,
                execution_count=self._execution_count,
                success=Duration(count + self._hits, self._success_ns),
                fail=Duration(self._failed, self._fail_ns),
                queue=Duration(count + self._hits, self._queue_ns),
                compute_input=Duration(count, self._input_ns),
                compute_infer=Duration(count, self._infer_ns),
                compute_output=Duration(count, self._output_ns),
                batches={
                    size: BatchDurations(
                        Duration(runs, input_ns), Duration(runs, infer_ns), Duration(runs, output_ns)
                    )
                    for size, (runs, input_ns, infer_ns, output_ns) in sorted(self._batches.items())
                },
                bytes_copied=self._bytes_copied,
                failed_in_model=self._failed_in_model,
                rejected=dict(self._rejected),
                cancelled=dict(self._cancelled),
                responses=self._responses.snapshot(),
                cache_hit=Duration(self._hits, self._hit_ns),
                cache_miss=Duration(self._misses, self._miss_ns),
                pending=pending,
                running=running,
                latencies=None if self._latencies is None else self._latencies.snapshot(),
                first_responses=None if self._first_responses is None else self._first_responses.snapshot(),
            )


def _wall_clock_ms(monotonic_ns: int) -> int:
    """Converts monotonic nanoseconds to milliseconds since the epoch; 0 stays 0."""
    if not monotonic_ns:
        return 0
    return (time.time_ns() - (time.monotonic_ns() - monotonic_ns)) // 1_000_000

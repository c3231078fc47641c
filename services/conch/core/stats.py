"""Counters of one model version, with the meaning Triton's statistics extension gives them.

All durations are nanoseconds. Recording takes one lock per executed batch.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conch.core.scheduler.base import Batch


@dataclass(frozen=True, slots=True)
class Duration:
    """A count of events and the time they took together, in nanoseconds."""

    count: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True)
class BatchDurations:
    """Executions of one batch size."""

    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class StatisticsSnapshot:
    """What `ModelStatistics` held at one moment.

    Attributes:
        last_inference_ms: Wall-clock time of the last inference, in milliseconds since the epoch.
        inference_count: Inferences made; a batch of n counts n.
        execution_count: Executions; a batch counts one.
        success: Requests answered, with the time from receipt to response.
        fail: Requests that failed after they were accepted.
        queue: Time spent waiting.
        compute_input: Time spent preparing inputs.
        compute_infer: Time spent in the model.
        compute_output: Time spent on outputs.
        batches: Executions by batch size.
        bytes_copied: Bytes the core itself copied for batching.
        rejected: Requests refused because a queue was full; they are in no other counter.
        cache_hit: Requests answered by the response cache; they are in `success` and `queue`, and in nothing
            else.
        cache_miss: Requests it had no answer to, with the time to find that out and to keep the model's.
    """

    last_inference_ms: int
    inference_count: int
    execution_count: int
    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    batches: dict[int, BatchDurations]
    bytes_copied: int
    rejected: int = 0
    cache_hit: Duration = Duration()
    cache_miss: Duration = Duration()


class ModelStatistics:
    """The counters of one model version.

    Plain integers, not `Duration` objects: recording is on the way of every request.
    """

    def __init__(self) -> None:
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
        self._rejected = 0
        self._hits = 0
        self._hit_ns = 0
        self._misses = 0
        self._miss_ns = 0
        # By batch size: executions, then nanoseconds of input, inference and output.
        self._batches: dict[int, list[int]] = {}

    def record_batch(
        self,
        batch: Batch,
        failed: int,
        failed_ns: int,
        failed_rows: int = 0,
        held: int = 0,
        held_ns: int = 0,
    ) -> None:
        """Counts one executed batch.

        Requests that run again count as inferences when they are done; the time of all their runs counts.

        Args:
            batch: The batch, with all its times set.
            failed: Number of its requests that ended in an error.
            failed_ns: Time from receipt to response of those requests together.
            failed_rows: Rows of those requests together.
            held: Number of its requests that run again, one row each.
            held_ns: Time since receipt of those requests together.
        """
        requests = batch.requests
        if batch.fillers:
            requests = [request for request in requests if not request.filler]
        start = batch.compute_start_ns
        end = batch.compute_end_ns
        success_ns = queue_ns = 0
        for request in requests:
            success_ns += end - request.received_ns
            queue_ns += start - request.queued_ns
        count = len(requests) - failed
        input_ns = batch.compute_input_end_ns - start
        infer_ns = batch.compute_output_start_ns - batch.compute_input_end_ns
        output_ns = end - batch.compute_output_start_ns
        size = batch.size
        with self._lock:
            if failed:
                self._failed += failed
                self._fail_ns += failed_ns
                if not count:
                    return
                # The time in the queue is known for the whole batch; failed requests take their share.
                queue_ns = queue_ns * count // len(requests)
            self._last_inference_ns = end
            self._inference_count += size - batch.fillers - failed_rows - held
            self._execution_count += 1
            self._succeeded += count - held
            self._success_ns += success_ns - failed_ns - held_ns
            self._queue_ns += queue_ns
            self._input_ns += input_ns * count
            self._infer_ns += infer_ns * count
            self._output_ns += output_ns * count
            self._bytes_copied += batch.bytes_copied
            row = self._batches.get(size)
            if row is None:
                row = self._batches[size] = [0, 0, 0, 0]
            row[0] += 1
            row[1] += input_ns
            row[2] += infer_ns
            row[3] += output_ns

    def record_failure(self, ns: int) -> None:
        """Counts one request that failed before it was executed, `ns` nanoseconds after receipt."""
        with self._lock:
            self._failed += 1
            self._fail_ns += ns

    def record_rejection(self) -> float:
        """Counts one request that a full queue refused.

        Returns:
            How many requests an execution has had so far; 0 where there was none.
        """
        with self._lock:
            self._rejected += 1
            return self._succeeded / self._execution_count if self._execution_count else 0.0

    def record_hit(self, lookup_ns: int, queue_ns: int, success_ns: int) -> None:
        """Counts one request answered by the response cache.

        Args:
            lookup_ns: Time to find the answer and to read it.
            queue_ns: Time before that which it waited for the cache.
            success_ns: Time from receipt to response.
        """
        with self._lock:
            self._hits += 1
            self._hit_ns += lookup_ns
            self._queue_ns += queue_ns
            self._success_ns += success_ns

    def record_miss(self, ns: int, count: int = 1) -> None:
        """Counts a request the response cache had no answer to, or, with a count of 0, more time for one."""
        with self._lock:
            self._misses += count
            self._miss_ns += ns

    def snapshot(self) -> StatisticsSnapshot:
        """A consistent copy of all counters."""
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
                rejected=self._rejected,
                cache_hit=Duration(self._hits, self._hit_ns),
                cache_miss=Duration(self._misses, self._miss_ns),
            )


def _wall_clock_ms(monotonic_ns: int) -> int:
    """A moment of the monotonic clock as milliseconds since the epoch; 0 for never."""
    if not monotonic_ns:
        return 0
    return (time.time_ns() - (time.monotonic_ns() - monotonic_ns)) // 1_000_000

"""Counters of one model version, with the meaning Triton's statistics extension gives them.

All durations are nanoseconds. Recording takes one lock per executed batch.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conch.core.scheduler.base import Batch


@dataclass(slots=True)
class Duration:
    """A count of events and the time they took together, in nanoseconds."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Adds `count` events that took `ns` nanoseconds together."""
        self.count += count
        self.ns += ns

    def copy(self) -> Duration:
        """A copy that later events do not change."""
        return Duration(self.count, self.ns)


@dataclass(slots=True)
class BatchDurations:
    """Executions of one batch size."""

    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass(slots=True)
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


class ModelStatistics:
    """The counters of one model version."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_inference_ms = 0
        self._inference_count = 0
        self._execution_count = 0
        self._success = Duration()
        self._fail = Duration()
        self._queue = Duration()
        self._compute_input = Duration()
        self._compute_infer = Duration()
        self._compute_output = Duration()
        self._batches: dict[int, BatchDurations] = {}
        self._bytes_copied = 0

    def record_batch(self, batch: Batch, failed: int, failed_ns: int) -> None:
        """Counts one executed batch.

        Args:
            batch: The batch, with all its times set.
            failed: Number of its requests that ended in an error.
            failed_ns: Time from receipt to response of those requests together.
        """
        requests = batch.requests
        start = batch.compute_start_ns
        end = batch.compute_end_ns
        success_ns = queue_ns = 0
        for request in requests:
            success_ns += end - request.received_ns
            queue_ns += start - request.queued_ns
        succeeded = len(requests) - failed
        with self._lock:
            if failed:
                self._fail.add(failed_ns, failed)
                if not succeeded:
                    return
                # Queue and compute times of a batch are shared; failed requests take theirs along.
                queue_ns = queue_ns * succeeded // len(requests)
            compute_input = batch.compute_input_end_ns - start
            compute_infer = batch.compute_output_start_ns - batch.compute_input_end_ns
            compute_output = end - batch.compute_output_start_ns
            self._last_inference_ms = time.time_ns() // 1_000_000
            self._inference_count += batch.size
            self._execution_count += 1
            self._success.add(success_ns - failed_ns, succeeded)
            self._queue.add(queue_ns, succeeded)
            self._compute_input.add(compute_input * succeeded, succeeded)
            self._compute_infer.add(compute_infer * succeeded, succeeded)
            self._compute_output.add(compute_output * succeeded, succeeded)
            self._bytes_copied += batch.bytes_copied
            row = self._batches.get(batch.size)
            if row is None:
                row = self._batches[batch.size] = BatchDurations()
            row.compute_input.add(compute_input)
            row.compute_infer.add(compute_infer)
            row.compute_output.add(compute_output)

    def record_failure(self, ns: int) -> None:
        """Counts one request that failed before it was executed, `ns` nanoseconds after receipt."""
        with self._lock:
            self._fail.add(ns)

    def snapshot(self) -> StatisticsSnapshot:
        """A consistent copy of all counters."""
        with self._lock:
            return StatisticsSnapshot(
                self._last_inference_ms,
                self._inference_count,
                self._execution_count,
                self._success.copy(),
                self._fail.copy(),
                self._queue.copy(),
                self._compute_input.copy(),
                self._compute_infer.copy(),
                self._compute_output.copy(),
                {
                    size: BatchDurations(
                        row.compute_input.copy(), row.compute_infer.copy(), row.compute_output.copy()
                    )
                    for size, row in sorted(self._batches.items())
                },
                self._bytes_copied,
            )

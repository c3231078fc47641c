"""Snapshots of a version's counters, and the counters of decoupled responses; durations are nanoseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from conch.core.latencies import FirstResponseCounts, LatencyCounts

MOST_INDEXES = 1000
"""Responses from this index on are counted together, under the last index."""


@dataclass(frozen=True, slots=True)
class Duration:
    """A count of events and their total time in nanoseconds."""

    count: int = 0
    ns: int = 0


class ResponseKind(IntEnum):
    """Kind of a response; the value is its column in a row of counters."""

    SUCCESS = 0
    FAIL = 1
    EMPTY = 2
    CANCEL = 3


@dataclass(frozen=True, slots=True)
class ResponseDurations:
    """Statistics of all responses with the same index in their requests.

    Attributes:
        compute_infer: Time in the model since the previous response, or since its start; also of empty ones.
        compute_output: Time to make the outputs, if the model tells, and to send the response, including
            waits for slow clients.
        success: Responses with data, with the sum of both times.
        fail: Responses with an error, with the sum of both times.
        empty_response: Final flags without data, with the time in the model.
        cancel: Responses after the one in work when the request was cancelled, with the time in the model.
    """

    compute_infer: Duration
    compute_output: Duration
    success: Duration
    fail: Duration
    empty_response: Duration
    cancel: Duration


class ResponseCounters:
    """Response counters by index."""

    def __init__(self) -> None:
        # Counts of each kind, then nanoseconds of each kind, then those of inference and of output.
        self._rows: list[list[int]] = []

    def add(self, index: int, kind: ResponseKind, infer_ns: int) -> None:
        """Counts a response before it is sent."""
        index = min(index, MOST_INDEXES - 1)
        rows = self._rows
        while len(rows) <= index:
            rows.append([0] * 10)
        row = rows[index]
        row[kind] += 1
        row[4 + kind] += infer_ns
        if kind <= ResponseKind.EMPTY:
            row[8] += infer_ns

    def add_output(self, index: int, kind: ResponseKind, output_ns: int) -> None:
        """Adds the time to send a counted response."""
        row = self._rows[min(index, MOST_INDEXES - 1)]
        row[4 + kind] += output_ns
        row[9] += output_ns

    def snapshot(self) -> Mapping[int, ResponseDurations]:
        """A copy."""
        return {index: _durations(row) for index, row in enumerate(self._rows)}


def _durations(row: list[int]) -> ResponseDurations:
    made = row[ResponseKind.SUCCESS] + row[ResponseKind.FAIL]
    success, fail, empty, cancel = (Duration(row[kind], row[4 + kind]) for kind in ResponseKind)
    return ResponseDurations(
        Duration(made + empty.count, row[8]), Duration(made, row[9]), success, fail, empty, cancel
    )


class Gauges(NamedTuple):
    """Requests, busy time and instances of a version at a moment.

    Attributes:
        pending: Requests accepted and not yet executing.
        running: Requests that run, or that the model completes after their batch; those of a decoupled model
            from the start of their execution to their last response.
        busy_ns: Time that all instances together have run batches since the load, the running ones included.
        instances: Number of instances that run batches; 0 for an ensemble.
    """

    pending: int = 0
    running: int = 0
    busy_ns: int = 0
    instances: int = 0


@dataclass(frozen=True, slots=True)
class BatchDurations:
    """Execution times of one batch size."""

    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class StatisticsSnapshot:
    """A snapshot of `ModelStatistics`.

    Attributes:
        last_inference_ms: Wall-clock time of the last inference, in milliseconds since the epoch.
        inference_count: Inferences; a batch of n counts n.
        execution_count: Executions; a batch counts one.
        success: Successful requests, from receipt to response.
        fail: Failed requests, including rejected and cancelled ones.
        queue: Time in the queue.
        compute_input: Time to prepare inputs.
        compute_infer: Time in the model.
        compute_output: Time to handle outputs.
        batches: Executions by batch size.
        bytes_copied: Bytes that the core copied for batching.
        failed_in_model: Failed requests whose model returned an error.
        rejected: Failed requests that never ran, by reason.
        cancelled: Failed requests that were cancelled, by stage.
        responses: Responses of a decoupled model, by index in their requests.
        cache_hit: Requests answered by the response cache; counted only here, in `success` and in `queue`.
        cache_miss: Other lookups, with the time of lookup and insertion.
        pending: Requests in the queue now.
        running: Requests being executed now, or still answered by a model that has returned.
        latencies: Latency histograms, if kept.
        first_responses: Histogram of the time to the first response, if kept.
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
    failed_in_model: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    cancelled: Mapping[str, int] = field(default_factory=dict)
    responses: Mapping[int, ResponseDurations] = field(default_factory=dict)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
    pending: int = 0
    running: int = 0
    latencies: LatencyCounts | None = None
    first_responses: FirstResponseCounts | None = None


class VersionStatistics(NamedTuple):
    """The counters of one version of a model."""

    name: str
    version: int
    snapshot: StatisticsSnapshot

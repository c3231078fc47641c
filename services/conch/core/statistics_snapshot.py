"""Snapshots of a version's counters, and the counters of decoupled responses; durations are nanoseconds.

Used by: `ModelStatistics`, which holds its lock around all calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from conch.core.latencies import FirstResponseCounts, LatencyCounts

MOST_INDEXES = 1000
"""Requests may have any number of responses; from this one on they are counted together, under the last."""


@dataclass(frozen=True, slots=True)
class Duration:
    """A count of events and the time they took together, in nanoseconds."""

    count: int = 0
    ns: int = 0


class ResponseKind(IntEnum):
    """What a response was; the value is its place in a row of counters."""

    SUCCESS = 0
    FAIL = 1
    EMPTY = 2
    CANCEL = 3


@dataclass(frozen=True, slots=True)
class ResponseDurations:
    """The responses that were the n-th of their requests.

    Attributes:
        compute_infer: Time the model took from the response before, or from its start.
        compute_output: Time it took to hand the response over; the wait for a client that reads slowly is
            part of it.
        success: Responses with data, and the time of both together.
        fail: Responses with an error, and the time of both together.
        empty_response: Final flags without data, and the time the model took.
        cancel: Responses that found their request cancelled, and the time the model took.
    """

    compute_infer: Duration
    compute_output: Duration
    success: Duration
    fail: Duration
    empty_response: Duration
    cancel: Duration


class ResponseCounters:
    """Rows of counters by index; callers see to it that one thread at a time uses them."""

    def __init__(self) -> None:
        # Counts of each kind, then nanoseconds of each kind, then those of inference and of output.
        self._rows: list[list[int]] = []

    def add(self, index: int, kind: ResponseKind, infer_ns: int) -> None:
        """Counts a response that is about to be handed over."""
        index = min(index, MOST_INDEXES - 1)
        rows = self._rows
        while len(rows) <= index:
            rows.append([0] * 10)
        row = rows[index]
        row[kind] += 1
        row[4 + kind] += infer_ns
        if kind <= ResponseKind.FAIL:
            row[8] += infer_ns

    def add_output(self, index: int, kind: ResponseKind, output_ns: int) -> None:
        """Adds the time it took to hand a counted response over."""
        row = self._rows[min(index, MOST_INDEXES - 1)]
        row[4 + kind] += output_ns
        row[9] += output_ns

    def snapshot(self) -> Mapping[int, ResponseDurations]:
        """A copy."""
        return {index: _durations(row) for index, row in enumerate(self._rows)}


def _durations(row: list[int]) -> ResponseDurations:
    computed = row[ResponseKind.SUCCESS] + row[ResponseKind.FAIL]
    success, fail, empty, cancel = (Duration(row[kind], row[4 + kind]) for kind in ResponseKind)
    return ResponseDurations(
        Duration(computed, row[8]), Duration(computed, row[9]), success, fail, empty, cancel
    )


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
        fail: Requests that failed after they were accepted; the rejected and the cancelled are among them.
        queue: Time spent waiting.
        compute_input: Time spent preparing inputs.
        compute_infer: Time spent in the model.
        compute_output: Time spent on outputs.
        batches: Executions by batch size.
        bytes_copied: Bytes the core itself copied for batching.
        failed_in_model: Of the failed requests, those whose model answered with an error.
        rejected: Of the failed requests, those that were never run, by reason.
        cancelled: Of the failed requests, those whose client had gone, by stage.
        responses: Responses of a decoupled model, by their place among those of their request.
        cache_hit: Requests answered by the response cache; they are in `success` and `queue`, and in nothing
            else.
        cache_miss: Requests it had no answer to, with the time to find that out and to keep the model's.
        pending: Requests that wait now.
        running: Requests that are being executed now, or still answered by a model that has returned.
        latencies: How the times of the requests are spread; None unless that is counted.
        first_responses: How long the first responses took; None unless that is counted.
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

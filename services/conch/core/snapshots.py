"""What the counters of a model version held at one moment. All durations are nanoseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conch.core.durations import Duration
from conch.core.latencies import FirstResponseCounts, LatencyCounts
from conch.core.response_stats import ResponseDurations


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

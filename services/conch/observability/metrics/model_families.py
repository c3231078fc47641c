"""The metric families of model versions: Triton's and conch's, with the functions for their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from conch.core.latencies import FirstResponseCounts, LatencyCounts
from conch.core.model_statistics import QUEUE_FULL, QUEUED, RUNNING, TIMEOUT, StatisticsSnapshot
from conch.observability.metrics.metric_families import (
    EXPONENTS,
    SIZES,
    Family,
    ModelLabels,
    Template,
    bounds,
    in_seconds,
    sizes,
    times,
)

_PER_SECOND = 1_000_000_000
_BOUNDS = bounds(in_seconds(EXPONENTS))

Values = Callable[[StatisticsSnapshot], Sequence[object]]


@dataclass(frozen=True, slots=True)
class Counted:
    """A family whose samples change only with the statistics of a model version.

    Attributes:
        values: Gives the values of the template's samples.
        triton: True if Triton has the family, too.
        cached_only: True if only models with a response cache have the family.
        latency: True if ``counter_latencies=false`` leaves the family out.
    """

    template: Template
    values: Values
    triton: bool = False
    cached_only: bool = False
    latency: bool = False


def _triton(
    name: str, help_text: str, values: Callable[[StatisticsSnapshot], int], cached: bool = False
) -> Counted:
    template = Template(Family(name, "counter", help_text))
    latency = cached or name.endswith("_duration_us")
    return Counted(template, lambda snapshot: (values(snapshot),), True, cached, latency)


def _failures(snapshot: StatisticsSnapshot) -> Sequence[int]:
    rejected, cancelled = sum(snapshot.rejected.values()), sum(snapshot.cancelled.values())
    in_model = snapshot.failed_in_model
    return rejected, cancelled, in_model, snapshot.fail.count - rejected - cancelled - in_model


def _us(ns: int) -> int:
    return ns // 1000


def seconds(ns: int) -> str:
    """Nanoseconds as exact seconds."""
    whole, rest = divmod(ns, _PER_SECOND)
    return f"{whole}.{rest:09d}"


def histogram_samples(labels: Sequence[str]) -> list[tuple[str, str, str]]:
    """The samples of a histogram for `Template`: a bucket for each bound, the sum and the count."""
    return [*(("_bucket", "le", label) for label in labels), ("_sum", "", ""), ("_count", "", "")]


def _latency(
    name: str, help_text: str, places: Callable[[LatencyCounts], Sequence[int]], ns: Values
) -> Counted:
    template = Template(Family(name, "histogram", help_text), histogram_samples(_BOUNDS))

    def values(snapshot: StatisticsSnapshot) -> Sequence[object]:
        assert snapshot.latencies is not None
        counts = times(places(snapshot.latencies))
        return (*counts, *ns(snapshot), counts[-1])

    return Counted(template, values)


def _batch_sizes(snapshot: StatisticsSnapshot) -> Sequence[object]:
    executions = {size: row.compute_infer.count for size, row in snapshot.batches.items()}
    counts = sizes(executions)
    return (*counts, sum(size * count for size, count in executions.items()), counts[-1])


TRITON = (
    _triton(
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        lambda s: s.success.count,
    ),
    Counted(
        Template(
            Family(
                "nv_inference_request_failure",
                "counter",
                "Number of failed inference requests, all batch sizes",
            ),
            [("", "reason", reason) for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER")],
        ),
        _failures,
        triton=True,
    ),
    _triton(
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda s: s.inference_count,
    ),
    _triton(
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda s: s.execution_count,
    ),
    _triton(
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda s: _us(s.success.ns),
    ),
    _triton(
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda s: _us(s.queue.ns),
    ),
    _triton(
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda s: _us(s.compute_input.ns),
    ),
    _triton(
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda s: _us(s.compute_infer.ns),
    ),
    _triton(
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda s: _us(s.compute_output.ns),
    ),
    _triton(
        "nv_cache_num_hits_per_model", "Number of cache hits per model", lambda s: s.cache_hit.count, True
    ),
    _triton(
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        lambda s: _us(s.cache_hit.ns),
        True,
    ),
    _triton(
        "nv_cache_num_misses_per_model",
        "Number of cache misses per model",
        lambda s: s.cache_miss.count,
        True,
    ),
    _triton(
        "nv_cache_miss_duration_per_model",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        lambda s: _us(s.cache_miss.ns),
        True,
    ),
)
"""Triton's counters."""

OURS = (
    _latency(
        "conch_request_duration_seconds",
        "Time from the receipt of a request to its response, of those that succeeded",
        lambda latencies: latencies.request,
        lambda s: (seconds(s.success.ns),),
    ),
    _latency(
        "conch_queue_duration_seconds",
        "Time that a request waits for its execution",
        lambda latencies: latencies.queue,
        lambda s: (seconds(s.queue.ns),),
    ),
    _latency(
        "conch_compute_input_duration_seconds",
        "Time that preparing the inputs of a request's batch takes",
        lambda latencies: latencies.compute_input,
        lambda s: (seconds(s.compute_input.ns),),
    ),
    _latency(
        "conch_compute_infer_duration_seconds",
        "Time that a request's batch spends in the model",
        lambda latencies: latencies.compute_infer,
        lambda s: (seconds(s.compute_infer.ns),),
    ),
    _latency(
        "conch_compute_output_duration_seconds",
        "Time that the outputs of a request's batch take",
        lambda latencies: latencies.compute_output,
        lambda s: (seconds(s.compute_output.ns),),
    ),
    Counted(
        Template(
            Family("conch_batch_size", "histogram", "Rows of an execution"),
            histogram_samples(bounds(SIZES)),
        ),
        _batch_sizes,
    ),
    Counted(
        Template(
            Family(
                "conch_requests_rejected_total",
                "counter",
                "Requests that were never run, by reason: their queue was full, or they waited for too long",
            ),
            [("", "reason", reason) for reason in (QUEUE_FULL, TIMEOUT)],
        ),
        lambda s: (s.rejected.get(QUEUE_FULL, 0), s.rejected.get(TIMEOUT, 0)),
    ),
    Counted(
        Template(
            Family(
                "conch_requests_cancelled_total",
                "counter",
                "Requests whose client had gone, by the stage that they were in",
            ),
            [("", "stage", stage) for stage in (QUEUED, RUNNING)],
        ),
        lambda s: (s.cancelled.get(QUEUED, 0), s.cancelled.get(RUNNING, 0)),
    ),
    Counted(
        Template(
            Family(
                "conch_copied_bytes_total",
                "counter",
                "Bytes that the server itself has copied to make batches and to take them apart",
            )
        ),
        lambda s: (s.bytes_copied,),
    ),
)
"""conch's counters and histograms."""

FIRST_RESPONSE = Family(
    "nv_inference_first_response_histogram_ms",
    "histogram",
    "Duration from request to first response in milliseconds",
)
"""Triton's histogram; each model may set its buckets."""


@lru_cache(maxsize=64)
def _first_response_template(bounds_ms: Sequence[float]) -> Template:
    return Template(FIRST_RESPONSE, histogram_samples(bounds(bounds_ms)))


def first_responses(model: ModelLabels, counted: FirstResponseCounts) -> str:
    """The samples of `FIRST_RESPONSE` of a model version."""
    template = _first_response_template(tuple(counted.bounds_ms))
    return template.render(model, (*counted.counts, counted.ms, counted.counts[-1]))


PENDING = Template(
    Family(
        "nv_inference_pending_request_count",
        "gauge",
        "Instantaneous number of pending requests awaiting execution per-model.",
    )
)
WAITING = Template(Family("conch_pending_requests", "gauge", "Requests that wait for their execution"))
IN_MODEL = Template(
    Family(
        "conch_running_requests",
        "gauge",
        "Requests that are being executed, or still answered by a model that has returned",
    )
)
WORKER_STATES = ("serving", "starting", "lost", "waiting")
WORKERS = Template(
    Family(
        "conch_workers",
        "gauge",
        "Worker processes of a model's instances, by what they are in; waiting for their next start, if they "
        "have died",
    ),
    [("", "state", state) for state in WORKER_STATES],
)
WORKER_RESTARTS = Template(
    Family("conch_worker_restarts_total", "counter", "Starts of worker processes in place of dead ones")
)
SATURATION = Template(
    Family(
        "conch_saturation",
        "gauge",
        "Share of the instances' time in which they have run batches since the last measurement [0.0 - 1.0]",
    )
)
LOAD_SECONDS = Template(Family("nv_model_load_duration_secs", "gauge", "Model load time in seconds"))
"""Gauges of model versions."""

"""Views of a server: changes between two samples of its metrics. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from conch_tools.top.samples import Sample

_SUCCESS = "nv_inference_request_success"
_FAILURE = "nv_inference_request_failure"
_ROWS = "nv_inference_count"
_EXECUTIONS = "nv_inference_exec_count"
_DURATION = "nv_inference_request_duration_us"
_QUEUE = "nv_inference_queue_duration_us"
_BUCKET = "conch_request_duration_seconds_bucket"
_GPU = {
    "utilization": "nv_gpu_utilization",
    "memory_bytes": "nv_gpu_memory_used_bytes",
    "memory_total_bytes": "nv_gpu_memory_total_bytes",
}

Key = tuple[str, str]
"""A model, behind its namespace if there is one, and its version."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """One version of a model. What the server does not say is None, as are rates of a first sample.

    Attributes:
        model: Its name; ``NAMESPACE/NAME`` with namespaces.
        version: Its version.
        requests_s: Requests that succeeded, a second.
        failures_s: Requests that failed or were rejected, a second.
        mean_ms: Mean latency of those that succeeded.
        p50_ms: Median latency.
        p99_ms: 99th percentile of the latency.
        queue_ms: Mean time in the queue.
        pending: Requests in the queue now.
        running: Requests that are executed now.
        batch: Mean rows of an execution.
        busy: Share of the instances' time in which they ran batches.
        workers: Worker processes that serve.
        workers_all: All of them.
        restarts: Worker processes started in place of dead ones.
    """

    model: str
    version: str
    requests_s: float | None = None
    failures_s: float | None = None
    mean_ms: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    queue_ms: float | None = None
    pending: int | None = None
    running: int | None = None
    batch: float | None = None
    busy: float | None = None
    workers: int | None = None
    workers_all: int | None = None
    restarts: int | None = None


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU of the server.

    Attributes:
        uuid: Its identifier.
        utilization: Share of the time in which it ran.
        memory_bytes: Memory in use.
        memory_total_bytes: All its memory.
    """

    uuid: str
    utilization: float | None
    memory_bytes: int | None
    memory_total_bytes: int | None


@dataclass(frozen=True, slots=True)
class ServerView:
    """The server and its machine; values that it does not export are None.

    Attributes:
        ready: True if it is ready.
        started: Start of the process, in seconds since the epoch.
        cores: Cores that its process used.
        memory_bytes: Resident memory of its process, without its workers.
        machine_memory_bytes: Memory in use on the machine.
        machine_memory_total_bytes: All memory of the machine.
        gpus: Its GPUs.
        versions: Model versions by state.
        failed_loads: Models whose newest load has failed.
    """

    ready: bool | None
    started: float | None
    cores: float | None
    memory_bytes: int | None
    machine_memory_bytes: int | None
    machine_memory_total_bytes: int | None
    gpus: Sequence[GpuView]
    versions: Mapping[str, int]
    failed_loads: Sequence[str]


def model_views(before: Sample | None, now: Sample) -> list[ModelView]:
    """All versions that serve, by name; without rates if there is nothing to compare with."""
    total = {
        name: _by_version(now, name) for name in (_SUCCESS, _FAILURE, _ROWS, _EXECUTIONS, _DURATION, _QUEUE)
    }
    grown = {} if before is None else {name: _growth(before, now, name) for name in total}
    buckets = {} if before is None else _bucket_growth(before, now)
    seconds = 0.0 if before is None else now.at_s - before.at_s
    gauges = {
        name: _by_version(now, name)
        for name in ("nv_inference_pending_request_count", "conch_running_requests", "conch_saturation")
    }
    workers = _by_version(now, "conch_workers")
    serving = _by_version(now, "conch_workers", lambda labels: labels.get("state") == "serving")
    restarts = _by_version(now, "conch_worker_restarts_total")
    found = []
    for key in sorted(total[_SUCCESS]):
        change: dict[str, float | None] = {name: values.get(key) for name, values in grown.items()}
        requests = change.get(_SUCCESS)
        found.append(
            ModelView(
                *key,
                requests_s=_ratio(requests, seconds),
                failures_s=_ratio(change.get(_FAILURE), seconds),
                mean_ms=_ratio(change.get(_DURATION), requests, 1e-3),
                p50_ms=_quantile(buckets.get(key, ()), 0.5),
                p99_ms=_quantile(buckets.get(key, ()), 0.99),
                queue_ms=_ratio(change.get(_QUEUE), requests, 1e-3),
                pending=_whole(gauges["nv_inference_pending_request_count"].get(key)),
                running=_whole(gauges["conch_running_requests"].get(key)),
                batch=_ratio(change.get(_ROWS), change.get(_EXECUTIONS)),
                busy=gauges["conch_saturation"].get(key),
                workers=_whole(serving.get(key)),
                workers_all=_whole(workers.get(key)),
                restarts=_whole(restarts.get(key)),
            )
        )
    return found


def server_view(before: Sample | None, now: Sample) -> ServerView:
    """The server; without CPU if there is nothing to compare with."""
    cpu = "process_cpu_seconds_total"
    cpu_s, cpu_before_s = now.value(cpu), None if before is None else before.value(cpu)
    cores = None
    if before is not None and cpu_s is not None and cpu_before_s is not None:
        cores = _ratio(cpu_s - cpu_before_s, now.at_s - before.at_s)
    ready = now.value("conch_ready")
    gpus: dict[str, dict[str, float]] = {}
    for field, name in _GPU.items():
        for labels, value in now.series.get(name, ()):
            gpus.setdefault(labels.get("gpu_uuid", ""), {})[field] = value
    return ServerView(
        ready=None if ready is None else ready == 1,
        started=now.value("process_start_time_seconds"),
        cores=cores,
        memory_bytes=_whole(now.value("process_resident_memory_bytes")),
        machine_memory_bytes=_whole(now.value("nv_cpu_memory_used_bytes")),
        machine_memory_total_bytes=_whole(now.value("nv_cpu_memory_total_bytes")),
        gpus=[
            GpuView(
                uuid,
                values.get("utilization"),
                _whole(values.get("memory_bytes")),
                _whole(values.get("memory_total_bytes")),
            )
            for uuid, values in sorted(gpus.items())
        ],
        versions={
            labels["state"]: int(value) for labels, value in now.series.get("conch_model_versions", ())
        },
        failed_loads=sorted(
            labels["model"] for labels, value in now.series.get("conch_model_load_failed", ()) if value
        ),
    )


def is_same_server(before: Sample, now: Sample) -> bool:
    """True unless the server restarted in between, which resets all counters."""
    name = "process_start_time_seconds"
    return before.value(name) == now.value(name)


def _key(labels: Mapping[str, str]) -> Key:
    name = labels.get("model", "")
    namespace = labels.get("namespace")
    return (f"{namespace}/{name}" if namespace else name, labels.get("version", ""))


def _by_version(
    sample: Sample, name: str, counted: Callable[[Mapping[str, str]], bool] = lambda labels: True
) -> dict[Key, float]:
    """The sums over other labels."""
    found: dict[Key, float] = {}
    for labels, value in sample.series.get(name, ()):
        if counted(labels):
            key = _key(labels)
            found[key] = found.get(key, 0.0) + value
    return found


def _growth(before: Sample, now: Sample, name: str) -> dict[Key, float]:
    """Growth of a counter; one that is smaller was reset, with a reload of its model."""
    first = _by_version(before, name)
    return {
        key: value - first.get(key, 0.0) if value >= first.get(key, 0.0) else value
        for key, value in _by_version(now, name).items()
    }


def _bucket_growth(before: Sample, now: Sample) -> dict[Key, list[tuple[float, float]]]:
    """Upper bounds and cumulative counts of the latencies in between."""
    found: dict[Key, list[tuple[float, float]]] = {}
    first, last = _buckets(before), _buckets(now)
    for key, counts in last.items():
        earlier = first.get(key, {})
        if counts.get(math.inf, 0.0) < earlier.get(math.inf, 0.0):
            earlier = {}
        found[key] = [(bound, count - earlier.get(bound, 0.0)) for bound, count in sorted(counts.items())]
    return found


def _buckets(sample: Sample) -> dict[Key, dict[float, float]]:
    found: dict[Key, dict[float, float]] = {}
    for labels, value in sample.series.get(_BUCKET, ()):
        found.setdefault(_key(labels), {})[float(labels["le"])] = value
    return found


def _quantile(buckets: Sequence[tuple[float, float]], quantile: float) -> float | None:
    """Quantile in milliseconds, interpolated within its bucket as if values were spread evenly."""
    wanted = quantile * buckets[-1][1] if buckets else 0.0
    if not wanted:
        return None
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            # The last bucket has no upper bound.
            found = low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (count - below)
            return 1e3 * found
        low, below = bound, count
    raise AssertionError("the last bucket has all values")


def _ratio(part: float | None, whole: float | None, factor: float = 1.0) -> float | None:
    return None if part is None or not whole else factor * part / whole


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)

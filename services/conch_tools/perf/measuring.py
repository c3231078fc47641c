"""Measures a model: asks the server for it, makes requests, runs each load, reads the server's counts."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from time import monotonic_ns, time_ns
from typing import Any
from urllib.parse import quote

from conch_tools.perf.gpu_metrics import GpuMetrics
from conch_tools.perf.load.coordinator import run_load
from conch_tools.perf.load.load_process import LoadPlan
from conch_tools.perf.load.ready_requests import ReadyRequest
from conch_tools.perf.load.recorded_values import ResponseKind, request_record
from conch_tools.perf.measure.records import RequestRecord
from conch_tools.perf.measure.results import (
    LimitsOutcome,
    Load,
    PerfResult,
    Point,
    ServerStatistics,
)
from conch_tools.perf.measure.slices import Slice
from conch_tools.perf.measure.slo_search import RateSearch, judge_points
from conch_tools.perf.model_requests import (
    MadeRequests,
    check_sequences,
    live_sequences,
    model_requests,
    sequence_batching,
    sequence_plan,
)
from conch_tools.perf.perf_settings import EndRule, PerfSettings, SettingError
from conch_tools.server_api import AskError, ServerApi

_LONGEST_WARM_UP_S = 3600
_METHODS = {
    False: "/inference.GRPCInferenceService/ModelInfer",
    True: "/inference.GRPCInferenceService/ModelStreamInfer",
}
Recorded = Callable[[Point, list[RequestRecord], int], object]
_COUNTS = {
    "requests": ("success", "count"),
    "request_ns": ("success", "ns"),
    "queue_ns": ("queue", "ns"),
    "input_ns": ("compute_input", "ns"),
    "infer_ns": ("compute_infer", "ns"),
    "output_ns": ("compute_output", "ns"),
    "cache_hits": ("cache_hit", "count"),
    "cache_hit_ns": ("cache_hit", "ns"),
    "cache_misses": ("cache_miss", "count"),
    "cache_miss_ns": ("cache_miss", "ns"),
}
_STATISTICS = tuple(each.name for each in fields(ServerStatistics))


class PerfInterrupted(Exception):
    """The user ended the last load early.

    Attributes:
        result: Measurements until then.
    """

    def __init__(self, result: PerfResult) -> None:
        super().__init__("interrupted")
        self.result = result


def run_perf(
    settings: PerfSettings,
    progress: Callable[[Load, Slice], object] = lambda load, counts: None,
    done: Callable[[Point], object] = lambda point: None,
    recorded: Recorded | None = None,
) -> PerfResult:
    """Measures a model.

    Args:
        settings: Model, loads and data.
        progress: Gets each second's counts.
        done: Gets each point.
        recorded: Gets each point, the records of its answered requests, and the start of the load in ns of
            the wall clock; None if no records are kept.

    Raises:
        SettingError, DataError: The settings or the data do not fit the model.
        AskError: The server has no such model, or does not answer.
        LoadError: The processes that make the load did not start.
        PerfInterrupted: KeyboardInterrupt; it has the result by then.
        KeyboardInterrupt: There is no result yet.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    api = ServerApi(settings.endpoint)
    api.check()
    _check(settings)
    config = {} if settings.path else api.config(settings.model, settings.version)
    decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
    if decoupled and not settings.streams:
        raise SettingError(f"model '{settings.model}' is decoupled: measure it with --stream")
    batching = sequence_batching(api, settings, config)
    if batching is not None:
        check_sequences(settings)
    elif settings.sequences is not None:
        raise SettingError(f"model '{settings.model}' has no sequences: leave out the settings of sequences")
    points: list[Point] = []
    request_bytes = 0
    interrupted = False
    try:
        with model_requests(settings, api, config, decoupled) as made:
            request_bytes = len(made.streams[0][0].body)
            for load, plan in _plans(settings, made.streams, decoupled, batching, points):
                whole = replace(plan, keeps=recorded is not None)
                point, interrupted, began_ns = _measure(settings, api, config, whole, partial(progress, load))
                if interrupted and not point.length_s:  # in the warm-up
                    break
                points.append(point)
                done(point)
                if recorded is not None:
                    offset_ns = time_ns() - monotonic_ns()
                    recorded(point, _records(settings, made, point, offset_ns), began_ns + offset_ns)
                if interrupted or (settings.end_rule is not None and settings.end_rule.ends_walk(point)):
                    break
    except KeyboardInterrupt:
        interrupted = True
    if interrupted and not points:
        raise KeyboardInterrupt
    result = PerfResult(
        model=settings.model,
        version=settings.version,
        endpoint=settings.endpoint.url,
        protocol="grpc-stream" if settings.streams else settings.endpoint.protocol,
        batch=settings.batch,
        request_bytes=request_bytes,
        argv=tuple(settings.arguments),
        machine=_machine(),
        started=started,
        points=tuple(points),
        interrupted=interrupted,
        limits=_limits_outcome(settings, points),
    )
    if interrupted:
        raise PerfInterrupted(result)
    return result


def _check(settings: PerfSettings) -> None:
    """Raises SettingError: settings do not go together."""
    http = settings.endpoint.protocol == "http"
    if settings.streams and http:
        raise SettingError("--stream needs gRPC: a URL with grpc://")
    if settings.path and not http:
        raise SettingError("--endpoint needs HTTP: a URL with http://")
    if settings.tensors == "json" and not http:
        raise SettingError("--tensors json needs HTTP: a URL with http://")
    if settings.tensors == "json" and settings.shared_memory:
        raise SettingError("--tensors json and --shm system do not go together")


def _records(settings: PerfSettings, made: MadeRequests, point: Point, offset_ns: int) -> list[RequestRecord]:
    kind: ResponseKind = "stream" if settings.streams else "grpc"
    if settings.endpoint.protocol == "http":
        kind = "text" if settings.path else "http"
    return [
        request_record(call, made.inputs[call.row], kind, offset_ns)
        for one in point.slices
        for call in one.records
    ]


def _plans(
    settings: PerfSettings,
    streams: Sequence[Sequence[ReadyRequest]],
    decoupled: bool,
    batching: Mapping[str, Any] | None,
    points: Sequence[Point],
) -> Iterator[tuple[Load, LoadPlan]]:
    """Each load; those of a search follow from the points so far."""
    if settings.loads:
        for load in settings.loads:
            yield load, _plan(settings, load, streams, decoupled, batching)
        return
    search = RateSearch(settings.limits)
    while (rate := search.ask()) is not None:
        load = Load("rate", rate, settings.distribution)
        yield load, _plan(settings, load, streams, decoupled, batching)
        search.tell(points[-1])


def _limits_outcome(settings: PerfSettings, points: Sequence[Point]) -> LimitsOutcome | None:
    if not settings.limits:
        return None
    if settings.loads:
        return judge_points(settings.limits, points)
    search = RateSearch(settings.limits)
    for point in points:
        search.tell(point)
    return search.outcome()


def _measure(
    settings: PerfSettings,
    api: ServerApi,
    config: Mapping[str, Any],
    plan: LoadPlan,
    progress: Callable[[Slice], object],
) -> tuple[Point, bool, int]:
    """Runs one load; returns its point, True if the user ended it early, and its start, monotonic."""
    load, rule = plan.load, settings.end_rule
    processes = settings.processes or max(1, (os.cpu_count() or 1) // 2)
    if load.mode == "concurrency":
        processes = min(processes, int(load.value))
    if settings.warm_up_calls:
        warm_up = replace(plan, calls=settings.warm_up_calls, seconds=_LONGEST_WARM_UP_S, keeps=False)
        run_load(warm_up, min(processes, settings.warm_up_calls), lambda counts: None)
    statistics = _BoundStatistics(partial(_statistics, api, settings, config), settings.warm_up, rule)
    gpus = GpuMetrics(settings.metrics_url, settings.metrics_interval_s) if settings.metrics_url else None
    with gpus or nullcontext():
        outcome = run_load(plan, processes, progress, statistics.enough)
    interrupted = outcome.interrupted
    slices, length_s = tuple(outcome.slices[settings.warm_up :]), outcome.length_s - settings.warm_up
    if rule is not None:
        slices = rule.counted(slices)
        length_s = len(slices)
    try:
        times = statistics.of(slices)
    except KeyboardInterrupt:
        times, interrupted = {}, True
    own = times.pop(settings.model, None)
    metrics = {} if gpus is None else gpus.found()
    notes = [f"{text[0].upper()}{text[1:]}." for text in outcome.lost]
    if outcome.stream_limit:
        notes.append(
            f"Calls waited for streams: the server allows {outcome.stream_limit} on each of "
            f"{plan.connections} connections; set more --connections."
        )
    notes += [f"The server said of {error}: {text}" for error, text in outcome.texts.items()]
    point = Point(
        load,
        slices,
        max(length_s, 0),
        plan.connections,
        outcome.generator,
        own,
        times,
        metrics,
        notes=tuple(notes),
    )
    return point, interrupted, outcome.begin_ns


class _BoundStatistics:
    """The server's statistics at each second of a load at which what counts may begin or end."""

    def __init__(
        self, read: Callable[[], dict[str, ServerStatistics]], warm_up: int, rule: EndRule | None
    ) -> None:
        self._read = read
        self._warm_up = warm_up
        self._rule = rule
        self._at = {} if warm_up else {0: read()}

    def enough(self, slices: Sequence[Slice]) -> bool:
        """Takes all whole seconds so far; True if the load is over."""
        counted = slices[self._warm_up :]
        bounds = {self._warm_up} if len(slices) >= self._warm_up else set()
        if self._rule is not None and counted:
            bounds.update(self._rule.boundaries(counted))
        new = bounds - self._at.keys()
        if new and all(self._at.values()):  # a server that has not answered is not asked again
            self._at.update(dict.fromkeys(new, self._read()))
        return self._rule is not None and self._rule.enough(counted)

    def of(self, slices: Sequence[Slice]) -> dict[str, ServerStatistics]:
        """Counts of the server in these seconds; to now, if they end with the load."""
        if not slices:
            return {}
        before, after = self._at.get(slices[0].second, {}), self._at.get(slices[-1].second + 1)
        return _difference(before, self._read() if after is None else after)


def _plan(
    settings: PerfSettings,
    load: Load,
    streams: Sequence[Sequence[ReadyRequest]],
    decoupled: bool,
    batching: Mapping[str, Any] | None,
) -> LoadPlan:
    http = settings.endpoint.protocol == "http"
    in_flight = int(load.value) if load.mode == "concurrency" else 128
    if batching is not None:
        in_flight = live_sequences(settings, load)
    path = _METHODS[settings.streams]
    if settings.path:
        path = f"/{settings.path.removeprefix('/')}"
    elif http:
        path = f"/v2/models/{quote(settings.model, safe='')}"
        path += f"/versions/{settings.version}/infer" if settings.version else "/infer"
    return LoadPlan(
        settings.endpoint,
        path,
        settings.streams,
        decoupled,
        [] if batching is not None else [request for stream in streams for request in stream],
        load,
        settings.connections or (in_flight if http else -(-in_flight // 8)),
        settings.warm_up + settings.seconds,
        settings.most_outstanding,
        settings.gaps_us,
        settings.seed,
        settings.calls,
        None if batching is None else sequence_plan(settings, streams, batching),
        0 if batching is None else live_sequences(settings, load),
        any(request.expected is not None for stream in streams for request in stream),
    )


def _statistics(
    api: ServerApi, settings: PerfSettings, config: Mapping[str, Any]
) -> dict[str, ServerStatistics]:
    """Counts of the model by name, and of those it consists of by ``name:version``, if there are any."""
    if settings.path:
        return {}
    steps = config.get("ensemble_scheduling", {}).get("step", ())
    names = {step["model_name"]: "" for step in steps} | dict(settings.composing)
    found = {}
    for name, version in {settings.model: settings.version, **names}.items():
        try:
            versions = api.statistics(name, version)
        except AskError:  # no model of the name, or the server has ended; the figures of the load count
            continue
        if name == settings.model:
            found[name] = _sum(versions)
        else:
            found |= {f"{name}:{each.get('version', '')}": _sum([each]) for each in versions}
    return found


def _sum(versions: Sequence[Mapping[str, Any]]) -> ServerStatistics:
    counts: dict[str, int] = dict.fromkeys(_STATISTICS, 0)
    for each in versions:
        stats = each.get("inference_stats", {})
        counts["inferences"] += int(each.get("inference_count", 0))
        counts["executions"] += int(each.get("execution_count", 0))
        for count, (member, unit) in _COUNTS.items():
            counts[count] += int(stats.get(member, {}).get(unit, 0))
    return ServerStatistics(**counts)


def _difference(
    before: Mapping[str, ServerStatistics], after: Mapping[str, ServerStatistics]
) -> dict[str, ServerStatistics]:
    return {
        model: ServerStatistics(
            **{name: getattr(now, name) - getattr(before[model], name) for name in _STATISTICS}
        )
        for model, now in after.items()
        if model in before
    }


def _machine() -> dict[str, str]:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(os.cpu_count() or 0),
        "python": platform.python_version(),
        "load before": f"{load:.2f}",
    }

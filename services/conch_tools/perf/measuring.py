"""Measures a model: asks the server for it, makes requests, runs each load, reads the server's counts."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic_ns, time_ns
from typing import Any, Protocol
from urllib.parse import quote

from conch_tools.connection import Endpoint
from conch_tools.perf.gpu_metrics import GpuMetrics
from conch_tools.perf.load.coordinator import run_load
from conch_tools.perf.load.input_data import DataError, made_up, read_files, read_payloads, rules_of
from conch_tools.perf.load.load_process import Plan
from conch_tools.perf.load.ready_requests import (
    InputTensor,
    ReadyRequest,
    grpc_request,
    http_request,
    json_request,
)
from conch_tools.perf.load.recorded_values import ResponseKind, request_record
from conch_tools.perf.measure.records import RequestRecord
from conch_tools.perf.measure.results import Load, PerfResult, Point, ServerStatistics
from conch_tools.perf.measure.slices import Slice
from conch_tools.perf.measure.slo_search import Limit, RateSearch
from conch_tools.server_api import AskError, ServerApi

_POOL = 64
"""Requests with values of their own, so that caches of the server do not answer."""

_LONGEST_WARM_UP_S = 3600
_CONNECT_S = 10.0
_METHODS = {
    False: "/inference.GRPCInferenceService/ModelInfer",
    True: "/inference.GRPCInferenceService/ModelStreamInfer",
}
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


class SettingError(Exception):
    """Settings that do not go together, or not with the model."""


class PerfInterrupted(Exception):
    """The user ended the last load early.

    Attributes:
        result: What was measured by then.
    """

    def __init__(self, result: PerfResult) -> None:
        super().__init__("interrupted")
        self.result = result


class EndRule(Protocol):
    """When a load is over before its time, and which of its seconds count; without those of the warm-up."""

    def enough(self, slices: Sequence[Slice]) -> bool:
        """Whether the load is over."""

    def counted(self, slices: Sequence[Slice]) -> tuple[Slice, ...]:
        """The seconds that count."""

    def ends_walk(self, point: Point) -> bool:
        """Whether no further load is measured."""


@dataclass(frozen=True)
class PerfSettings:
    """What is measured.

    Attributes:
        endpoint: The server.
        model: The model's name.
        version: Its version; empty for the server's choice.
        loads: One after the other.
        limits: If there are any, the highest rate that meets them is searched; ``loads`` are not used.
        distribution: Of the rates of that search.
        seconds: Length of each, that counts.
        warm_up: Seconds before them.
        batch: Rows of a request.
        shapes: Dims of inputs with free ones, by name.
        data: ``random``, ``zero``, or files; see `load.input_data`.
        reuse_data: Whether all requests have the same values.
        text_length: Of made-up texts.
        streams: Whether requests are messages of a gRPC stream.
        parameters: Of each request.
        tensors: ``binary``, or ``json`` over HTTP.
        path: To which the payloads of ``data`` are posted, instead of requests for inference; empty for none.
        skips_unknown: Whether members of data entries that are no inputs are left out, instead of refused.
        connections: 0 for as many as there are requests in flight with HTTP, and one for 8 of them with gRPC.
        processes: That make the load; 0 for half of the cores.
        most_outstanding: Requests of a rate that may be unanswered; others are shed.
        gaps_us: Of a trace, in microseconds.
        seed: Of all that is random.
        composing: Models that a BLS model calls, with their versions, whose statistics are read too.
        calls: Requests of each load, which ends with the last; 0 for as many as there is time for.
        warm_up_calls: Requests before each load.
        end_rule: None if each load takes ``seconds``, which are the most otherwise.
        metrics_url: Of the metrics port, whose GPU gauges are read during each load; empty for none.
        metrics_interval_s: Between two reads.
        arguments: The command line, for the report.
    """

    endpoint: Endpoint
    model: str
    version: str = ""
    loads: Sequence[Load] = (Load("concurrency", 1),)
    limits: Sequence[Limit] = ()
    distribution: str = "constant"
    seconds: int = 10
    warm_up: int = 2
    batch: int = 1
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    data: Sequence[str | Path] = ("random",)
    reuse_data: bool = False
    text_length: int = 128
    streams: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)
    tensors: str = "binary"
    path: str = ""
    skips_unknown: bool = False
    connections: int = 0
    processes: int = 0
    most_outstanding: int = 10_000
    gaps_us: Sequence[float] = ()
    seed: int = 0
    composing: Mapping[str, str] = field(default_factory=dict)
    calls: int = 0
    warm_up_calls: int = 0
    end_rule: EndRule | None = None
    metrics_url: str = ""
    metrics_interval_s: float = 1.0
    arguments: Sequence[str] = ()


def run_perf(
    settings: PerfSettings,
    progress: Callable[[Load, Slice], object] = lambda load, counts: None,
    done: Callable[[Point], object] = lambda point: None,
    recorded: Callable[[Point, list[RequestRecord], int], object] | None = None,
) -> PerfResult:
    """Measures a model.

    Args:
        settings: What is measured.
        progress: Gets each second's counts.
        done: Gets each point.
        recorded: Gets each point, the records of its answered requests, and when the load began, in ns of the
            wall clock; None if no records are kept.

    Raises:
        SettingError, DataError: The settings or the data do not fit the model.
        AskError: The server has no such model, or does not answer.
        LoadError: The processes that make the load have failed.
        PerfInterrupted: KeyboardInterrupt; it has the result by then.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    api = ServerApi(settings.endpoint)
    config = _config(settings, api)
    decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
    if decoupled and not settings.streams:
        raise SettingError(f"model '{settings.model}' is decoupled: measure it with --stream")
    if settings.streams and settings.endpoint.protocol == "http":
        raise SettingError("--stream needs gRPC: a URL with grpc://")
    if settings.tensors == "json" and settings.endpoint.protocol != "http":
        raise SettingError("--tensors json needs HTTP: a URL with http://")
    if config.get("sequence_batching"):
        raise SettingError(f"model '{settings.model}' has sequences, which conch perf does not send yet")
    made = _requests(settings, config, decoupled)
    requests = [replace(each, row=row) for row, each in enumerate(made.requests)]
    processes = settings.processes or max(1, (os.cpu_count() or 1) // 2)
    points = []
    interrupted = False
    search = RateSearch(settings.limits) if settings.limits else None
    for load in settings.loads if search is None else _searched(search, settings.distribution):
        plan = replace(_plan(settings, load, requests, decoupled), keeps=recorded is not None)
        share = processes if load.mode == "rate" else min(processes, int(load.value))
        if settings.warm_up_calls:
            _warm_up(plan, settings.warm_up_calls, share)
        before = _statistics(api, settings, config)
        rule = settings.end_rule
        enough = None if rule is None else partial(_enough, rule, settings.warm_up)
        gpus = GpuMetrics(settings.metrics_url, settings.metrics_interval_s) if settings.metrics_url else None
        with gpus or nullcontext():
            outcome = run_load(plan, share, partial(progress, load), enough)
        times = _difference(before, _statistics(api, settings, config))
        slices, length_s = tuple(outcome.slices[settings.warm_up :]), outcome.length_s - settings.warm_up
        if rule is not None:
            slices = rule.counted(slices)
            length_s = len(slices)
        own = times.pop(settings.model, None)
        metrics = {} if gpus is None else gpus.found()
        point = Point(
            load, slices, max(length_s, 0), plan.connections, outcome.generator, own, times, metrics
        )
        points.append(point)
        done(point)
        if recorded is not None:
            offset_ns = time_ns() - monotonic_ns()
            recorded(point, _records(settings, made, slices, offset_ns), outcome.begin_ns + offset_ns)
        if search is not None:
            search.tell(point)
        interrupted = outcome.interrupted
        if interrupted or (rule is not None and rule.ends_walk(point)):
            break
    result = PerfResult(
        model=settings.model,
        version=settings.version,
        endpoint=settings.endpoint.url,
        protocol="grpc-stream" if settings.streams else settings.endpoint.protocol,
        batch=settings.batch,
        request_bytes=len(requests[0].body),
        argv=tuple(settings.arguments),
        machine=_machine(),
        started=started,
        points=tuple(points),
    )
    if interrupted:
        raise PerfInterrupted(result)
    return result


def _config(settings: PerfSettings, api: ServerApi) -> Mapping[str, Any]:
    """The model's config; payloads need none, only a server."""
    if not settings.path:
        return api.config(settings.model, settings.version)
    if settings.endpoint.protocol != "http":
        raise SettingError("--endpoint needs HTTP: a URL with http://")
    try:
        settings.endpoint.connect(_CONNECT_S).close()
    except OSError as error:
        raise AskError(f"{settings.endpoint.url}: {error}", False) from None
    return {}


def _warm_up(plan: Plan, calls: int, processes: int) -> None:
    load = replace(plan, calls=calls, seconds=_LONGEST_WARM_UP_S, keeps=False)
    run_load(load, min(processes, calls), lambda counts: None)


def _records(
    settings: PerfSettings, made: _Made, slices: Sequence[Slice], offset_ns: int
) -> list[RequestRecord]:
    return [
        request_record(call, made.inputs[call.row], _kind(settings), offset_ns)
        for one in slices
        for call in one.records
    ]


def _enough(rule: EndRule, warm_up: int, slices: Sequence[Slice]) -> bool:
    return rule.enough(slices[warm_up:])


def _searched(search: RateSearch, distribution: str) -> Iterator[Load]:
    while (rate := search.ask()) is not None:
        yield Load("rate", rate, distribution)


def _plan(settings: PerfSettings, load: Load, requests: Sequence[ReadyRequest], decoupled: bool) -> Plan:
    http = settings.endpoint.protocol == "http"
    in_flight = int(load.value) if load.mode == "concurrency" else 128
    path = _METHODS[settings.streams]
    if settings.path:
        path = f"/{settings.path.removeprefix('/')}"
    elif http:
        path = f"/v2/models/{quote(settings.model, safe='')}"
        path += f"/versions/{settings.version}/infer" if settings.version else "/infer"
    return Plan(
        settings.endpoint,
        path,
        settings.streams,
        decoupled,
        requests,
        load,
        settings.connections or (in_flight if http else -(-in_flight // 8)),
        settings.warm_up + settings.seconds,
        settings.most_outstanding,
        settings.gaps_us,
        settings.seed,
        settings.calls,
    )


@dataclass(frozen=True)
class _Made:
    """Requests, and the inputs of each for its records."""

    requests: Sequence[ReadyRequest]
    inputs: Sequence[Sequence[InputTensor] | bytes]


def _kind(settings: PerfSettings) -> ResponseKind:
    if settings.path:
        return "text"
    if settings.endpoint.protocol == "http":
        return "http"
    return "stream" if settings.streams else "grpc"


def _requests(settings: PerfSettings, config: Mapping[str, Any], decoupled: bool) -> _Made:
    if settings.path:
        files = [each for each in settings.data if isinstance(each, Path)]
        if len(files) < len(settings.data):
            raise SettingError("--endpoint needs --data FILE.json with payloads")
        payloads = read_payloads(files)
        return _Made([ReadyRequest(payload) for payload in payloads], payloads)
    rules = rules_of(config, settings.shapes)
    batched = int(config.get("max_batch_size", 0)) > 0
    most = int(config.get("max_batch_size", 0))
    if settings.batch > max(most, 1):
        raise SettingError(f"-b {settings.batch}: model '{settings.model}' has max_batch_size {most}")
    kinds = [each for each in settings.data if isinstance(each, str)]
    paths = [each for each in settings.data if isinstance(each, Path)]
    if (kinds and paths) or len(kinds) > 1:
        raise SettingError("--data takes random, zero, or files")
    if paths:
        streams = read_files(paths, rules, settings.batch, batched, settings.skips_unknown)
        if any(len(stream) > 1 for stream in streams):
            raise DataError("the data has sequences, but the model has none")
        rows: Sequence[Sequence[InputTensor]] = [stream[0] for stream in streams]
    else:
        count = 1 if settings.reuse_data or kinds == ["zero"] else _POOL
        rows = made_up(rules, settings.batch, batched, count, kinds[0], settings.seed, settings.text_length)
    if settings.tensors == "json":
        try:
            return _Made([json_request(tensors, dict(settings.parameters)) for tensors in rows], rows)
        except ValueError as error:
            raise DataError(f"--tensors json: {error}") from None
    if settings.endpoint.protocol == "http":
        return _Made([http_request(tensors, dict(settings.parameters)) for tensors in rows], rows)
    parameters = dict(settings.parameters)
    if decoupled:
        parameters["triton_enable_empty_final_response"] = True
    return _Made(
        [grpc_request(settings.model, settings.version, tensors, parameters) for tensors in rows], rows
    )


def _statistics(
    api: ServerApi, settings: PerfSettings, config: Mapping[str, Any]
) -> dict[str, ServerStatistics]:
    """Counts of the model by name, and of those it consists of by ``name:version``, if the server has any."""
    if settings.path:
        return {}
    steps = config.get("ensemble_scheduling", {}).get("step", ())
    names = {step["model_name"]: "" for step in steps} | dict(settings.composing)
    found = {}
    for name, version in {settings.model: settings.version, **names}.items():
        try:
            versions = api.statistics(name, version)
        except AskError as error:
            if not error.reached:
                raise
            continue
        if name == settings.model:
            found[name] = _sum(versions)
        else:
            found |= {f"{name}:{each.get('version', '')}": _sum([each]) for each in versions}
    return found


def _sum(versions: Sequence[Mapping[str, Any]]) -> ServerStatistics:
    counts: dict[str, int] = dict.fromkeys(ServerStatistics.__dataclass_fields__, 0)
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
    names = ServerStatistics.__dataclass_fields__
    return {
        model: ServerStatistics(**{name: getattr(now, name) - getattr(before[model], name) for name in names})
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

"""One measurement: a load of `conch perf` on one server, and the server's CPU time for it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import grpc

from bench import perf_analyzer
from bench.measurement import (
    STABILITY_PERCENT,
    TRIALS,
    Figures,
    Measurement,
    MeasurementError,
    UnstableError,
)
from bench.protocol import Probe
from bench.scenes import Scene
from bench.servers import BenchServer
from conch_tools.connection import parse_url
from conch_tools.perf.load.coordinator import LoadError
from conch_tools.perf.load.input_data import DataError
from conch_tools.perf.measure.results import Load, Point
from conch_tools.perf.measure.slices import Slice
from conch_tools.perf.measuring import run_perf
from conch_tools.perf.perf_analyzer.windows import Windows
from conch_tools.perf.perf_settings import PerfSettings, SettingError
from conch_tools.server_api import AskError

WARM_UP_S = 1
TIMEOUT_S = 120


class CountWindows:
    """Ends a load once its windows agree, or with the first failed request.

    Args:
        requests: Requests of a window, which lasts a whole second at least.
    """

    def __init__(self, requests: int) -> None:
        self._windows = Windows(requests=requests, spread=STABILITY_PERCENT / 100, most=TRIALS)
        self.counted = self._windows.counted
        self.stable = self._windows.stable
        self.boundaries = self._windows.boundaries

    def enough(self, slices: Sequence[Slice]) -> bool:
        """True if the load is over: a request failed, or the windows agree."""
        return any(one.errors for one in slices) or self._windows.enough(slices)

    def ends_walk(self, point: Point) -> bool:
        """There is one load only."""
        return False


def measure(scene: Scene, model: str, server: BenchServer, requests: int) -> Measurement:
    """Put the scene's load on the server.

    The CPU time is that of the whole run, and so is the number of requests that it is divided by: both
    include the seconds before the first window.

    Raises:
        UnstableError: the windows differed too much.
        MeasurementError: the server went away, or a request failed.
        ServerError: the scene needs HTTP, and the server does not speak it.
    """
    if scene.protocol == "http":
        server.wait_for_http()
    load = perf_analyzer.measure if scene.generator == "perf_analyzer" else _measure
    with Probe(server.address) as probe:
        try:
            requests_before = probe.successes(model)
            cpu_before = server.cpu_seconds()
            seen = load(scene, model, server, requests)
            cpu = server.cpu_seconds() - cpu_before
            completed = probe.successes(model) - requests_before
        except grpc.RpcError as error:
            raise MeasurementError(f"no statistics from {server.name}: {error}") from error
    if not completed:
        raise MeasurementError(f"{server.name} has counted no request")
    return Measurement(**asdict(seen), requests=completed, cpu_per_request=cpu / completed * 1e6)


def _measure(scene: Scene, model: str, server: BenchServer, requests: int) -> Figures:
    rule = CountWindows(requests)
    settings = PerfSettings(
        parse_url(f"grpc://{server.address}" if scene.protocol == "grpc" else f"http://{server.http}"),
        model,
        loads=[Load("concurrency", scene.concurrency)],
        seconds=TIMEOUT_S,
        warm_up=WARM_UP_S,
        shapes={"INPUT0": scene.shape},
        reuse_data=True,
        streams=scene.streaming,
        shared_memory=scene.shared_memory == "system",
        output_size=math.prod(scene.shape) * 4,  # the models answer with what they were sent
        tensors=scene.tensors,
        end_rule=rule,
    )
    point = measure_point(settings)
    if not rule.stable(point.slices):
        raise UnstableError
    service = point.service
    p50, p90, p95, p99 = (service.quantile_ns(share) / 1e3 for share in (0.5, 0.9, 0.95, 0.99))
    return Figures(point.achieved_rate, service.mean_ns / 1e3, p50, p90, p95, p99)


@dataclass(frozen=True)
class Window:
    """Throughput and latencies, in microseconds, at the clients in a span of time."""

    throughput: float
    p50: float
    p99: float


def measure_window(
    model: str,
    server: BenchServer,
    clients: int,
    seconds: float,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Window:
    """Keeps a model busy for some seconds, and measures all of it.

    Args:
        model: The model.
        server: The server.
        clients: Requests in flight.
        seconds: Length of the window.
        shapes: Shapes of inputs that have no fixed one.

    Raises:
        MeasurementError: a request failed, or the server went away.
    """
    settings = PerfSettings(
        parse_url(f"grpc://{server.address}"),
        model,
        loads=[Load("concurrency", clients)],
        seconds=max(round(seconds), 1),
        warm_up=0,
        shapes=dict(shapes or {}),
        reuse_data=True,
    )
    point = measure_point(settings)
    p50, p99 = (point.service.quantile_ns(share) / 1e3 for share in (0.5, 0.99))
    return Window(point.achieved_rate, p50, p99)


def measure_point(settings: PerfSettings) -> Point:
    """The only load of the settings.

    Raises:
        MeasurementError: a request failed, of the warm-up too, or there was none.
    """
    errors: Counter[str] = Counter()
    try:
        result = run_perf(settings, lambda load, counts: errors.update(counts.errors))
    except (AskError, DataError, LoadError, SettingError) as error:
        raise MeasurementError(f"conch perf: {error}") from error
    (point,) = result.points
    if failed := errors or point.errors:
        text = ", ".join(f"{count} {name}" for name, count in failed.most_common(3))
        raise MeasurementError(f"requests failed: {text}")
    if not point.answered:
        raise MeasurementError("no request was answered")
    return point

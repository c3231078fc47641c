"""The results of a run of the load generator, and their JSON file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Literal

from conch_tools.perf.measure.histogram import Histogram, merged
from conch_tools.perf.measure.json_fields import Fields, ResultsFormatError
from conch_tools.perf.measure.slices import Slice

FORMAT = 1
"""The format number of the JSON file. Older files lack notes, sequences, lost processes and limits."""

QUANTILES: Mapping[str, float] = {
    "p50": 0.5,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
    "p99.9": 0.999,
    "max": 1.0,
}
"""The percentiles that reports show."""

_MODES: Mapping[str, Literal["concurrency", "rate"]] = {"concurrency": "concurrency", "rate": "rate"}
_COUNTS = ("second", "sent", "answered", "responses", "late", "shed", "sequences")
_HISTOGRAMS = ("latency", "service", "first", "between", "next_one", "token")
_LATER = ("next_one", "token")  # files of earlier versions lack them


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one point.

    Attributes:
        mode: ``concurrency`` keeps ``value`` requests outstanding; ``rate`` sends ``value`` requests/s.
        distribution: ``constant``, ``poisson`` or ``trace:FILE``; of a rate only.
    """

    mode: Literal["concurrency", "rate"]
    value: float
    distribution: str = "constant"

    def __str__(self) -> str:
        if self.mode == "concurrency":
            return f"concurrency {self.value:g}"
        return f"rate {self.value:g}/s"


@dataclass(frozen=True, slots=True)
class Generator:
    """The load generator's own cost during a point.

    Attributes:
        cpu_s: CPU time of all its processes.
        wall_s: Length by the monotonic clock.
        lost: Processes that died, or did not end; their counts are not whole, and their CPU time is not here.
    """

    processes: int
    cpu_s: float
    wall_s: float
    lost: int = 0

    @property
    def cpu_share(self) -> float:
        """CPU time of a process by wall time; 1 is a whole core for each process."""
        return self.cpu_s / (self.wall_s * self.processes) if self.wall_s and self.processes else 0.0


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """The difference of a model's statistics before and after a point. Times are sums over all requests.

    Attributes:
        requests: Requests that succeeded.
        request_ns: Their whole time in the server.
    """

    inferences: int = 0
    executions: int = 0
    requests: int = 0
    request_ns: int = 0
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    cache_hits: int = 0
    cache_hit_ns: int = 0
    cache_misses: int = 0
    cache_miss_ns: int = 0

    def each_ns(self, total_ns: int) -> float:
        """A sum of times by the number of requests."""
        return total_ns / self.requests if self.requests else 0.0


@dataclass(frozen=True)
class Point:
    """Measurements under one load.

    Attributes:
        slices: In order of time, without the warm-up.
        length_s: Length of the measurement by the monotonic clock.
        server: None if the server has no statistics.
        composing: Statistics of an ensemble's composing models, by ``name:version``.
        metrics: Other numbers, such as ``gpu_utilization``, by name.
        send_ns: Mean time to send a request; 0 if not measured.
        receive_ns: Mean time to receive a response; 0 if not measured.
        notes: Sentences on other deviations from the settings.
    """

    load: Load
    slices: tuple[Slice, ...]
    length_s: float
    connections: int
    generator: Generator
    server: ServerStatistics | None = None
    composing: Mapping[str, ServerStatistics] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    send_ns: float = 0.0
    receive_ns: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def sent(self) -> int:
        """Requests sent."""
        return sum(one.sent for one in self.slices)

    @property
    def answered(self) -> int:
        """Requests answered without an error."""
        return sum(one.answered for one in self.slices)

    @property
    def responses(self) -> int:
        """Responses of the answered requests."""
        return sum(one.responses for one in self.slices)

    @property
    def late(self) -> int:
        """Requests sent more than 1 ms late."""
        return sum(one.late for one in self.slices)

    @property
    def shed(self) -> int:
        """Requests never sent, because too many were outstanding."""
        return sum(one.shed for one in self.slices)

    @property
    def sequences(self) -> int:
        """Sequences that have ended."""
        return sum(one.sequences for one in self.slices)

    @cached_property
    def errors(self) -> Counter[str]:
        """Failed requests, by status."""
        whole: Counter[str] = Counter()
        for one in self.slices:
            whole.update(one.errors)
        return whole

    @property
    def failed(self) -> int:
        """All failed requests."""
        return sum(self.errors.values())

    @property
    def error_share(self) -> float:
        """Failed requests by ended requests."""
        ended = self.answered + self.failed
        return self.failed / ended if ended else 0.0

    @property
    def achieved_rate(self) -> float:
        """Answered requests/s."""
        return self.answered / self.length_s if self.length_s > 0 else 0.0

    @property
    def offered_rate(self) -> float:
        """Requests/s that the load asked for: sent and shed ones. In a closed loop, those sent."""
        return (self.sent + self.shed) / self.length_s if self.length_s > 0 else 0.0

    @cached_property
    def latency(self) -> Histogram:
        """Corrected latency: from the scheduled time to the last response."""
        return merged(one.latency for one in self.slices)

    @cached_property
    def service(self) -> Histogram:
        """Service time: from the send to the last response."""
        return merged(one.service for one in self.slices)

    @cached_property
    def first(self) -> Histogram:
        """Time to first response (TTFT)."""
        return merged(one.first for one in self.slices)

    @cached_property
    def between(self) -> Histogram:
        """Inter-response latency."""
        return merged(one.between for one in self.slices)

    @cached_property
    def next_one(self) -> Histogram:
        """Time from the first to the second response (TTST)."""
        return merged(one.next_one for one in self.slices)

    @cached_property
    def token(self) -> Histogram:
        """Inter-token latency (ITL), one time for each request, with a token in each response."""
        return merged(one.token for one in self.slices)

    @property
    def token_rate(self) -> float:
        """Responses/s of the answered requests: output tokens/s with a token in each."""
        return self.responses / self.length_s if self.length_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LimitsOutcome:
    """Result of a run with limits.

    Attributes:
        limits: As given, such as ``p99=20ms``.
        met: True if all points meet them; of a search, if a rate does.
        rate: The highest rate that meets them; None if none does, or the loads were given.
        reason: One sentence.
    """

    limits: tuple[str, ...]
    met: bool
    rate: float | None
    reason: str


@dataclass(frozen=True)
class PerfResult:
    """A whole run.

    Attributes:
        endpoint: Kind of endpoint, such as ``grpc`` or ``unix socket``; no address with secrets.
        protocol: Protocol and engine, such as ``grpc/h2``.
        request_bytes: Size of one request's body.
        argv: The command line, without secrets.
        machine: Facts of the machine, by name.
        started: Wall-clock time in ISO 8601.
        interrupted: True if the last point ended early.
        limits: None for a run without limits.
    """

    model: str
    version: str
    endpoint: str
    protocol: str
    batch: int
    request_bytes: int
    argv: tuple[str, ...]
    machine: Mapping[str, str]
    started: str
    points: tuple[Point, ...]
    interrupted: bool = False
    limits: LimitsOutcome | None = None

    def to_json(self) -> str:
        """The results file's text; `from_json` reads it."""
        head = {name: value for name, value in vars(self).items() if name != "points"}
        head["argv"], head["machine"] = list(self.argv), dict(self.machine)
        head["limits"] = None if self.limits is None else asdict(self.limits)
        whole = {"format": FORMAT, **head, "points": [_point_json(point) for point in self.points]}
        return json.dumps(whole, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PerfResult:
        """Reads a results file.

        Raises:
            ResultsFormatError: It isn't one, or one of another format.
        """
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ResultsFormatError(f"not a JSON file: {error}") from error
        fields = Fields(found, "results")
        if fields.maybe("format") != FORMAT:
            raise ResultsFormatError(
                f"results.format is {fields.maybe('format')!r}; this version of conch reads format {FORMAT}"
            )
        points = fields.items("points")
        limits = fields.maybe("limits") if fields.has("limits") else None
        return cls(
            **{name: fields.text(name) for name in ("model", "version", "endpoint", "protocol", "started")},
            batch=fields.whole("batch"),
            interrupted=fields.flag("interrupted"),
            request_bytes=fields.whole("request_bytes"),
            argv=fields.texts("argv"),
            machine=fields.strings("machine"),
            points=tuple(_read_point(point, f"points[{index}]") for index, point in enumerate(points)),
            limits=None if limits is None else _read_limits(limits),
        )


def _read_limits(found: object) -> LimitsOutcome:
    fields = Fields(found, "limits")
    rate = None if fields.maybe("rate") is None else fields.number("rate")
    return LimitsOutcome(fields.texts("limits"), fields.flag("met"), rate, fields.text("reason"))


def _point_json(point: Point) -> dict[str, object]:
    return {
        "load": {**asdict(point.load), "value": float(point.load.value)},
        "length_s": point.length_s,
        "connections": point.connections,
        "generator": asdict(point.generator),
        "server": asdict(point.server) if point.server else None,
        "composing": {name: asdict(statistics) for name, statistics in point.composing.items()},
        "metrics": dict(point.metrics),
        "send_ns": point.send_ns,
        "receive_ns": point.receive_ns,
        "notes": list(point.notes),
        "slices": [_slice_json(one) for one in point.slices],
    }


def _slice_json(one: Slice) -> dict[str, object]:
    counts = {name: getattr(one, name) for name in _COUNTS}
    times = {name: getattr(one, name).to_json() for name in _HISTOGRAMS}
    return {**counts, "errors": dict(one.errors), **times}


def _read_point(found: object, where: str) -> Point:
    fields = Fields(found, where)
    load = Fields(fields.mapping("load"), f"{where}.load")
    mode = _MODES.get(load.text("mode"))
    if mode is None:
        raise ResultsFormatError(f"{where}.load.mode must be 'concurrency' or 'rate'")
    generator = Fields(fields.mapping("generator"), f"{where}.generator")
    server = fields.maybe("server")
    return Point(
        load=Load(mode, load.number("value"), load.text("distribution")),
        slices=tuple(
            _read_slice(one, f"{where}.slices[{index}]") for index, one in enumerate(fields.items("slices"))
        ),
        length_s=fields.number("length_s"),
        connections=fields.whole("connections"),
        generator=Generator(
            generator.whole("processes"),
            generator.number("cpu_s"),
            generator.number("wall_s"),
            generator.whole("lost", 0),
        ),
        server=None if server is None else _read_statistics(server, f"{where}.server"),
        composing={
            name: _read_statistics(value, f"{where}.composing.{name}")
            for name, value in fields.mapping("composing").items()
        },
        metrics=fields.numbers("metrics"),
        send_ns=fields.number("send_ns"),
        receive_ns=fields.number("receive_ns"),
        notes=fields.texts("notes") if fields.has("notes") else (),
    )


def _read_statistics(found: object, where: str) -> ServerStatistics:
    numbers = Fields(found, where)
    return ServerStatistics(**{each.name: numbers.whole(each.name) for each in fields(ServerStatistics)})


def _read_slice(found: object, where: str) -> Slice:
    fields = Fields(found, where)
    one = Slice(fields.whole("second"), errors=Counter(fields.wholes("errors")))
    for name in _COUNTS:
        setattr(one, name, fields.whole(name, 0 if name == "sequences" else None))
    for name in _HISTOGRAMS:
        if name in _LATER and not fields.has(name):
            continue
        try:
            setattr(one, name, Histogram.from_json(fields.mapping(name)))
        except (ValueError, TypeError) as error:
            raise ResultsFormatError(f"{where}.{name}: {error}") from error
    return one

"""Settings of a measurement by `conch perf`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from conch_tools.connection import Endpoint
from conch_tools.perf.measure.results import Load, Point
from conch_tools.perf.measure.slices import Slice
from conch_tools.perf.measure.slo_search import Limit


class SettingError(Exception):
    """Settings that do not go together, or not with the model."""


class EndRule(Protocol):
    """Rule that ends a load early, and selects the seconds that count; warm-up seconds are left out."""

    def enough(self, slices: Sequence[Slice]) -> bool:
        """True if the load is over."""

    def counted(self, slices: Sequence[Slice]) -> tuple[Slice, ...]:
        """The seconds that count."""

    def boundaries(self, slices: Sequence[Slice]) -> list[int]:
        """The seconds at which what counts may begin or end."""

    def ends_walk(self, point: Point) -> bool:
        """True if no further load is measured."""


@dataclass(frozen=True)
class SequenceSettings:
    """Settings of sequences.

    Attributes:
        live: Number of concurrent sequences, for a rate.
        length: Requests of a sequence; 0 for those of the data, or 20.
        variation: Share of the length by which sequences may be shorter or longer.
        ids: Ids that sequences may have; empty for a random part of the 31-bit numbers.
    """

    live: int = 4
    length: int = 0
    variation: float = 0.2
    ids: range = range(0)


@dataclass(frozen=True)
class PerfSettings:
    """Settings of a run.

    Attributes:
        endpoint: The server.
        model: The model's name.
        version: Its version; empty for the server's choice.
        loads: One after the other; if empty, the highest rate that meets ``limits`` is searched.
        limits: Limits that each load is to meet.
        distribution: Distribution of request times in that search.
        seconds: Length of each, that counts.
        warm_up: Seconds before them.
        batch: Rows of a request.
        shapes: Dims of inputs with free ones, by name.
        data: ``random``, ``zero``, or files and directories; see `load.input_data`.
        reuse_data: True if all requests have the same values.
        text_length: Length of generated texts.
        streams: True if requests are messages of a gRPC stream.
        shared_memory: True if inputs and outputs are in system shared memory.
        output_size: Bytes there for an output without a fixed size.
        parameters: Parameters of each request.
        tensors: ``binary``, or ``json`` over HTTP.
        path: To which the payloads of ``data`` are posted, instead of requests for inference; empty for none.
        skips_unknown: True if members of data entries that are no inputs are left out, instead of refused.
        connections: 0 for as many as there are requests in flight with HTTP, and one for 8 of them with gRPC.
        processes: Number of load processes; 0 for half of the cores.
        most_outstanding: Requests of a rate that may be unanswered; others are shed.
        gaps_us: Gaps of a trace, in microseconds.
        sequences: Settings of sequences, for a model that has them.
        seed: Seed of all random values.
        composing: Models that a BLS model calls, with their versions, whose statistics are read too.
        calls: Requests of each load, which ends with the last; 0 for as many as there is time for.
        warm_up_calls: Requests before each load.
        end_rule: None if each load takes ``seconds``, which are the most otherwise.
        metrics_url: Address of the metrics port, whose GPU gauges are read during each load; empty for none.
        metrics_interval_s: Seconds between two reads.
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
    shared_memory: bool = False
    output_size: int = 102_400
    parameters: Mapping[str, Any] = field(default_factory=dict)
    tensors: str = "binary"
    path: str = ""
    skips_unknown: bool = False
    connections: int = 0
    processes: int = 0
    most_outstanding: int = 10_000
    gaps_us: Sequence[float] = ()
    sequences: SequenceSettings | None = None
    seed: int = 0
    composing: Mapping[str, str] = field(default_factory=dict)
    calls: int = 0
    warm_up_calls: int = 0
    end_rule: EndRule | None = None
    metrics_url: str = ""
    metrics_interval_s: float = 1.0
    arguments: Sequence[str] = ()

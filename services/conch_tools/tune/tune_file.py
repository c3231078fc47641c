"""Measurements of a search, their scores, and the file that keeps them: the checkpoint and the result."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from conch_tools.perf.measure.intervals import t_quantile
from conch_tools.tune.searcher import Variant
from conch_tools.whole_files import write_whole

FORMAT = 1
LATENCIES = ("p50", "p90", "p95", "p99")
OBJECTIVES = ("throughput", *LATENCIES)
_BYTES = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}
_TIMES_US = {"us": 1.0, "ms": 1e3, "s": 1e6}
_PENALTY = 0.01


class FormatError(Exception):
    """A file is not one of conch tune's, or belongs to another search."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One window of a variant.

    Attributes:
        purpose: ``search``, or ``compare`` for the pairs at the end.
        window: 1 for a full window, less for a short one.
        latency_us: By name of the percentile.
        failed: Why there is no result; empty if there is one.
    """

    variant: dict[str, Any]
    purpose: str
    window: float
    window_s: int
    load: dict[str, Any]
    started: str = ""
    requests: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    throughput: float = 0.0
    latency_us: dict[str, float] = field(default_factory=dict)
    server: dict[str, float] = field(default_factory=dict)
    host_bytes: int = 0
    client: dict[str, float] = field(default_factory=dict)
    verdict: str = ""
    failed: str = ""

    def key(self) -> Variant:
        """The variant as the searcher has it."""
        return tuple(self.variant.values())


@dataclass(frozen=True, slots=True)
class Most:
    """A constraint, such as ``p99=20ms`` or ``memory=2GB``."""

    text: str
    name: str
    most: float

    @classmethod
    def parse(cls, text: str) -> Most:
        """Reads a constraint. Raises ValueError."""
        name, equals, value = text.partition("=")
        units = _BYTES if name == "memory" else _TIMES_US if name in LATENCIES else {}
        for unit in sorted(units, key=len, reverse=True):
            number = value.removesuffix(unit)
            if equals and number != value and number.replace(".", "", 1).isdecimal() and float(number) > 0:
                return cls(text, name, float(number) * units[unit])
        raise ValueError(f"'{text}' is no limit; write {', '.join(LATENCIES)}=20ms or memory=2GB")

    def found(self, one: Measurement) -> float:
        """What a measurement has, in bytes or microseconds."""
        return float(one.host_bytes) if self.name == "memory" else one.latency_us.get(self.name, math.inf)

    def shown(self, value: float) -> str:
        """A value of this name as a text."""
        return f"{value / 1e6:.0f} MB" if self.name == "memory" else f"{value / 1e3:.1f} ms"


def excess(one: Measurement, limits: Sequence[Most]) -> float:
    """What a measurement has by the limit that it exceeds most; up to 1 meets all."""
    return max((limit.found(one) / limit.most for limit in limits), default=0.0)


def value_of(one: Measurement, objective: str) -> float:
    """What is to be high: the throughput, or the reciprocal of a latency in seconds."""
    if objective == "throughput":
        return one.throughput
    latency = one.latency_us.get(objective, 0.0)
    return 1e6 / latency if latency else 0.0


def score(one: Measurement, objective: str, limits: Sequence[Most]) -> float:
    """The searcher's score: negative without a result, low beyond a limit, and lower further from it."""
    if one.failed or not one.requests:
        return -1.0
    over = excess(one, limits)
    return value_of(one, objective) * (_PENALTY / over if over > 1 else 1.0)


@dataclass(frozen=True, slots=True)
class Gain:
    """The relative gain over today's configuration, with its 95 % interval; 0.1 is 10 % better."""

    value: float
    low: float
    high: float

    @property
    def sure(self) -> bool:
        """Whether the interval is above 0."""
        return self.low > 0


def paired_gain(pairs: Sequence[tuple[float, float]]) -> Gain | None:
    """The gain from pairs of today's value and the other one; None with fewer than 2.

    Both of a pair are measured one after the other, so that what slows the machine meets both.
    """
    ratios = [math.log(new / old) for old, new in pairs if old > 0 and new > 0]
    if len(ratios) < 2:
        return None
    mean = fmean(ratios)
    half = t_quantile(0.975, len(ratios) - 1) * stdev(ratios) / math.sqrt(len(ratios))
    return Gain(math.exp(mean) - 1, math.exp(mean - half) - 1, math.exp(mean + half) - 1)


@dataclass
class TuneFile:
    """The file ``tune.json``.

    Attributes:
        identity: What a search must have in common with the file's to continue it.
        facts: The machine, versions and the command line.
        measurements: In order.
        result: Empty until the search has ended.
    """

    identity: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    stopped_by: str = ""

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        whole = {
            "format": FORMAT,
            **self.facts,
            **self.identity,
            "measurements": [{"id": index, **asdict(one)} for index, one in enumerate(self.measurements)],
            "result": self.result,
            "stopped_by": self.stopped_by,
        }
        write_whole(path, json.dumps(whole, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> TuneFile:
        """Reads a file. Raises FormatError."""
        try:
            found = json.loads(path.read_text())
            if found.pop("format") != FORMAT:
                raise FormatError(f"{path}: this version of conch reads format {FORMAT}")
            measurements = []
            for one in found.pop("measurements"):
                one.pop("id")
                measurements.append(Measurement(**one))
            result, stopped_by = found.pop("result"), found.pop("stopped_by")
            facts = {name: found.pop(name) for name in ("tool", "machine")}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{path}: not a file of conch tune: {error}") from error
        return cls(found, facts, measurements, result, stopped_by)

    def check_same(self, identity: Mapping[str, Any], path: Path) -> None:
        """Raises FormatError: the file belongs to another search."""
        for name, value in json.loads(json.dumps(identity)).items():
            if self.identity.get(name) != value:
                raise FormatError(
                    f"{path} has another {name}: --restart begins again, -o names another folder"
                )

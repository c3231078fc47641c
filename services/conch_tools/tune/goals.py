"""Goals of a search: objectives with weights, limits, scores of measurements, and the gain of pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

from conch_tools.perf.measure.intervals import t_quantile
from conch_tools.tune.measurement import LATENCIES, Measurement

OBJECTIVES = ("throughput", *LATENCIES, "memory", "gpu_memory")
Bound = Literal["max", "min"]
_MEMORY = ("memory", "gpu_memory")
_BYTES = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}
_TIMES_US = {"us": 1.0, "ms": 1e3, "s": 1e6}
_RATES = {"": 1.0, "/s": 1.0}
_PENALTY = 0.01


@dataclass(frozen=True, slots=True)
class Objectives:
    """Objectives of a search, with weights."""

    weights: Mapping[str, float]

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Objectives:
        """Reads ``throughput`` or ``throughput=2,p99``; a weight is 1 by default. Raises ValueError."""
        weights: dict[str, float] = {}
        for text in (each for one in texts for each in one.split(",")):
            name, equals, weight = text.partition("=")
            if name not in OBJECTIVES:
                raise ValueError(f"'{name}' is none of {', '.join(OBJECTIVES)}")
            if equals and not (weight.replace(".", "", 1).isdecimal() and float(weight) > 0):
                raise ValueError(f"the weight of {name} is a number above 0, not '{weight}'")
            weights[name] = float(weight) if equals else 1.0
        return cls(weights)

    def __str__(self) -> str:
        if len(self.weights) == 1:
            return next(iter(self.weights))
        parts = (
            name if weight == 1 else f"{name} (weight {weight:g})" for name, weight in self.weights.items()
        )
        return " and ".join(parts)

    def value(self, one: Measurement) -> float:
        """Value to maximise: the weighted geometric mean of throughput and of reciprocals of the others.

        So the ratio of two values is the weighted mean of the ratios in each objective.
        """
        values = {name: _high(one, name) for name in self.weights}
        if not all(values.values()):
            return 0.0
        whole = sum(self.weights.values())
        return math.exp(sum(weight * math.log(values[name]) for name, weight in self.weights.items()) / whole)


def _high(one: Measurement, name: str) -> float:
    found = _found(one, name)
    if name == "throughput":
        return found
    # In seconds and GB, so that values can be read.
    return (1e9 if name in _MEMORY else 1e6) / found if found and math.isfinite(found) else 0.0


def _found(one: Measurement, name: str) -> float:
    if name == "throughput":
        return one.throughput
    if name == "memory":
        return float(one.host_bytes)
    if name == "gpu_memory":
        return one.gpu.get("memory_bytes", 0.0)
    return one.latency_us.get(name, math.inf)


THROUGHPUT = Objectives({"throughput": 1.0})
"""The objective of a closed loop."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A constraint, such as at most ``p99=20ms`` or at least ``throughput=100``."""

    bound: Bound
    name: str
    text: str
    value: float

    @classmethod
    def parse(cls, bound: Bound, text: str) -> Limit:
        """Reads NAME=VALUE. Raises ValueError."""
        name, equals, value = text.partition("=")
        units = _units(bound, name)
        for unit in sorted(units, key=len, reverse=True):
            number = value.removesuffix(unit) if unit else value
            if equals and value.endswith(unit) and number.replace(".", "", 1).isdecimal() and float(number):
                return cls(bound, name, value, float(number) * units[unit])
        forms = "throughput=100" if bound == "min" else f"{', '.join(LATENCIES)}=20ms or memory=2GB"
        raise ValueError(f"'{text}' is no limit; write {forms}")

    def found(self, one: Measurement) -> float:
        """Value of a measurement, in bytes, microseconds or rows a second."""
        return _found(one, self.name)

    def excess(self, one: Measurement) -> float:
        """Ratio by which a measurement misses the limit; up to 1 meets it."""
        found = self.found(one)
        if self.bound == "max":
            return found / self.value
        return self.value / found if found else math.inf

    def shown(self, value: float) -> str:
        """A value of this name as a text."""
        if self.name in _MEMORY:
            return f"{value / 1e6:.0f} MB"
        return f"{value:,.0f}/s" if self.name == "throughput" else f"{value / 1e3:.1f} ms"

    def __str__(self) -> str:
        sign = "≤" if self.bound == "max" else "≥"
        return f"{self.name} {sign} {self.shown(self.value)}"


def _units(bound: Bound, name: str) -> Mapping[str, float]:
    if bound == "min":
        return _RATES if name == "throughput" else {}
    return _BYTES if name in _MEMORY else _TIMES_US if name in LATENCIES else {}


def limits_json(limits: Iterable[Limit]) -> dict[str, dict[str, str]]:
    """As ``tune.json`` has them: ``{"p99": {"max": "20ms"}}``."""
    found: dict[str, dict[str, str]] = {}
    for limit in limits:
        found.setdefault(limit.name, {})[limit.bound] = limit.text
    return found


def limits_of(found: Mapping[str, Mapping[Any, str]]) -> list[Limit]:
    """Reads what `limits_json` made. Raises ValueError."""
    pairs = ((name, bound, text) for name, bounds in found.items() for bound, text in bounds.items())
    return [Limit.parse(bound, f"{name}={text}") for name, bound, text in pairs]


def excess(one: Measurement, limits: Sequence[Limit]) -> float:
    """Ratio to the limit that a measurement misses most; up to 1 meets all."""
    return max((limit.excess(one) for limit in limits), default=0.0)


def score(one: Measurement, objectives: Objectives, limits: Sequence[Limit]) -> float:
    """The searcher's score: negative without a result, low beyond a limit, and lower further from it."""
    if one.failed or not one.requests:
        return -1.0
    over = excess(one, limits)
    return objectives.value(one) * (_PENALTY / over if over > 1 else 1.0)


@dataclass(frozen=True, slots=True)
class Gain:
    """The relative gain over today's configuration, with its 95 % interval; 0.1 is 10 % better."""

    value: float
    low: float
    high: float

    @property
    def sure(self) -> bool:
        """True if the interval is above 0."""
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

"""Chooses among the candidates that have passed: the front, and the one to recommend. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Objective = Literal["balance", "latency", "throughput", "memory", "size"]
OBJECTIVES: tuple[Objective, ...] = ("balance", "latency", "throughput", "memory", "size")
_NEAR_BEST = 1.2


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a candidate.

    Attributes:
        id: The candidate.
        p50_us: Median latency of batches of one sample.
        throughput: Samples per second at the best batch size.
        host_bytes: Memory that loading and running it took.
        bytes: Size of its files.
    """

    id: str
    p50_us: float
    throughput: float
    host_bytes: int
    bytes: int


def front(candidates: Sequence[Measured]) -> list[Measured]:
    """Candidates that no other beats in latency and throughput, fastest first."""
    return sorted(
        (each for each in candidates if not any(_beats(other, each) for other in candidates)),
        key=lambda each: (each.p50_us, each.id),
    )


def recommended(candidates: Sequence[Measured], objective: Objective = "balance") -> Measured | None:
    """The best by an objective; ``balance`` is the highest throughput within 1.2 times the best latency."""
    if not candidates:
        return None
    if objective == "latency":
        return min(candidates, key=lambda each: (each.p50_us, each.id))
    if objective == "throughput":
        return max(candidates, key=lambda each: each.throughput)
    if objective == "memory":
        return min(candidates, key=lambda each: (each.host_bytes, each.p50_us))
    if objective == "size":
        return min(candidates, key=lambda each: (each.bytes, each.p50_us))
    limit = _NEAR_BEST * min(each.p50_us for each in candidates)
    return max((each for each in candidates if each.p50_us <= limit), key=lambda each: each.throughput)


def _beats(first: Measured, second: Measured) -> bool:
    no_worse = first.p50_us <= second.p50_us and first.throughput >= second.throughput
    return no_worse and (first.p50_us < second.p50_us or first.throughput > second.throughput)

"""Schedules of requests in an open loop; pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, cycle


def constant(rate: float, share: int = 0, shares: int = 1) -> Iterator[float]:
    """Times in ns at which one of several processes sends, which together send at a rate a second."""
    gap_ns = 1e9 / rate
    number = share
    while True:
        yield number * gap_ns
        number += shares


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Times in ns with exponential gaps."""
    chance = random.Random(seed)
    now_ns = 0.0
    while True:
        now_ns += chance.expovariate(rate) * 1e9
        yield now_ns


def traced(gaps_us: Sequence[float], share: int = 0, shares: int = 1) -> Iterator[float]:
    """Times in ns with the gaps of a trace, repeated; one process of `shares` gets one in `shares`."""
    for number, at_us in enumerate(accumulate(cycle(gaps_us))):
        if number % shares == share:
            yield at_us * 1e3


def read_gaps(text: str) -> list[float]:
    """The gaps of a trace file: a number of microseconds a line.

    Raises:
        ValueError: A line is none, or the gaps are all 0.
    """
    gaps = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            gap = float(line)
        except ValueError:
            gap = -1.0
        if not 0 <= gap < 1e12:
            raise ValueError(f"line {number} is no number of microseconds: '{line.strip()[:40]}'")
        gaps.append(gap)
    if not sum(gaps):
        raise ValueError("a trace needs a gap above 0")
    return gaps

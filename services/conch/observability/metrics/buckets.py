"""Buckets of histograms, from what the statistics keep; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

EXPONENTS = (*range(15, 31), 32, 34, 36)
"""Bounds of times are these powers of two, in nanoseconds: each from 33 µs to 1.1 s, then 4.3, 17, 69 s."""
LONG_EXPONENTS = tuple(range(20, 42, 2))
"""Those of times that may be long: from 1 ms to 18 minutes, each four times the one before."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Bounds of batch sizes."""


def bounds(upper: Sequence[float]) -> tuple[str, ...]:
    """Upper bounds as labels, with that of the last bucket; as prometheus-cpp, so Triton, writes numbers."""
    return (*(f"{bound:.16g}" for bound in upper), "+Inf")


def in_seconds(exponents: Sequence[int]) -> tuple[float, ...]:
    """Bounds in seconds."""
    return tuple(2**exponent / 1e9 for exponent in exponents)


def times(places: Sequence[int], exponents: Sequence[int] = EXPONENTS) -> list[int]:
    """Cumulative counts of times.

    Args:
        places: Place n counts times below 2**n nanoseconds and not below half that.
        exponents: The bounds are these powers of two, in nanoseconds.

    Returns:
        One count for each bound and one for all. A time of exactly a bound is in the next bucket: the
        bounds are a nanosecond too large.
    """
    below = list(accumulate(places))
    return [*(below[exponent] for exponent in exponents), below[-1]]


def sizes(executions: Mapping[int, int]) -> list[int]:
    """Cumulative counts of batch sizes, from executions by size: one for each bound and one for all."""
    return [
        *(sum(count for size, count in executions.items() if size <= bound) for bound in SIZES),
        sum(executions.values()),
    ]

"""Where the times of requests lie: counts by power of two, cheap enough for every request.

A time of n nanoseconds counts in place ``n.bit_length()`` of a list: one method call and one addition, with
no search for the bucket that it belongs to. Sums and totals are those that the statistics keep anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PLACES = 65
"""Lengths that a time can have: no monotonic clock goes beyond 64 bits."""


class Latencies:
    """How many requests took how long; callers see to it that one thread at a time uses it.

    Attributes:
        request: From receipt to response, of those that succeeded.
        queue: Waiting.
        compute_input: Preparing inputs.
        compute_infer: In the model.
        compute_output: On outputs.
    """

    __slots__ = ("compute_infer", "compute_input", "compute_output", "queue", "request")

    def __init__(self) -> None:
        self.request = [0] * PLACES
        self.queue = [0] * PLACES
        self.compute_input = [0] * PLACES
        self.compute_infer = [0] * PLACES
        self.compute_output = [0] * PLACES

    def snapshot(self) -> LatencyCounts:
        """A copy."""
        return LatencyCounts(
            tuple(self.request),
            tuple(self.queue),
            tuple(self.compute_input),
            tuple(self.compute_infer),
            tuple(self.compute_output),
        )


@dataclass(frozen=True, slots=True)
class LatencyCounts:
    """What `Latencies` held at one moment.

    Place n counts times below 2**n nanoseconds and not below half that.

    Attributes:
        request: From receipt to response, of those that succeeded.
        queue: Waiting.
        compute_input: Preparing inputs.
        compute_infer: In the model.
        compute_output: On outputs.
    """

    request: Sequence[int]
    queue: Sequence[int]
    compute_input: Sequence[int]
    compute_infer: Sequence[int]
    compute_output: Sequence[int]

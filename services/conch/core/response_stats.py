"""Counters of the single responses of a decoupled model, by their place among those of their request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from conch.core.durations import Duration

MOST_INDEXES = 1000
"""Requests may have any number of responses; from this one on they are counted together, under the last."""


class ResponseKind(IntEnum):
    """What a response was; the value is its place in a row of counters."""

    SUCCESS = 0
    FAIL = 1
    EMPTY = 2
    CANCEL = 3


@dataclass(frozen=True, slots=True)
class ResponseDurations:
    """The responses that were the n-th of their requests.

    Attributes:
        compute_infer: Time the model took from the response before, or from its start.
        compute_output: Time it took to hand the response over; the wait for a client that reads slowly is
            part of it.
        success: Responses with data, and the time of both together.
        fail: Responses with an error, and the time of both together.
        empty_response: Final flags without data, and the time the model took.
        cancel: Responses that found their request cancelled, and the time the model took.
    """

    compute_infer: Duration
    compute_output: Duration
    success: Duration
    fail: Duration
    empty_response: Duration
    cancel: Duration


class ResponseCounters:
    """Rows of counters by index; callers see to it that one thread at a time uses them."""

    def __init__(self) -> None:
        # Counts of each kind, then nanoseconds of each kind, then those of inference and of output.
        self._rows: list[list[int]] = []

    def add(self, index: int, kind: ResponseKind, infer_ns: int) -> None:
        """Counts a response that is about to be handed over."""
        index = min(index, MOST_INDEXES - 1)
        rows = self._rows
        while len(rows) <= index:
            rows.append([0] * 10)
        row = rows[index]
        row[kind] += 1
        row[4 + kind] += infer_ns
        if kind <= ResponseKind.FAIL:
            row[8] += infer_ns

    def add_output(self, index: int, kind: ResponseKind, output_ns: int) -> None:
        """Adds the time it took to hand a counted response over."""
        row = self._rows[min(index, MOST_INDEXES - 1)]
        row[4 + kind] += output_ns
        row[9] += output_ns

    def snapshot(self) -> Mapping[int, ResponseDurations]:
        """A copy."""
        return {index: _durations(row) for index, row in enumerate(self._rows)}


def _durations(row: list[int]) -> ResponseDurations:
    computed = row[ResponseKind.SUCCESS] + row[ResponseKind.FAIL]
    success, fail, empty, cancel = (Duration(row[kind], row[4 + kind]) for kind in ResponseKind)
    return ResponseDurations(
        Duration(computed, row[8]), Duration(computed, row[9]), success, fail, empty, cancel
    )

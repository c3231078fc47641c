"""`TraceSetting`: which of the requests that share it are traced, and with what.

Threads and locks: any thread; a lock guards what is left of the count.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import count

UNLIMITED = -1

_RANDOM = 2**56
"""Values of the bits of a trace id that are random, by W3C Trace Context: its last 7 bytes."""


@dataclass(frozen=True, slots=True)
class TraceValues:
    """Values of a setting.

    Attributes:
        timestamps: Whether times are traced.
        tensors: Whether tensors are.
        rate: One of so many requests is traced; 0 for those whose caller or trace id samples them only.
        count: Traces that may still be sampled; -1 for any number.
        log_frequency: Traces in one indexed file; 0 for one file.
        file: Path of the trace file, or empty.
    """

    timestamps: bool = False
    tensors: bool = False
    rate: int = 1000
    count: int = UNLIMITED
    log_frequency: int = 0
    file: str = ""

    @property
    def on(self) -> bool:
        """Whether anything is traced."""
        return self.timestamps or self.tensors


class TraceSetting:
    """Values with their sampling; replaced as a whole when one changes, which begins the counting anew."""

    __slots__ = ("_left", "_lock", "_next", "_rate", "on", "values")

    def __init__(self, values: TraceValues) -> None:
        self.values = values
        self.on = values.on  # each request looks at it
        self._rate = values.rate
        self._left = values.count
        self._lock = threading.Lock()
        self._next = count(1).__next__

    @property
    def left(self) -> int:
        """Traces that may still be sampled; -1 for any number."""
        return self._left

    def sample(self) -> bool:
        """Counts a request; returns whether it is traced, and takes it off the count."""
        rate = self._rate
        if not rate or self._next() % rate:
            return False
        return True if self._left < 0 else self._take()

    def sample_id(self, trace_id: int, threshold: int) -> bool:
        """As `sample`, by a trace id, if there is no rate; see `ratio_threshold`."""
        if self._rate or trace_id % _RANDOM < threshold:
            return False
        return True if self._left < 0 else self._take()

    def _take(self) -> bool:
        with self._lock:
            if not self._left:
                return False
            self._left -= 1
            return True


def ratio_threshold(ratio: float) -> int:
    """The least randomness of the trace ids that a share of all traces has.

    As in OpenTelemetry's consistent probability sampling:
    https://opentelemetry.io/docs/specs/otel/trace/tracestate-probability-sampling/.
    """
    return _RANDOM - round(ratio * _RANDOM)

"""Results of a measurement, whichever program made the load."""

from __future__ import annotations

from dataclasses import dataclass

WINDOWS = 3  # the last three have to agree, by the rule of perf_analyzer
TRIALS = 8  # windows until the measurement is given up
STABILITY_PERCENT = 50


class MeasurementError(RuntimeError):
    """No figure came out of a measurement; the text says why."""


class UnstableError(MeasurementError):
    """The windows did not agree; the server is well."""

    def __init__(self) -> None:
        super().__init__(f"no {WINDOWS} of {TRIALS} windows within {STABILITY_PERCENT} %")


@dataclass(frozen=True)
class Figures:
    """Throughput and latencies, in microseconds, at the clients."""

    throughput: float
    average: float
    p50: float
    p90: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Measurement(Figures):
    """Figures of the clients, and the server's cost.

    Attributes:
        requests: Requests that the server completed, those outside of the windows too.
        cpu_per_request: CPU time of the server for each, in microseconds.
    """

    requests: int
    cpu_per_request: float

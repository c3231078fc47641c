"""One measurement of a variant, and how ``tune.json`` has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LATENCIES = ("p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One window of a variant.

    Attributes:
        purpose: ``search``, or ``compare`` for the pairs at the end.
        window: 1 for a full window, less for a short one.
        latency_us: By name of the percentile.
        histogram: All latencies, as `conch_tools.perf.measure.histogram` writes them.
        gpu: ``memory_bytes`` of all GPUs, ``utilization`` and ``power_w``; empty without one.
        failed: Reason for which there is no result; empty if there is one.
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
    histogram: dict[str, Any] = field(default_factory=dict)
    server: dict[str, float] = field(default_factory=dict)
    host_bytes: int = 0
    gpu: dict[str, float] = field(default_factory=dict)
    client: dict[str, float] = field(default_factory=dict)
    verdict: str = ""
    failed: str = ""

    def to_json(self) -> dict[str, Any]:
        """As the file has it; `from_json` reads it."""
        whole = asdict(self)
        whole["latency_us"] |= {"histogram": whole.pop("histogram")}
        return whole

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Measurement:
        """Raises KeyError, TypeError: it is no measurement."""
        latency_us = dict(found["latency_us"])
        histogram = latency_us.pop("histogram")
        return cls(**{**found, "latency_us": latency_us, "histogram": histogram})

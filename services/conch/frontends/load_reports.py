"""ORCA load reports: the server's load for proxies, in the formats of response headers and trailing metadata.

Utilisation is that of the busiest model version. Models' gauges that have a name of Triton's reports
(`_EXPORTED`), or that engines have for the same (`_REPORTED_AS`), are passed on.
Owns: the texts of the last report.
Threads and locks: any thread, no lock; two threads may render the same report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from conch.core.custom_metrics import FamilySnapshot
from conch.observability.metrics.load_meter import Load, LoadMeter
from conch.protocol.orca_load_report_pb2 import OrcaLoadReport

ASKED: Final = b"endpoint-load-metrics-format"
"""The request header of a client that wants a report, with its format: ``text`` or ``json``."""
_HEADER: Final = b"endpoint-load-metrics"
_TRAILER: Final = "endpoint-load-metrics-bin"
_EXPORTED: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {
    "kv_cache_utilization": max,
    "max_token_capacity": sum,
}
"""Names of models' gauges in Triton's reports, and how those of several models are joined."""
_REPORTED_AS: Final[Mapping[str, str]] = {
    "openvino_genai:kv_cache_usage_perc": "kv_cache_utilization",
    "vllm:kv_cache_usage_perc": "kv_cache_utilization",
}
"""Engines' gauges under other names, and those of Triton's reports."""
_DIGITS: Final = 4
_EMPTY: Final = b"\x18\x00"
"""The standard's former field for requests per second, with 0; it fills a report up to a multiple of three
bytes. Other sizes need padding in Base64, which gRPC does not send and without which Envoy reads nothing."""

Metadata = Sequence[tuple[str, str | bytes]]


class _Rendered:
    """One report in all formats."""

    def __init__(self, load: Load, exported: Mapping[str, float]) -> None:
        self.load = load
        named = {"pending_requests": float(load.pending), "running_requests": float(load.running), **exported}
        fields = {
            "application_utilization": round(load.utilization, _DIGITS),
            "rps_fractional": round(load.requests_per_s, _DIGITS),
            "eps": round(load.errors_per_s, _DIGITS),
        }
        flat = fields | {f"named_metrics.{name}": value for name, value in named.items()}
        text = ", ".join(f"{name}={value:.12g}" for name, value in flat.items())
        self.headers = {
            b"text": (_HEADER, b"TEXT " + text.encode()),
            b"json": (_HEADER, b"JSON " + json.dumps({**fields, "named_metrics": named}).encode()),
        }
        report = OrcaLoadReport(named_metrics=named)
        for field, value in fields.items():
            setattr(report, field, value)
        message = report.SerializeToString()
        self.trailer = (_TRAILER, message + _EMPTY * (len(message) % 3))


class LoadReports:
    """Reports what a meter measures.

    Args:
        meter: Measures the load.
        exported: The metrics that models define.
    """

    def __init__(self, meter: LoadMeter, exported: Callable[[], Sequence[FamilySnapshot]]) -> None:
        self._meter = meter
        self._exported = exported
        self._rendered = _Rendered(Load(), {})

    def header(self, wanted: bytes) -> list[tuple[bytes, bytes]]:
        """The response header in a format; none, as from Triton, if there is no such format."""
        header = self._current().headers.get(wanted.lower())
        return [] if header is None else [header]

    def trailer(self) -> tuple[str, bytes]:
        """The entry of gRPC's trailing metadata."""
        return self._current().trailer

    def _current(self) -> _Rendered:
        load, rendered = self._meter.read(), self._rendered
        if rendered.load is not load:
            rendered = self._rendered = _Rendered(load, self._gauges())
        return rendered

    def _gauges(self) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for family in self._exported():
            name = _REPORTED_AS.get(family.name, family.name)
            values = [each.value for each in family.metrics if isinstance(each.value, float)]
            if name in _EXPORTED and family.kind == "gauge" and values:
                found.setdefault(name, []).extend(values)
        return {name: float(_EXPORTED[name](values)) for name, values in found.items()}


def trailing(reports: LoadReports | None, metadata: Metadata | None = None) -> Metadata | None:
    """Trailing metadata of a call, with a load report if there are any."""
    return metadata if reports is None else (*(metadata or ()), reports.trailer())

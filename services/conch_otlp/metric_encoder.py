"""`MetricEncoder`: makes metrics of OpenTelemetry out of the text of a scrape.

Names are those of the scrape. All counts are cumulative, from the start of the server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TextIO, cast

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.metrics.v1 import metrics_pb2 as otlp
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from prometheus_client import Metric
from prometheus_client.parser import text_fd_to_metric_families
from prometheus_client.samples import Sample

from conch import __version__
from conch.observability.exporters import Scrape
from conch.observability.metrics.metrics_exposition import GilYielder
from conch_otlp.attributes import attributes_of

_CUMULATIVE = otlp.AGGREGATION_TEMPORALITY_CUMULATIVE
_TYPE = "# TYPE "
_MOST_POINTS = 5000
"""Data points of one message of a metric; a larger family takes several messages."""

Labels = tuple[tuple[str, str], ...]


class MetricEncoder:
    """Makes export requests; an `Encoder`, whose queue has metrics.

    Args:
        resource: Attributes of the server.
    """

    def __init__(self, resource: Mapping[str, str | int]) -> None:
        self._resource = Resource(attributes=attributes_of(resource))
        self._scope = InstrumentationScope(name="conch", version=__version__)

    def queued(self, items: Sequence[Scrape]) -> list[tuple[otlp.Metric, int]]:
        """The metrics of scrapes with their numbers of data points; takes long, and yields the GIL."""
        yielder = GilYielder()
        return [found for each in items for found in otlp_metrics(*each, yielder.yield_if_due)]

    def requests(
        self, queued: Sequence[otlp.Metric], most: int, most_bytes: int
    ) -> Iterator[tuple[bytes, int]]:
        """One request: the queue's limit of data points keeps it within the bytes."""
        found = otlp.ResourceMetrics(
            resource=self._resource, scope_metrics=[otlp.ScopeMetrics(scope=self._scope, metrics=queued)]
        )
        request = ExportMetricsServiceRequest(resource_metrics=[found])
        yield request.SerializeToString(), sum(map(_points, queued))


def _points(metric: otlp.Metric) -> int:
    return len(getattr(metric, metric.WhichOneof("data") or "gauge").data_points)


def otlp_metrics(
    text: str, start_ns: int, now_ns: int, pause: Callable[[], None] = lambda: None
) -> Iterator[tuple[otlp.Metric, int]]:
    """The metrics of a scrape in Prometheus' text format.

    Args:
        text: The scrape.
        start_ns: Start of the counters, nanoseconds since 1970.
        now_ns: Time of the scrape, nanoseconds since 1970.
        pause: Called often; may let other threads run.

    Yields:
        Metrics, each with the number of its data points.
    """
    declared: set[str] = set()

    def lines() -> Iterator[str]:
        for line in text.splitlines(keepends=True):
            if line.startswith(_TYPE):
                declared.add(line.split(" ", 3)[2])
            pause()
            yield line

    for family in text_fd_to_metric_families(cast("TextIO", lines())):
        # The parser takes `_total` from the names of counters.
        name = family.name if family.name in declared else f"{family.name}_total"
        points: Iterator[Any]
        if family.type == "histogram":
            points = _histograms(family, start_ns, now_ns)
        elif family.type == "summary":
            points = _summaries(family, start_ns, now_ns)
        else:
            points = _numbers(family, start_ns if family.type == "counter" else 0, now_ns)
        while some := list(islice(points, _MOST_POINTS)):
            metric = otlp.Metric(name=name, description=family.documentation)
            if family.type == "counter":
                metric.sum.CopyFrom(otlp.Sum(aggregation_temporality=_CUMULATIVE, is_monotonic=True))
            elif family.type == "histogram":
                metric.histogram.aggregation_temporality = _CUMULATIVE
            kind = {"counter": "sum", "histogram": "histogram", "summary": "summary"}.get(
                family.type, "gauge"
            )
            getattr(metric, kind).data_points.extend(some)
            yield metric, len(some)


def _numbers(family: Metric, start_ns: int, now_ns: int) -> Iterator[otlp.NumberDataPoint]:
    for sample in family.samples:
        yield otlp.NumberDataPoint(
            attributes=attributes_of(sample.labels),
            start_time_unix_nano=start_ns,
            time_unix_nano=now_ns,
            as_double=sample.value,
        )


def _histograms(family: Metric, start_ns: int, now_ns: int) -> Iterator[otlp.HistogramDataPoint]:
    for labels, samples in _grouped(family, "le"):
        below = sorted((float(each.labels["le"]), int(each.value)) for each in samples if "le" in each.labels)
        counts = [count for _, count in below]
        yield otlp.HistogramDataPoint(
            attributes=attributes_of(dict(labels)),
            start_time_unix_nano=start_ns,
            time_unix_nano=now_ns,
            count=counts[-1] if counts else 0,
            sum=_value(samples, f"{family.name}_sum"),
            bucket_counts=[
                count - less for count, less in zip(counts, (0, *counts), strict=False)
            ],  # the parser's are cumulative
            explicit_bounds=[bound for bound, _ in below if not math.isinf(bound)],
        )


def _summaries(family: Metric, start_ns: int, now_ns: int) -> Iterator[otlp.SummaryDataPoint]:
    for labels, samples in _grouped(family, "quantile"):
        yield otlp.SummaryDataPoint(
            attributes=attributes_of(dict(labels)),
            start_time_unix_nano=start_ns,
            time_unix_nano=now_ns,
            count=int(_value(samples, f"{family.name}_count")),
            sum=_value(samples, f"{family.name}_sum"),
            quantile_values=[
                otlp.SummaryDataPoint.ValueAtQuantile(
                    quantile=float(each.labels["quantile"]), value=each.value
                )
                for each in samples
                if "quantile" in each.labels
            ],
        )


def _grouped(family: Metric, own: str) -> Iterable[tuple[Labels, list[Sample]]]:
    """The samples of each point: those that differ in one label only, and sum and count."""
    found: dict[Labels, list[Sample]] = {}
    for sample in family.samples:
        key = tuple(sorted((name, value) for name, value in sample.labels.items() if name != own))
        found.setdefault(key, []).append(sample)
    return found.items()


def _value(samples: Sequence[Sample], name: str) -> float:
    return next((sample.value for sample in samples if sample.name == name), 0.0)

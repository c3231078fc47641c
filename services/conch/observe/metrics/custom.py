"""The metrics that Python models make with ``MetricFamily``."""

from __future__ import annotations

from conch.core.custom_metrics import FAMILIES, Histogram, MetricSnapshot
from conch.observe.metrics.buckets import bounds
from conch.observe.metrics.text import Family, labels, sample


def custom_metrics() -> list[tuple[Family, list[str]]]:
    """The families that models have now, with their samples."""
    return [
        (
            Family(family.name, family.kind, family.description),
            [_samples(family.name, metric) for metric in family.metrics],
        )
        for family in FAMILIES.snapshot()
    ]


def _samples(name: str, metric: MetricSnapshot) -> str:
    own = metric.labels
    value = metric.value
    if not isinstance(value, Histogram):
        return sample(name, value, own)
    counts = value.cumulative()
    lines = [
        f"{name}_bucket{{{labels({**own, 'le': bound})}}} {count}\n"
        for bound, count in zip(bounds(value.bounds), counts, strict=True)
    ]
    return "".join((*lines, sample(f"{name}_sum", value.sum, own), sample(f"{name}_count", counts[-1], own)))

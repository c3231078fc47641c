"""The metrics that Python models make with ``MetricFamily``."""

from __future__ import annotations

from dataclasses import replace

from conch.core.custom_metrics import FAMILIES, CustomFamilies, FamilySnapshot, Histogram, MetricSnapshot
from conch.observability.metrics.buckets import bounds
from conch.observability.metrics.text import Family, labels, sample


class CustomMetrics:
    """The families that models of one server have now, with their samples.

    Those that models make when they have been loaded are nobody's: they are those of the process, and each of
    its servers shows them.

    Args:
        families: The server's.
    """

    def __init__(self, families: CustomFamilies = FAMILIES) -> None:
        self._families = families

    def __call__(self) -> list[tuple[Family, list[str]]]:
        """The families, by name."""
        return [
            (
                Family(family.name, family.kind, family.description),
                [_samples(family.name, metric) for metric in family.metrics],
            )
            for family in self._snapshot()
        ]

    def _snapshot(self) -> list[FamilySnapshot]:
        own = self._families.snapshot()
        if self._families is FAMILIES:
            return own
        found = {family.name: family for family in own}
        for family in FAMILIES.snapshot():
            known = found.get(family.name)
            if known is None:
                found[family.name] = family
            elif known.kind == family.kind:
                labels = [metric.labels for metric in known.metrics]
                others = [metric for metric in family.metrics if metric.labels not in labels]
                found[family.name] = replace(known, metrics=(*known.metrics, *others))
        return [found[name] for name in sorted(found)]


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

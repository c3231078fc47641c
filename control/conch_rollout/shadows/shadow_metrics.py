"""The metric families of shadows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from conch.observability.metrics.metric_families import Family, sample
from conch_rollout.shadows.shadow import Shadow, ShadowCounts
from conch_rollout.shadows.shadow_report import EDGES

_COUNTS: tuple[tuple[Family, Callable[[ShadowCounts], int]], ...] = (
    (
        Family("conch_shadow_requests_total", "counter", "Copies of requests that a candidate took"),
        lambda c: c.requests,
    ),
    (
        Family("conch_shadow_dropped_total", "counter", "Requests that were to be copied and were not"),
        lambda c: sum(c.dropped.values()),
    ),
    (
        Family("conch_shadow_compared_total", "counter", "Pairs of answers that were compared"),
        lambda c: c.compared,
    ),
    (
        Family("conch_shadow_mismatches_total", "counter", "Pairs of answers that differ"),
        lambda c: c.mismatches,
    ),
)
_MAX_ABS = Family(
    "conch_shadow_max_abs",
    "histogram",
    "Largest absolute difference of an output in a pair of answers; the sum leaves out infinite ones",
)
_DECADE = 9  # edges for each power of ten


def shadow_families(shadows: Iterable[Shadow]) -> list[tuple[Family, list[str]]]:
    """The families with their samples."""
    found = [(shadow, {"model": shadow.model, "version": str(shadow.version)}) for shadow in shadows]
    if not found:
        return []
    families = [
        (family, [sample(family.name, value(shadow.counts()), labels) for shadow, labels in found])
        for family, value in _COUNTS
    ]
    lines: list[str] = []
    for shadow, labels in found:
        for output, spread in shadow.report.spreads().items():
            lines += _histogram({**labels, "output": output}, spread.counts, spread.total)
    return [*families, (_MAX_ABS, lines)]


def _histogram(labels: dict[str, str], counts: Sequence[int], total: float) -> list[str]:
    name, below = _MAX_ABS.name, list(accumulate(counts))
    decades = [*zip(EDGES[::_DECADE], below[::_DECADE], strict=False)]
    bounds = [*((f"{edge:.16g}", count) for edge, count in decades), ("+Inf", below[-1])]
    return [
        *(sample(f"{name}_bucket", count, {**labels, "le": bound}) for bound, count in bounds),
        sample(f"{name}_sum", total, labels),
        sample(f"{name}_count", below[-1], labels),
    ]

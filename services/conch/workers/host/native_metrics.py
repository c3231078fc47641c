"""Metrics of a library that is compiled for Triton, as custom metrics of the server."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from conch.core.errors import ConchError

if TYPE_CHECKING:
    from conch.core.custom_metrics import CustomFamilies, CustomFamily, CustomMetric, Kind
    from conch.workers.host.native_words import MetricChange

log = logging.getLogger(__name__)

_KINDS: tuple[Kind, ...] = ("counter", "gauge", "histogram")
"""By ``TRITONSERVER_MetricKind``."""

_INCREMENT, _SET, _OBSERVE, _DELETE, _NEW = range(5)
_Key = tuple[str, tuple[tuple[str, str], ...]]


class NativeMetrics:
    """The metrics that the library has; a metric lives from its first change to its deletion."""

    def __init__(self, families: CustomFamilies) -> None:
        self._families = families
        self._metrics: dict[_Key, CustomMetric] = {}
        self._refused: set[str] = set()

    def change(self, change: MetricChange) -> None:
        """Follows a change; one that the server refuses is logged once for each family."""
        key = change.family, tuple(sorted(change.labels.items()))
        if change.operation == _DELETE:
            self._metrics.pop(key, None)
            return
        try:
            metric = self._metrics.get(key)
            if metric is None:
                family: CustomFamily = self._families.family(change.family, _KINDS[change.kind], change.help)
                metric = self._metrics[key] = family.metric(change.labels, change.bounds or None)
            if change.operation == _INCREMENT:
                metric.increment(change.value)
            elif change.operation == _SET:
                metric.set(change.value)
            elif change.operation == _OBSERVE:
                metric.observe(change.value)
        except ConchError as error:
            if change.family not in self._refused:
                self._refused.add(change.family)
                log.warning("metric '%s' is not kept: %s", change.family, error.message)

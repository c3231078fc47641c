"""Residency as a part of the server: its metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conch.core.registry import Registry
from conch.observability.metrics.metric_families import Family
from conch.parts.server_part import PartContext, ServerPart
from conch_residency.residency import OnDemandResidency
from conch_residency.residency_counts import ResidencyCounts
from conch_residency.residency_metrics import residency_families
from conch_residency.residency_settings import ResidencyMetrics


class ResidencyPart(ServerPart):
    """Shows the models in memory; the agent starts and stops the residency.

    Args:
        registry: The models in memory.
        counts: Reads the figures.
    """

    def __init__(self, registry: Registry, counts: Callable[[], ResidencyCounts]) -> None:
        self._registry = registry
        self._counts = counts

    def start(self) -> None:
        """Starts nothing."""

    def families(self) -> Sequence[tuple[Family, list[str]]]:
        """The figures."""
        return residency_families(self._registry, self._counts())


def residency_parts(options: ResidencyMetrics, context: PartContext) -> Sequence[ServerPart]:
    """The part, for the entry-point group ``conch.parts``."""
    residency = context.control.agent.residency
    if not isinstance(residency, OnDemandResidency):
        return ()
    return [ResidencyPart(context.core.state.registry, residency.counts)]

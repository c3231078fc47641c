"""Shadows as a part of the server: their metrics, and their end."""

from __future__ import annotations

from collections.abc import Sequence

from conch.core.shadows.shadow_service import Shadows
from conch.observability.metrics.metric_families import Family
from conch.observability.metrics.shadow_metrics import shadow_families
from conch.parts.server_part import ServerPart


class ShadowPart(ServerPart):
    """Rollouts open shadows; the stop of the server ends them, so that no copy holds a model."""

    def __init__(self, shadows: Shadows) -> None:
        self._shadows = shadows

    def start(self) -> None:
        """Nothing: there is nothing to do before a rollout."""

    def families(self) -> Sequence[tuple[Family, list[str]]]:
        """The metrics of all shadows."""
        return shadow_families(self._shadows.all())

    def drain(self, grace_s: float) -> bool:
        """Copies nothing from now on; True if the threads ended in time."""
        return self._shadows.stop(grace_s)

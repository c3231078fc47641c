"""Rollouts as a part of the server: their metrics, and the end of their shadows."""

from __future__ import annotations

from collections.abc import Sequence

from conch.core.registry import Registry
from conch.observability.metrics.metric_families import Family
from conch.parts.server_part import PartContext, ServerPart
from conch_rollout.rollout_metrics import rollout_families
from conch_rollout.rollout_settings import RolloutMetrics
from conch_rollout.rollouts import ServerRollouts
from conch_rollout.shadows.shadow_metrics import shadow_families


class RolloutPart(ServerPart):
    """Shows rollouts and shadows; the stop of the server ends the shadows, so that no copy holds a model."""

    def __init__(self, registry: Registry, rollouts: ServerRollouts) -> None:
        self._registry = registry
        self._rollouts = rollouts

    def start(self) -> None:
        """Starts nothing: there is nothing to do before a rollout."""

    def families(self) -> Sequence[tuple[Family, list[str]]]:
        """The metrics of all rollouts, routes and shadows."""
        return [
            *rollout_families(self._registry, self._rollouts.counts()),
            *shadow_families(self._rollouts.mirrors.all()),
        ]

    def drain(self, grace_s: float) -> bool:
        """Copies nothing from now on; True if the threads ended in time."""
        return self._rollouts.mirrors.stop(grace_s)


def rollout_parts(options: RolloutMetrics, context: PartContext) -> Sequence[ServerPart]:
    """The part, for the entry-point group ``conch.parts``."""
    rollouts = context.control.agent.rollout_control
    return (
        [RolloutPart(context.core.state.registry, rollouts)] if isinstance(rollouts, ServerRollouts) else ()
    )

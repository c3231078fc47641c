"""Metrics of rollouts and routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conch.core.registry import Registry
from conch.observability.metrics.metric_families import Family, model_labels, sample
from conch.observability.metrics.server_metrics import Found

_WEIGHT = Family(
    "conch_rollout_weight", "gauge", "Share of a model's requests without a version, by version [0.0 - 1.0]"
)
_STATE = Family("conch_rollout_state", "gauge", "1 for the state of a model's rollout")
_TRANSITIONS = Family(
    "conch_rollout_transitions_total", "counter", "Transitions of rollouts by state and cause"
)
_ROUTED = Family(
    "conch_route_requests_total",
    "counter",
    "Requests without a version that a route has divided, by version and rule",
)


@dataclass(frozen=True, slots=True)
class RolloutCounts:
    """Figures for metrics.

    Attributes:
        states: State of each model's rollout, by identifier.
        transitions: Transitions by identifier, state, and whether a call has led there.
    """

    states: Mapping[str, str]
    transitions: Mapping[tuple[str, str, bool], int]


def rollout_families(registry: Registry, counts: RolloutCounts) -> Found:
    """The families of rollouts and routes, for models that have some."""
    weights, states, transitions, routed = [], [], [], []
    for identifier, entry in sorted(registry.entries.items()):
        if entry.route is not None:
            own = model_labels(*registry.name_and_namespace(identifier))
            versions = sorted({entry.route.stable, *(version for version, _ in entry.route.shares)})
            for version in versions:
                weight = entry.route.traffic(version) / 100
                weights.append(sample(_WEIGHT.name, weight, {**own, "version": str(version)}))
    for identifier, state in sorted(counts.states.items()):
        own = model_labels(*registry.name_and_namespace(identifier))
        states.append(sample(_STATE.name, 1, {**own, "state": state}))
    for (identifier, state, called), count in sorted(counts.transitions.items()):
        own = model_labels(*registry.name_and_namespace(identifier))
        reason = "call" if called else "rule"
        transitions.append(sample(_TRANSITIONS.name, count, {**own, "to": state, "reason": reason}))
    for identifier, divided in sorted(registry.route_counts.items()):
        own = model_labels(*registry.name_and_namespace(identifier))
        for (version, by), count in sorted(divided.snapshot().items()):
            routed.append(sample(_ROUTED.name, count, {**own, "version": str(version), "by": by}))
    return [(_WEIGHT, weights), (_STATE, states), (_TRANSITIONS, transitions), (_ROUTED, routed)]

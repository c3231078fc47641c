"""Shadows as rollouts use them: opened for routes, and counted for guards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conch_control.managed_rollouts import Counts
from conch_rollout.rollout_file import WHOLE, Compare, Rollout
from conch_rollout.rollout_state import Traffic
from conch_rollout.shadows.comparison import CompareRules
from conch_rollout.shadows.shadow import Shadow, ShadowPolicy
from conch_rollout.shadows.shadow_service import Shadows


class RolloutShadows:
    """The shadows of a server's rollouts.

    A publisher asks for the shadow of its route (`of`), publishes the route, and calls `settle`.
    """

    def __init__(self, shadows: Shadows) -> None:
        self._shadows = shadows

    def of(self, model: str, traffic: Traffic | None, rollout: Rollout | None) -> Shadow | None:
        """The shadow for a model's route; None without a share."""
        if traffic is None or rollout is None or traffic.candidate is None or not traffic.shadow_percent:
            return None
        declared = rollout.shadow
        policy = ShadowPolicy(
            round(traffic.shadow_percent * WHOLE / 100),
            declared.inflight,
            declared.copy_regions,
            compare_rules(declared.compare),
        )
        return self._shadows.open(model, traffic.candidate, traffic.salt, policy)

    def settle(self, model: str, shadow: Shadow | None) -> None:
        """Ends the shadow that the model's route had before, if `shadow` is None."""
        if shadow is None:
            self._shadows.close(model)

    def report(self, model: str) -> Mapping[str, Any]:
        """The report of a model's newest shadow; empty without one."""
        shadow = self._shadows.find(model)
        return {} if shadow is None else shadow.as_json()

    def shadows(self, model: str, version: int) -> Counts:
        """See `Counters.shadows`."""
        shadow = self._shadows.find(model)
        if shadow is None or shadow.version != version:
            return Counts()
        counts = shadow.counts()
        return Counts(counts.ended, counts.failures, counts.latencies)

    def pairs(self, model: str, version: int) -> tuple[int, int]:
        """See `Counters.pairs`."""
        shadow = self._shadows.find(model)
        if shadow is None or shadow.version != version:
            return 0, 0
        counts = shadow.counts()
        return counts.compared, counts.mismatches


def compare_rules(declared: Compare) -> CompareRules:
    """The rules that a declaration gives."""
    top = dict.fromkeys(declared.top1, 1) | dict(declared.topk)
    return CompareRules(declared.atol, declared.rtol, frozenset(declared.ignore), top)

"""Saturation of a replica, and the number of replicas that Ray's autoscaler makes of it.

Saturation is the share of the instances' time in use during the last window, 0 to 1, of a model version.
Owns: the counters at the start of the window.
Threads and locks: one caller at a time.
Used by: `replica`, which reports it; Ray's controller, which calls the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import InvalidArgumentError
from conch.core.servable import Servable

SATURATION = "conch_saturation"
"""The metric that replicas report to Ray: the largest saturation of their models."""


class SaturationMeter:
    """Saturation of all model versions since the last reading.

    Args:
        models: Returns the versions that are ready.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(self, models: Callable[[], list[Servable]], clock: Clock = monotonic_ns) -> None:
        self._models = models
        self._clock = clock
        self._since_ns = clock()
        self._before: dict[object, int] = {}

    def read(self) -> dict[tuple[str, int], float]:
        """Returns the saturation by name and version, and begins a new window.

        A model that has been running since before the window, and has finished nothing in it, counts as full.
        """
        now_ns = self._clock()
        window_ns = max(now_ns - self._since_ns, 1)
        now: dict[object, int] = {}
        found: dict[tuple[str, int], float] = {}
        for model in self._models():
            instances = _instances(model)
            if not instances:
                continue  # an ensemble
            counters = model.statistics.snapshot()
            busy_ns = sum(
                each.compute_input.ns + each.compute_infer.ns + each.compute_output.ns
                for each in counters.batches.values()
            )
            identity = model.statistics.identity
            spent_ns = busy_ns - self._before.get(identity, 0)
            full = counters.running > 0 and not spent_ns
            share = 1.0 if full else min(spent_ns / (window_ns * instances), 1.0)
            found[model.spec.name, model.spec.version] = share
            now[identity] = busy_ns
        self._since_ns, self._before = now_ns, now
        return found


def _instances(model: Servable) -> int:
    if model.spec.ensemble is not None:
        return 0
    return sum(
        group.count * max(len(group.gpus), 1) for group in model.spec.instance_groups if not group.passive
    )


class SaturationPolicy:
    """Chooses the number of replicas so that the mean saturation comes to a target.

    Ray applies its limits, factors and delays to the result. Without a report yet, the number stays.

    Args:
        target: Saturation to aim at, above 0 and up to 1.

    Raises:
        InvalidArgumentError: The target is no such number.
    """

    def __init__(self, target: float = 0.7) -> None:
        if not isinstance(target, int | float) or not 0 < target <= 1:
            raise InvalidArgumentError(f"target must be above 0 and at most 1, not {target!r}")
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Returns the wanted number of replicas, and no state; `context` is Ray's `AutoscalingContext`."""
        reported: Mapping[object, float] = (context.aggregated_metrics or {}).get(SATURATION, {})
        running = set(context.running_replicas)
        shares = [share for replica, share in reported.items() if replica in running]
        if not shares:
            return context.target_num_replicas, {}
        # Replicas that have not reported yet have the others' mean.
        total = sum(shares) / len(shares) * len(running)
        return math.ceil(total / self._target - 1e-9), {}

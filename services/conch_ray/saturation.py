"""The number of replicas that Ray's autoscaler makes of their saturation, which `LoadMeter` measures.

No state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from conch.core.errors import InvalidArgumentError

SATURATION = "conch_saturation"
"""The metric that replicas report to Ray: the largest saturation of their models."""


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

"""The number of replicas that follows from their saturation."""

from __future__ import annotations

from typing import Any

import pytest

import conch
from conch_ray.saturation import SATURATION, SaturationPolicy


class Context:
    """Attributes of Ray's `AutoscalingContext` that the policy reads."""

    def __init__(self, reported: dict[str, float] | None, running: list[str], target: int = 4) -> None:
        self.aggregated_metrics = None if reported is None else {SATURATION: reported}
        self.running_replicas = running
        self.target_num_replicas = target


@pytest.mark.parametrize(
    ("context", "wanted"),
    [
        (Context(None, ["a", "b"]), 4),  # none has reported
        (Context({"a": 0.5, "b": 0.5}, ["a", "b"]), 2),
        (Context({"a": 0.6, "b": 0.5}, ["a", "b"]), 3),
        (Context({"a": 1.0}, ["a", "b"]), 4),  # the other one is taken to be like it
        (Context({"a": 1.0, "gone": 1.0}, ["a"]), 2),
        (Context({"a": 0.0, "b": 0.0}, ["a", "b"]), 0),  # Ray has the minimum
    ],
)
def test_the_policy_aims_at_its_target(context: Context, wanted: int) -> None:
    assert SaturationPolicy(0.5)(context) == (wanted, {})


@pytest.mark.parametrize("target", [0, 1.5, "high"])
def test_a_target_that_is_no_share_is_refused(target: Any) -> None:
    with pytest.raises(conch.InvalidArgumentError, match="target must be above 0"):
        SaturationPolicy(target)

"""Durations of state machines: a while in every run of the tests, many times that in the slow ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine
from tests.support.profiles import scaled

STEPS = 40
"""Steps of one example."""


def run_machine(machine: type[RuleBasedStateMachine], examples: int, slow_factor: int = 3) -> tuple[Any, Any]:
    """The test classes of a state machine.

    Args:
        machine: The machine.
        examples: Examples of `STEPS` steps in the usual run.
        slow_factor: Factor by which the slow run has more of them.

    Returns:
        The usual test class, and the one of more examples, marked as slow.
    """
    usual = machine.TestCase
    usual.settings = settings(max_examples=scaled(examples), stateful_step_count=STEPS, deadline=None)
    slow: Any = type(f"Slow{machine.__name__}", (machine,), {})
    slow.TestCase.settings = settings(
        max_examples=scaled(examples * slow_factor), stateful_step_count=STEPS, deadline=None
    )
    return usual, pytest.mark.slow(slow.TestCase)

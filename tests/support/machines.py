"""How long state machines run: a while in every run of the tests, ten times that in the slow ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine

STEPS = 40
"""Steps of one example."""

_SLOW_FACTOR = 10


def run_machine(machine: type[RuleBasedStateMachine], examples: int) -> tuple[Any, Any]:
    """The test classes of a state machine.

    Args:
        machine: The machine.
        examples: Examples of `STEPS` steps in the usual run.

    Returns:
        The usual test class, and one of ten times as many examples marked as slow.
    """
    usual = machine.TestCase
    usual.settings = settings(max_examples=examples, stateful_step_count=STEPS, deadline=None)
    slow: Any = type(f"Slow{machine.__name__}", (machine,), {})
    slow.TestCase.settings = settings(
        max_examples=examples * _SLOW_FACTOR, stateful_step_count=STEPS, deadline=None
    )
    return usual, pytest.mark.slow(slow.TestCase)

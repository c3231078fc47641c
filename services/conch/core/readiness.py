"""Checks that models make of themselves when somebody asks whether they are ready."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Readiness(Protocol):
    """The check of one instance: on a thread of its own, and not waited for without end."""

    def start(self) -> None:
        """Begins a check, unless one is under way."""

    def result(self) -> bool:
        """Waits for the check that was begun; False too if it fails or takes too long."""


def all_ready(checks: Iterable[Readiness]) -> bool:
    """Makes checks side by side, and returns whether all of them say yes."""
    started = list(checks)
    for check in started:
        check.start()
    return all([check.result() for check in started])

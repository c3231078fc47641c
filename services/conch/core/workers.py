"""What is known of instances that have a process of their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What an instance's process of its own is in.

    Attributes:
        state: ``starting``, ``serving``, ``lost``, ``waiting`` for its next try, or ``closed``.
        restarts: How often it was started again.
        pid: The number of the process; None while there is none.
        reason: Why it does not serve; empty if it does.
    """

    state: str
    restarts: int
    pid: int | None
    reason: str

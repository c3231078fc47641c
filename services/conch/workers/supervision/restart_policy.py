"""Restart policy of one instance: a pure state machine with exponential back-off.

Theory of operation: the supervisor reports events with their times; the policy says when to restart.
The first restart after a death is immediate; each failure doubles the next wait, from 0.1 s up to a limit.

| state | event | next state | effect |
|---|---|---|---|
| STARTING | `served` | SERVING | clears the reason |
| STARTING | `failed` | WAITING | takes the next wait, doubles the one after |
| SERVING | `lost` | LOST | after 60 s of health no wait; half, if it served as long as the wait |
| LOST | `ended` | WAITING | takes the next wait, doubles the one after |
| WAITING | `begin` | STARTING | counts a restart |
| any | `close` | CLOSED | |

Guarantees: no clock, thread or lock of its own; an event in a wrong state fails an assertion.
Assumptions: the caller holds the group's lock, and times never decrease.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

FIRST_WAIT_NS = 100_000_000
LONGEST_WAIT_NS = 30_000_000_000
HEALTHY_NS = 60_000_000_000
"""Time of health that resets the back-off."""

QUIET_WAIT_NS = 1_000_000_000
"""Longest wait for a restart during which requests wait; beyond it they are refused."""


class Phase(Enum):
    """State of an instance."""

    STARTING = "starting"
    SERVING = "serving"
    LOST = "lost"
    WAITING = "waiting"
    CLOSED = "closed"


@dataclass(slots=True)
class RestartPolicy:
    """One instance.

    Attributes:
        phase: Its state.
        wait_ns: The wait before the current try.
        try_ns: Time of the next try, in state WAITING.
        restarts: Tries after the first start.
        reason: Reason for which it does not serve.
        longest_wait_ns: The longest wait.
    """

    phase: Phase = Phase.STARTING
    wait_ns: int = 0
    try_ns: int = 0
    restarts: int = 0
    reason: str = ""
    longest_wait_ns: int = LONGEST_WAIT_NS
    _serving_since_ns: int = 0
    _next_wait_ns: int = 0

    def served(self, now_ns: int) -> None:
        """The worker has loaded the model."""
        self._expect(Phase.STARTING)
        self.phase = Phase.SERVING
        self._serving_since_ns = now_ns
        self.reason = ""

    def lost(self, now_ns: int, reason: str) -> None:
        """The serving worker has died, or is being killed."""
        self._expect(Phase.SERVING)
        self.phase = Phase.LOST
        self.reason = reason
        lived = now_ns - self._serving_since_ns
        if lived >= HEALTHY_NS:
            self._next_wait_ns = 0
        elif 0 < self.wait_ns <= lived:
            self._next_wait_ns = max(self.wait_ns // 2, FIRST_WAIT_NS)

    def ended(self, now_ns: int, reason: str) -> None:
        """The lost worker's process has ended."""
        self._expect(Phase.LOST)
        self._wait(now_ns, reason)

    def failed(self, now_ns: int, reason: str) -> None:
        """A start has failed."""
        self._expect(Phase.STARTING)
        self._wait(now_ns, reason)

    def begin(self) -> None:
        """The next start begins."""
        self._expect(Phase.WAITING)
        self.phase = Phase.STARTING
        self.restarts += 1

    def close(self) -> None:
        """The instance is closed."""
        self.phase = Phase.CLOSED

    @property
    def next_wait_ns(self) -> int:
        """The wait after the end of the lost worker."""
        return self._next_wait_ns

    @property
    def serves_soon(self) -> bool:
        """True if requests should wait: the instance serves, or will soon."""
        if self.phase is Phase.WAITING:
            return self.wait_ns <= QUIET_WAIT_NS
        return self.phase is not Phase.CLOSED

    def _wait(self, now_ns: int, reason: str) -> None:
        self.phase = Phase.WAITING
        self.reason = reason
        self.wait_ns = self._next_wait_ns
        self.try_ns = now_ns + self.wait_ns
        self._next_wait_ns = min(max(2 * self.wait_ns, FIRST_WAIT_NS), self.longest_wait_ns)

    def _expect(self, phase: Phase) -> None:
        assert self.phase is phase, f"{self.phase} instead of {phase}"


def has_quorum(policies: Iterable[RestartPolicy]) -> bool:
    """True if a quorum of instances serves: half of them, rounded up, at least one."""
    phases = [policy.phase for policy in policies]
    return phases.count(Phase.SERVING) >= max((len(phases) + 1) // 2, 1)


def none_serves_soon(policies: Iterable[RestartPolicy]) -> bool:
    """True if no instance serves or will soon."""
    return not any(policy.serves_soon for policy in policies)

"""The life of one instance whose worker is started again when it dies: a pure state machine.

```
                loaded               died                 ended        back-off over
    STARTING ----------> SERVING -----------> LOST -----------------> WAITING -----------> STARTING
        |                                                                ^
        +----------------------------- failed ---------------------------+
    any -> CLOSED
```

The first try after a death is at once, the next one after 0.1 s, then after twice that, up to 30 s. A minute
of health takes it back to the start. A worker that has served for as long as it was waited for makes the next
wait half as long, not twice: what dies now and then is not what can't live.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

FIRST_WAIT_NS = 100_000_000
LONGEST_WAIT_NS = 30_000_000_000
HEALTHY_NS = 60_000_000_000
"""After so long all earlier deaths are forgotten."""

QUIET_WAIT_NS = 1_000_000_000
"""For longer than this requests do not wait for a worker: they are refused."""


class Phase(Enum):
    """What an instance is in."""

    STARTING = "starting"
    SERVING = "serving"
    LOST = "lost"
    WAITING = "waiting"
    CLOSED = "closed"


@dataclass(slots=True)
class Life:
    """One instance.

    Attributes:
        phase: What it is in.
        wait_ns: How long it waits, or waited, for its current try.
        try_ns: When the next try is, while it waits.
        restarts: How many tries there were after the first start.
        reason: Why it does not serve.
    """

    phase: Phase = Phase.STARTING
    wait_ns: int = 0
    try_ns: int = 0
    restarts: int = 0
    reason: str = ""
    _serving_since_ns: int = 0
    _next_wait_ns: int = 0

    def served(self, now_ns: int) -> None:
        """The worker has loaded the model."""
        self._expect(Phase.STARTING)
        self.phase = Phase.SERVING
        self._serving_since_ns = now_ns
        self.reason = ""

    def lost(self, now_ns: int, reason: str) -> None:
        """The worker that serves has died, or is being killed."""
        self._expect(Phase.SERVING)
        self.phase = Phase.LOST
        self.reason = reason
        lived = now_ns - self._serving_since_ns
        if lived >= HEALTHY_NS:
            self._next_wait_ns = 0
        elif 0 < self.wait_ns <= lived:
            self._next_wait_ns = max(self.wait_ns // 2, FIRST_WAIT_NS)

    def ended(self, now_ns: int, reason: str) -> None:
        """Nothing is left of the worker that was lost."""
        self._expect(Phase.LOST)
        self._wait(now_ns, reason)

    def failed(self, now_ns: int, reason: str) -> None:
        """A try to start the worker has failed."""
        self._expect(Phase.STARTING)
        self._wait(now_ns, reason)

    def begin(self) -> None:
        """The next try begins."""
        self._expect(Phase.WAITING)
        self.phase = Phase.STARTING
        self.restarts += 1

    def close(self) -> None:
        """The instance is closed."""
        self.phase = Phase.CLOSED

    @property
    def next_wait_ns(self) -> int:
        """How long it will wait once its worker, which is lost, has ended."""
        return self._next_wait_ns

    @property
    def hopeful(self) -> bool:
        """Whether requests had better wait for it: it serves, or will soon."""
        if self.phase is Phase.WAITING:
            return self.wait_ns <= QUIET_WAIT_NS
        return self.phase is not Phase.CLOSED

    def _wait(self, now_ns: int, reason: str) -> None:
        self.phase = Phase.WAITING
        self.reason = reason
        self.wait_ns = self._next_wait_ns
        self.try_ns = now_ns + self.wait_ns
        self._next_wait_ns = min(max(2 * self.wait_ns, FIRST_WAIT_NS), LONGEST_WAIT_NS)

    def _expect(self, phase: Phase) -> None:
        assert self.phase is phase, f"{self.phase} instead of {phase}"


def has_quorum(lives: Iterable[Life]) -> bool:
    """Whether enough of the instances of a model serve: half of them, rounded up, and at least one."""
    phases = [life.phase for life in lives]
    return phases.count(Phase.SERVING) >= max((len(phases) + 1) // 2, 1)


def all_hopeless(lives: Iterable[Life]) -> bool:
    """Whether requests of a model have nothing to wait for."""
    return not any(life.hopeful for life in lives)

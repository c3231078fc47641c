"""The shadows of a server, and their two threads.

`conch-shadow` submits copies, and looks at the load once a second. `conch-compare` compares pairs; it takes
at most `COMPARE_SHARE` of a core over ten seconds, and pairs that it has no time for are not compared. Both
exist only while a shadow is open.

Threads and locks: any thread; one lock.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue

from conch.core.clock import Clock, monotonic_ns
from conch_rollout.shadows.pair_files import PairFiles
from conch_rollout.shadows.shadow import Shadow, ShadowPolicy

log = logging.getLogger(__name__)

COMPARE_SHARE = 0.05
"""Most share of a core for comparisons."""
BURST_NS = 500_000_000
"""Processor time that they may take at once, after a pause."""

_MOST_WAITING = 64
_LOOK_S = 1.0

Work = Callable[[], None]


class Shadows:
    """Opens and closes shadows, at most one for each model.

    Args:
        saturation: Saturation of all versions, by the identity of their statistics.
        clock: Monotonic time in nanoseconds.
        capture: Directory for the tensors of the worst pairs; None to keep none.
    """

    def __init__(
        self,
        saturation: Callable[[], Mapping[object, float]] = dict,
        clock: Clock = monotonic_ns,
        capture: Path | None = None,
    ) -> None:
        self._saturation = saturation
        self._clock = clock
        self._capture = capture
        self._lock = threading.Lock()
        self._shadows: dict[str, tuple[bytes, Shadow]] = {}
        self._threads: _Threads | None = None
        self._stopped = False

    def open(self, model: str, version: int, rollout: bytes, policy: ShadowPolicy) -> Shadow | None:
        """The shadow of a model's rollout, for its route; a new one unless it is open already.

        Args:
            model: Identifier of the model.
            version: The candidate.
            rollout: Identifies the rollout: one shadow counts for all its steps.
            policy: Settings from now on.

        Returns:
            None once the server stops.
        """
        with self._lock:
            if self._stopped:
                return None
            known = self._shadows.get(model)
            if known is not None:
                shadow = known[1]
                if known[0] == rollout and shadow.version == version and shadow.active:
                    shadow.policy = policy
                    return shadow
                shadow.close()
            if self._threads is None:
                self._threads = _Threads(self._look)
            prefix = f"{model}-{version}-{rollout.hex()[:8]}"
            files = None if self._capture is None else PairFiles(self._capture, prefix)
            shadow = Shadow(model, version, policy, self._threads, self._clock, files)
            self._shadows[model] = rollout, shadow
            return shadow

    def close(self, model: str) -> None:
        """Ends a model's shadow, if it has one; to be called when its route has none any more."""
        with self._lock:
            known = self._shadows.get(model)
            if known is not None and known[1].active:
                known[1].close()
            threads = self._threads
            if threads is not None and not any(shadow.active for _, shadow in self._shadows.values()):
                self._threads = None
                threads.end()

    def find(self, model: str) -> Shadow | None:
        """The newest shadow of a model, also after its end."""
        known = self._shadows.get(model)
        return None if known is None else known[1]

    def all(self) -> list[Shadow]:
        """The newest shadow of each model."""
        with self._lock:
            return [shadow for _, shadow in self._shadows.values()]

    def stop(self, timeout_s: float) -> bool:
        """Ends all shadows for good; True if their threads ended in time."""
        with self._lock:
            self._stopped = True
            threads = self._threads
        for shadow in self.all():
            self.close(shadow.model)
        return threads is None or threads.join(timeout_s)

    def _look(self) -> None:
        saturation, now = self._saturation(), self._clock()
        for shadow in self.all():
            if shadow.active:
                shadow.update(now, saturation)


class Allowance:
    """Processor time that comparisons may take, from `now_ns` on."""

    def __init__(self, now_ns: int) -> None:
        self._left_ns = float(BURST_NS)
        self._since_ns = now_ns

    def spend(self, cost_ns: int, now_ns: int) -> int:
        """Takes the time of a comparison that ends now; returns the time to wait before the next one."""
        earned = (now_ns - self._since_ns) * COMPARE_SHARE
        self._left_ns = min(self._left_ns + earned, BURST_NS) - cost_ns
        self._since_ns = now_ns
        return math.ceil(max(-self._left_ns, 0) / COMPARE_SHARE)


class _Threads:
    """The threads of shadows; `look` is called once a second."""

    def __init__(self, look: Work) -> None:
        self._look = look
        self._copies: SimpleQueue[Work | None] = SimpleQueue()
        self._pairs: SimpleQueue[Work | None] = SimpleQueue()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._submit, name="conch-shadow", daemon=True),
            threading.Thread(target=self._compare, name="conch-compare", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit_soon(self, work: Work) -> None:
        """See `ShadowThreads.submit_soon`."""
        self._copies.put(work)

    def compare_soon(self, work: Work) -> None:
        """See `ShadowThreads.compare_soon`."""
        self._pairs.put(work)

    @property
    def compares(self) -> bool:
        """See `ShadowThreads.compares`."""
        return self._pairs.qsize() < _MOST_WAITING

    def end(self) -> None:
        """Ends both threads after what they have."""
        self._ended.set()
        self._copies.put(None)
        self._pairs.put(None)

    def join(self, timeout_s: float) -> bool:
        """Waits for both; True if they ended in time."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _submit(self) -> None:
        look_at = time.monotonic() + _LOOK_S
        while True:
            left_s = look_at - time.monotonic()
            if left_s <= 0:
                look_at += _LOOK_S - left_s
                _run(self._look)
                continue
            try:
                work = self._copies.get(timeout=left_s)
            except Empty:
                continue
            if work is None:
                return
            _run(work)

    def _compare(self) -> None:
        allowance = Allowance(time.monotonic_ns())
        while (work := self._pairs.get()) is not None:
            begun = time.thread_time_ns()
            _run(work)
            wait_ns = allowance.spend(time.thread_time_ns() - begun, time.monotonic_ns())
            if wait_ns:
                self._ended.wait(wait_ns / 1e9)


def _run(work: Work) -> None:
    try:
        work()
    except Exception:  # boundary: the top of the thread; other shadows go on
        log.exception("work of a shadow has failed")

"""Stages of the server and what health probes report in each.

``STARTING -> SERVING | FAILED -> DRAINING -> STOPPING``: stages may be skipped, but never revisited.
docs/operations.md shows the table of `server_live`, `server_ready` and `model_ready`; while the server stops,
probes get an error instead, except for the gRPC health service.

Threads and locks: `ServerStages` may be advanced from any thread; reads take no lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import IntEnum

from conch.core.clock import Clock, monotonic_ns

ReadyCheck = Callable[[], bool]
"""Finds out whether something is ready; may take time."""


class Stage(IntEnum):
    """A stage of the server."""

    STARTING = 0
    """The initial models are loading."""
    SERVING = 1
    """Requests are served."""
    FAILED = 2
    """The start failed; the server runs only to report that."""
    DRAINING = 3
    """The server reports not ready, so that load balancers turn away, and still serves all requests."""
    STOPPING = 4
    """New requests are refused; those in flight finish."""


class ServerStages:
    """The current stage of a server.

    Attributes:
        stage: The current stage.
        refusing: True once new requests are refused; requests of open sequences may go on.
    """

    def __init__(self, clock: Clock = monotonic_ns) -> None:
        self.stage = Stage.STARTING
        self.refusing = False
        self._clock = clock
        self._lock = threading.Lock()
        self._since_ns: dict[Stage, int] = {}

    def advance(self, stage: Stage) -> bool:
        """Enters a stage; returns False if the server is in it or beyond it already."""
        with self._lock:
            if stage <= self.stage:
                return False
            self.stage = stage
            self._since_ns[stage] = self._clock()
            return True

    def seconds_in(self, stage: Stage) -> float:
        """Seconds since a stage began; 0 if it never did."""
        since_ns = self._since_ns.get(stage)
        return 0.0 if since_ns is None else (self._clock() - since_ns) / 1e9


def server_live(stage: Stage) -> bool:
    """True if the server is live: also while models load for minutes, but not after a failed start."""
    return stage not in (Stage.FAILED, Stage.STOPPING)


def server_ready(stage: Stage, strict: bool, models: ReadyCheck) -> bool:
    """True if the server is ready; with `strict`, only if `models` says that all models are."""
    return stage is Stage.SERVING and (not strict or models())


def model_ready(stage: Stage, model: ReadyCheck) -> bool:
    """True if a model is ready; `model` is called only while the server starts or serves."""
    # A load balancer may probe a model instead of the server, so draining must show here too.
    return stage in (Stage.STARTING, Stage.SERVING) and model()

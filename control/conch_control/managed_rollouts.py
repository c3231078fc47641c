"""Messages between the manager of a fleet's rollout and a server: orders and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conch.core.rollouts import RolloutReport

LONGEST_LEASE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests of one version in a window.

    Attributes:
        requests: Requests that succeeded or failed, without cache hits.
        failures: Failures of the server: by the backend or its worker, internal errors, unavailability,
            timeouts in the queue.
        latencies: Times of successful requests; bucket n counts from 2**(n-1) to below 2**n nanoseconds.
    """

    requests: int = 0
    failures: int = 0
    latencies: Sequence[int] = ()

    def minus(self, earlier: Counts) -> Counts:
        """The requests since an earlier look."""
        old = [*earlier.latencies, *[0] * (len(self.latencies) - len(earlier.latencies))]
        return Counts(
            self.requests - earlier.requests,
            self.failures - earlier.failures,
            tuple(now - then for now, then in zip(self.latencies, old, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class ManagedBy:
    """The manager's state of a rollout.

    Attributes:
        manager: Its name, for operators.
        state: Progress, as state files have it.
        lease_s: The candidate gets no requests if the manager is silent for so many seconds.
        files: Names the state of the model's files; another one has the server read its own again.
    """

    manager: str
    state: Mapping[str, Any]
    lease_s: float
    files: str = ""


@dataclass(frozen=True, slots=True)
class ManagedVersion:
    """A version as one server sees it.

    Attributes:
        ready: It takes requests.
        current: It takes requests, and was loaded from the files that the repository has.
        failure: Error of its last load; empty if that did not fail.
        since: Time of its last transition.
        differences: Ways in which its interface differs from stable's; None while not compared.
        counts: Requests of clients since it was loaded.
        shadows: Copies of requests since then.
        pairs: Shadow pairs that were compared, and those of them that differ.
    """

    version: int
    ready: bool = False
    current: bool = False
    failure: str = ""
    since: float = 0.0
    differences: tuple[str, ...] | None = None
    counts: Counts = field(default_factory=Counts)
    shadows: Counts = field(default_factory=Counts)
    pairs: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class ManagedReport:
    """A server's answer; `alarm` says why it has left the candidate by itself, if it has."""

    rollout: RolloutReport
    alarm: str = ""
    versions: tuple[ManagedVersion, ...] = ()

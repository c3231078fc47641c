"""The rate limiter of a server, shared by all models: a `ResourceScheduler` for many threads.

Threads and locks: its lock is the innermost one. It may be asked with a model's lock held, and calls nothing
back under its own lock. A grant to a waiting instance is notified to its model, which takes that model's
lock; so `add`, `remove` and `notify` are called with no model's lock held.

Assumes: no holder of resources waits for the answer of another model, as two of them could wait for each
other for ever. An ensemble holds none; a model that calls another one from `execute` has its call run without
a grant.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping

from conch.core.execution.placement import Placement
from conch.core.scheduling.resource_scheduler import Pool, ResourceGrant, ResourceLimit, ResourceScheduler


class RateLimiter:
    """Grants resources to instances.

    Args:
        limits: Amount of each resource; see `ResourceScheduler`.
    """

    def __init__(self, limits: Iterable[ResourceLimit] = ()) -> None:
        self._lock = threading.Lock()
        self._resources = ResourceScheduler(limits)
        self._notifying = threading.local()

    def add(self, grants: Collection[ResourceGrant]) -> None:
        """Registers instances; notifies those that may run because of it.

        Raises:
            InvalidArgumentError: They could never run.
        """
        with self._lock:
            granted = self._resources.add(grants)
        self.notify(granted)

    def remove(self, grants: Iterable[ResourceGrant]) -> None:
        """Removes instances that run no batch; notifies those that may run because of it."""
        with self._lock:
            granted = self._resources.remove(grants)
        self.notify(granted)

    def ask(self, grants: Collection[ResourceGrant]) -> ResourceGrant | None:
        """Asks for one of several resting grants; see `ResourceScheduler.ask`."""
        with self._lock:
            return self._resources.ask(grants)

    def release_grant(self, grant: ResourceGrant, again: bool = False) -> list[ResourceGrant]:
        """Releases what a batch needed; see `ResourceScheduler.release`.

        Returns the grants that the caller has to `notify`, except the same one.
        """
        with self._lock:
            return self._resources.release_grant(grant, again)

    def return_grants(self, grants: Iterable[ResourceGrant]) -> list[ResourceGrant]:
        """Gives back unneeded grants; returns those that the caller has to `notify`."""
        with self._lock:
            return self._resources.return_grants(grants)

    def notify(self, granted: Iterable[ResourceGrant]) -> None:
        """Notifies models of their grants; called with no model's lock held."""
        pending: deque[ResourceGrant] | None = getattr(self._notifying, "pending", None)
        if pending is not None:  # within `on_granted`: queued, not nested
            pending.extend(granted)
            return
        pending = self._notifying.pending = deque(granted)
        try:
            while pending:
                pending.popleft().notify()
        finally:
            self._notifying.pending = None

    @property
    def capacity(self) -> Mapping[Pool, int]:
        """Units that exist, by pool."""
        with self._lock:
            return dict(self._resources.capacity)

    @property
    def units_in_use(self) -> int:
        """Units of all resources that are held."""
        with self._lock:
            return sum(self._resources.used.values())


def grant_of(owner: str, placement: Placement) -> ResourceGrant | None:
    """The grant of an instance of a model; None if it needs no resources or is passive."""
    if placement.passive:
        return None
    grant = ResourceGrant(owner, placement.resources, placement.device_id, placement.priority)
    return grant if grant.needs else None

"""The rate limits of a server, shared by the instances of all its models."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable

from conch.core.execution.placement import Placement
from conch.core.scheduling.rate import Claim, ResourceLimit, ResourceScheduler


class RateLimiter:
    """A `ResourceScheduler` for many threads.

    Its lock is the innermost one: it may be asked with a model's lock held, and calls nobody back while it
    holds its own. What happens to make another claim's instance runnable is told to that instance's model,
    which takes the lock of that model; so whoever calls what says "tells" must hold no model's lock.

    Nobody who holds resources may wait for another model's answer: two that wait for each other's resources
    would never end. An ensemble holds none, and a model that calls another one from its `execute` must have
    its call run without asking here.

    Args:
        limits: How much there is of each resource; see `ResourceScheduler`.
    """

    def __init__(self, limits: Iterable[ResourceLimit] = ()) -> None:
        self._lock = threading.Lock()
        self._resources = ResourceScheduler(limits)
        self._telling = threading.local()

    def add(self, claims: Collection[Claim]) -> None:
        """Lets instances take part; tells who can run because of it.

        Raises:
            InvalidArgumentError: They could never run.
        """
        with self._lock:
            granted = self._resources.add(claims)
        self.tell(granted)

    def remove(self, claims: Iterable[Claim]) -> None:
        """Takes instances out that run nothing; tells who can run because of it."""
        with self._lock:
            granted = self._resources.remove(claims)
        self.tell(granted)

    def ask(self, claims: Collection[Claim]) -> Claim | None:
        """Asks for one of several resting claims; see `ResourceScheduler.ask`."""
        with self._lock:
            return self._resources.ask(claims)

    def release(self, claim: Claim, again: bool = False) -> list[Claim]:
        """Gives back what an instance held for a batch; see `ResourceScheduler.release`.

        Returns:
            Claims that the caller has to `tell`, unless it is the same one.
        """
        with self._lock:
            return self._resources.release(claim, again)

    def give_back(self, claims: Iterable[Claim]) -> list[Claim]:
        """Says that claims are not needed; the caller has to `tell` those that it returns."""
        with self._lock:
            return self._resources.give_back(claims)

    def tell(self, granted: Iterable[Claim]) -> None:
        """Tells the models of claims that they were granted; never with a model's lock held."""
        pending: deque[Claim] | None = getattr(self._telling, "pending", None)
        if pending is not None:  # who is told may have others to tell: one after the other, not nested
            pending.extend(granted)
            return
        pending = self._telling.pending = deque(granted)
        try:
            while pending:
                pending.popleft().on_granted()
        finally:
            self._telling.pending = None

    @property
    def held(self) -> int:
        """Units of all resources that are held."""
        with self._lock:
            return sum(self._resources.used.values())


def claim_of(owner: str, placement: Placement) -> Claim | None:
    """What an instance claims of the limiter; None for one that needs nothing, or never runs.

    Args:
        owner: Name of its model.
        placement: Where it lives.
    """
    if placement.passive:
        return None
    claim = Claim(owner, placement.resources, placement.device_id, placement.priority)
    return claim if claim.needs else None

"""Rate limits as a pure state machine: who of those that share resources runs next.

Every instance that needs resources has a `Claim`. It asks when it has something to run, is granted all that
it needs at once or waits, and gives everything back when its batch is done:

    RESTING --ask--> WAITING --granted--> HELD --release--> RESTING

Those that wait stand in the order of their scores, equals in the order in which they came. A score is the
number of executions times the priority, so an instance of priority 2 runs half as often as one of 1. Time
in which an instance wanted nothing earns it nothing: its score rises to that of those it competes with, or
whoever is loaded last, or comes back after an hour, would keep all others waiting until it has caught up.

What one of those in front can't have yet is set aside for it as it comes free. So one that needs much is not
passed for ever by those who need little; everybody else runs whenever what is left over is enough.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from conch.core.errors import InvalidArgumentError
from conch.core.spec import Resource

Pool = tuple[str, int | None]
"""A resource's name and the device it is on; None for a resource shared by all devices."""


@dataclass(frozen=True, slots=True)
class ResourceLimit:
    """How much there is of a resource, as the operator says.

    Attributes:
        name: Name of the resource.
        count: How much.
        device: The one device this is about; None for each device.
    """

    name: str
    count: int
    device: int | None = None


class ClaimState(Enum):
    """Where a claim is between asking and giving back."""

    RESTING = auto()
    WAITING = auto()
    HELD = auto()


class Claim:
    """What one instance needs to run a batch.

    Args:
        owner: Name of its model.
        resources: What it needs.
        device: The device it runs on.
        priority: Its weight; 0 counts as 1.

    Attributes:
        needs: Units by pool; nothing that is needed zero times.
        state: Changed only by `ResourceScheduler`.
        score: Place in the order; lowest first.
        on_granted: Called, by whoever drives the scheduler, when the claim was granted while it waited.
    """

    __slots__ = ("needs", "on_granted", "order", "owner", "priority", "score", "started", "state")

    def __init__(self, owner: str, resources: Iterable[Resource], device: int, priority: int = 1) -> None:
        self.owner = owner
        self.needs: dict[Pool, int] = {}
        for resource in resources:
            if resource.count > 0:
                pool = (resource.name, None if resource.shared else device)
                self.needs[pool] = self.needs.get(pool, 0) + resource.count
        self.priority = max(priority, 1)
        self.score = 0
        self.started = 0  # the score before the last grant, to go back to if nothing was run
        self.order = 0
        self.state = ClaimState.RESTING
        self.on_granted: Callable[[], None] = lambda: None


class ResourceScheduler:
    """The resources of a server and the claims on them.

    Args:
        limits: How much there is of each resource. With none at all there is as much of each as the
            instance needs that needs most of it.
    """

    def __init__(self, limits: Iterable[ResourceLimit] = ()) -> None:
        self._limits = tuple(limits)
        self._claims: set[Claim] = set()
        self._capacity: dict[Pool, int] = {}
        self._used: dict[Pool, int] = {}
        self._level: dict[Pool, int] = {}  # highest score granted anything of a pool
        self._waiting: list[tuple[int, int, Claim]] = []
        self._orders = 0

    @property
    def capacity(self) -> Mapping[Pool, int]:
        """Units that there are."""
        return self._capacity

    @property
    def used(self) -> Mapping[Pool, int]:
        """Units that are held."""
        return self._used

    def add(self, claims: Collection[Claim]) -> list[Claim]:
        """Lets instances take part.

        Returns:
            Claims that were granted because there is more of something now.

        Raises:
            InvalidArgumentError: They could never run; nothing has changed. The text is Triton's.
        """
        self._check(claims)
        self._claims.update(claims)
        self._measure(claims)
        return self._grant()

    def remove(self, claims: Iterable[Claim]) -> list[Claim]:
        """Takes instances out that run nothing; those that are not there any more are no error.

        Returns:
            Claims that were granted because of it.
        """
        leaving = [claim for claim in claims if claim in self._claims]
        for claim in leaving:
            self._put_down(claim)
        self._claims.difference_update(leaving)
        self._measure(leaving)
        return self._grant()

    def ask(self, claims: Iterable[Claim]) -> Claim | None:
        """Asks for one of several resting claims, all that come before it in the order waiting from now on.

        Returns:
            The one that was granted; None if all of them wait.
        """
        for claim in claims:
            claim.score = max(claim.score, self._floor(claim))
        for claim in sorted(claims, key=_score):
            self._wait(claim)
            if self._grant():  # nobody else could run before, and nothing has come free
                return claim
        return None

    def release(self, claim: Claim, again: bool = False) -> list[Claim]:
        """Gives back what an instance held for the batch that it has run.

        Args:
            claim: The instance's claim.
            again: Whether it asks for the same at once. Asking after this would be too late: what it gave
                back would be granted to others, whatever the scores.

        Returns:
            Claims that were granted because of it, perhaps the same one again.
        """
        self._free(claim)
        if again:
            claim.score = max(claim.score, self._floor(claim))
            self._wait(claim)
        return self._grant()

    def give_back(self, claims: Iterable[Claim]) -> list[Claim]:
        """Says that claims, waiting or held, are not needed: nothing was run.

        Returns:
            Claims that were granted because of it.
        """
        for claim in claims:
            self._put_down(claim)
        return self._grant()

    def _floor(self, claim: Claim) -> int:
        """The score of those that a claim competes with; where it needs several things, the lowest."""
        return min((self._level.get(pool, 0) for pool in claim.needs), default=0)

    def _wait(self, claim: Claim) -> None:
        self._orders += 1
        claim.order = self._orders
        claim.state = ClaimState.WAITING
        insort(self._waiting, (claim.score, claim.order, claim))

    def _grant(self) -> list[Claim]:
        """Grants what can be granted, in order."""
        granted: list[Claim] = []
        left = {
            pool: free
            for pool, count in self._capacity.items()
            if (free := count - self._used.get(pool, 0)) > 0
        }
        place = 0
        while left and place < len(self._waiting):
            claim = self._waiting[place][2]
            fits = all(left.get(pool, 0) >= count for pool, count in claim.needs.items())
            for pool, count in claim.needs.items():
                # Used, or set aside for it.
                if pool in left:
                    left[pool] -= count
                    if left[pool] <= 0:
                        del left[pool]
            if fits:
                del self._waiting[place]
                self._hold(claim)
                granted.append(claim)
            else:
                place += 1
        return granted

    def _hold(self, claim: Claim) -> None:
        claim.state = ClaimState.HELD
        for pool, count in claim.needs.items():
            self._used[pool] = self._used.get(pool, 0) + count
            self._level[pool] = max(self._level.get(pool, 0), claim.score)
        claim.started = claim.score
        claim.score += claim.priority

    def _free(self, claim: Claim) -> None:
        claim.state = ClaimState.RESTING
        for pool, count in claim.needs.items():
            self._used[pool] -= count
            if not self._used[pool]:
                del self._used[pool]

    def _put_down(self, claim: Claim) -> None:
        if claim.state is ClaimState.HELD:
            self._free(claim)
            claim.score = claim.started
        elif claim.state is ClaimState.WAITING:
            del self._waiting[bisect_left(self._waiting, (claim.score, claim.order))]
            claim.state = ClaimState.RESTING

    def _check(self, claims: Collection[Claim]) -> None:
        owners = {claim.owner for claim in claims}
        # A model that is loaded anew may change its mind, as its old instances go.
        others = (claim for claim in self._claims if claim.owner not in owners)
        pools = {pool for claim in (*claims, *others) for pool in claim.needs}
        shared = {name for name, device in pools if device is None}
        for claim in claims:
            for name, _ in claim.needs:
                if name in shared and any(pool[0] == name and pool[1] is not None for pool in pools):
                    raise InvalidArgumentError(
                        f'Resource "{name}" is present as both global and device-specific resource in the '
                        f"model configuration."
                    )
        if self._limits:
            self._check_limits(claims)

    def _check_limits(self, claims: Iterable[Claim]) -> None:
        most: dict[Pool, int] = {}
        for claim in claims:
            for pool, count in claim.needs.items():
                most[pool] = max(most.get(pool, 0), count)
        for pool, count in most.items():
            limit = self._limit(pool)
            if count > limit:
                raise InvalidArgumentError(
                    f'Resource count for "{pool[0]}" is limited to {limit} which will prevent scheduling of '
                    f"one or more model instances, the minimum required count is {count}"
                )

    def _limit(self, pool: Pool) -> int:
        """How much there is of a pool where the operator says so; what is not named is not there."""
        name, device = pool
        named = [limit for limit in self._limits if limit.name == name]
        if device is None:  # the device of a limit means nothing for a shared resource
            return max((limit.count for limit in named), default=0)
        own = [limit.count for limit in named if limit.device == device]
        return max(own or [limit.count for limit in named if limit.device is None], default=0)

    def _measure(self, claims: Iterable[Claim]) -> None:
        """Finds out how much there is of the pools of some claims that have come or gone."""
        for pool in {pool for claim in claims for pool in claim.needs}:
            needed = [claim.needs[pool] for claim in self._claims if pool in claim.needs]
            if needed:
                self._capacity[pool] = self._limit(pool) if self._limits else max(needed)
            else:
                del self._capacity[pool]
                self._level.pop(pool, None)


def _score(claim: Claim) -> int:
    return claim.score

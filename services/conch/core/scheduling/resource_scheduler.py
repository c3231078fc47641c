"""Rate limits as a pure state machine: who of those that share resources runs next.

Every instance that needs resources has a `ResourceGrant`. It asks when it has something to run, is granted all that
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


class GrantState(Enum):
    """Where a claim is between asking and giving back."""

    RESTING = auto()
    WAITING = auto()
    HELD = auto()


class ResourceGrant:
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
        self.state = GrantState.RESTING
        self.on_granted: Callable[[], None] = lambda: None


class ResourceScheduler:
    """The resources of a server and the claims on them.

    Args:
        limits: How much there is of each resource. With none at all there is as much of each as the
            instance needs that needs most of it.
    """

    def __init__(self, limits: Iterable[ResourceLimit] = ()) -> None:
        self._limits = tuple(limits)
        self._grants: set[ResourceGrant] = set()
        self._capacity: dict[Pool, int] = {}
        self._used: dict[Pool, int] = {}
        self._level: dict[Pool, int] = {}  # highest score granted anything of a pool
        self._waiting: list[tuple[int, int, ResourceGrant]] = []
        self._orders = 0

    @property
    def capacity(self) -> Mapping[Pool, int]:
        """Units that there are."""
        return self._capacity

    @property
    def used(self) -> Mapping[Pool, int]:
        """Units that are held."""
        return self._used

    def add(self, grants: Collection[ResourceGrant]) -> list[ResourceGrant]:
        """Lets instances take part.

        Returns:
            Claims that were granted because there is more of something now.

        Raises:
            InvalidArgumentError: They could never run; nothing has changed. The text is Triton's.
        """
        self._check(grants)
        self._grants.update(grants)
        self._measure(grants)
        return self._grant()

    def remove(self, grants: Iterable[ResourceGrant]) -> list[ResourceGrant]:
        """Takes instances out that run nothing; those that are not there any more are no error.

        Returns:
            Claims that were granted because of it.
        """
        leaving = [grant for grant in grants if grant in self._grants]
        for grant in leaving:
            self._put_down(grant)
        self._grants.difference_update(leaving)
        self._measure(leaving)
        return self._grant()

    def ask(self, grants: Iterable[ResourceGrant]) -> ResourceGrant | None:
        """Asks for one of several resting claims, all that come before it in the order waiting from now on.

        Returns:
            The one that was granted; None if all of them wait.
        """
        for grant in grants:
            grant.score = max(grant.score, self._floor(grant))
        for grant in sorted(grants, key=_score):
            self._wait(grant)
            if self._grant():  # nobody else could run before, and nothing has come free
                return grant
        return None

    def release(self, grant: ResourceGrant, again: bool = False) -> list[ResourceGrant]:
        """Gives back what an instance held for the batch that it has run.

        Args:
            claim: The instance's claim.
            again: Whether it asks for the same at once. Asking after this would be too late: what it gave
                back would be granted to others, whatever the scores.

        Returns:
            Claims that were granted because of it, perhaps the same one again.
        """
        self._free(grant)
        if again:
            grant.score = max(grant.score, self._floor(grant))
            self._wait(grant)
        return self._grant()

    def give_back(self, grants: Iterable[ResourceGrant]) -> list[ResourceGrant]:
        """Says that claims, waiting or held, are not needed: nothing was run.

        Returns:
            Claims that were granted because of it.
        """
        for grant in grants:
            self._put_down(grant)
        return self._grant()

    def _floor(self, grant: ResourceGrant) -> int:
        """The score of those that a claim competes with; where it needs several things, the lowest."""
        return min((self._level.get(pool, 0) for pool in grant.needs), default=0)

    def _wait(self, grant: ResourceGrant) -> None:
        self._orders += 1
        grant.order = self._orders
        grant.state = GrantState.WAITING
        insort(self._waiting, (grant.score, grant.order, grant))

    def _grant(self) -> list[ResourceGrant]:
        """Grants what can be granted, in order."""
        granted: list[ResourceGrant] = []
        left = {
            pool: free
            for pool, count in self._capacity.items()
            if (free := count - self._used.get(pool, 0)) > 0
        }
        place = 0
        while left and place < len(self._waiting):
            grant = self._waiting[place][2]
            fits = all(left.get(pool, 0) >= count for pool, count in grant.needs.items())
            for pool, count in grant.needs.items():
                # Used, or set aside for it.
                if pool in left:
                    left[pool] -= count
                    if left[pool] <= 0:
                        del left[pool]
            if fits:
                del self._waiting[place]
                self._hold(grant)
                granted.append(grant)
            else:
                place += 1
        return granted

    def _hold(self, grant: ResourceGrant) -> None:
        grant.state = GrantState.HELD
        for pool, count in grant.needs.items():
            self._used[pool] = self._used.get(pool, 0) + count
            self._level[pool] = max(self._level.get(pool, 0), grant.score)
        grant.started = grant.score
        grant.score += grant.priority

    def _free(self, grant: ResourceGrant) -> None:
        grant.state = GrantState.RESTING
        for pool, count in grant.needs.items():
            self._used[pool] -= count
            if not self._used[pool]:
                del self._used[pool]

    def _put_down(self, grant: ResourceGrant) -> None:
        if grant.state is GrantState.HELD:
            self._free(grant)
            grant.score = grant.started
        elif grant.state is GrantState.WAITING:
            del self._waiting[bisect_left(self._waiting, (grant.score, grant.order))]
            grant.state = GrantState.RESTING

    def _check(self, grants: Collection[ResourceGrant]) -> None:
        owners = {grant.owner for grant in grants}
        # A model that is loaded anew may change its mind, as its old instances go.
        others = (grant for grant in self._grants if grant.owner not in owners)
        pools = {pool for grant in (*grants, *others) for pool in grant.needs}
        shared = {name for name, device in pools if device is None}
        for grant in grants:
            for name, _ in grant.needs:
                if name in shared and any(pool[0] == name and pool[1] is not None for pool in pools):
                    raise InvalidArgumentError(
                        f'Resource "{name}" is present as both global and device-specific resource in the '
                        f"model configuration."
                    )
        if self._limits:
            self._check_limits(grants)

    def _check_limits(self, grants: Iterable[ResourceGrant]) -> None:
        most: dict[Pool, int] = {}
        for grant in grants:
            for pool, count in grant.needs.items():
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

    def _measure(self, grants: Iterable[ResourceGrant]) -> None:
        """Finds out how much there is of the pools of some claims that have come or gone."""
        for pool in {pool for grant in grants for pool in grant.needs}:
            needed = [grant.needs[pool] for grant in self._grants if pool in grant.needs]
            if needed:
                self._capacity[pool] = self._limit(pool) if self._limits else max(needed)
            else:
                del self._capacity[pool]
                self._level.pop(pool, None)


def _score(grant: ResourceGrant) -> int:
    return grant.score

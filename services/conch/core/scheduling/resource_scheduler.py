"""Rate limits as a pure state machine: which of the instances that share resources runs next.

Every instance that needs resources has a `ResourceGrant`, which covers all that it needs at once:

    =======  ======================================  =======
    state    event                                   next
    =======  ======================================  =======
    RESTING  `ask`                                   WAITING
    WAITING  granted, at once or later               HELD
    HELD     `release` after a batch                 RESTING
    HELD     `release(again=True)`                   WAITING
    WAITING  `give_back`, `remove`                   RESTING
    HELD     `give_back`, `remove`: no batch was run RESTING
    =======  ======================================  =======

Waiting grants are ordered by score, equal ones by time. A score is the number of executions times the
priority, so an instance of priority 2 runs half as often as one of priority 1. Idle time earns nothing: on
`ask` the score rises to that of its competitors, or an instance that was loaded late, or idle, would keep all
others waiting until it has caught up.

Guarantees: free units are reserved for waiting grants in order, so one that needs much is not overtaken for
ever by those that need little; others are granted whenever the rest is enough.
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
    """The operator's limit of a resource.

    Attributes:
        name: Name of the resource.
        count: Units.
        device: The device it applies to; None for each device.
    """

    name: str
    count: int
    device: int | None = None


class GrantState(Enum):
    """State of a grant."""

    RESTING = auto()
    WAITING = auto()
    HELD = auto()


class ResourceGrant:
    """The resources that one instance needs to run a batch.

    Args:
        owner: Name of its model.
        resources: The resources.
        device: The device it runs on.
        priority: Its weight; 0 counts as 1.

    Attributes:
        needs: Units by pool, all above 0.
        state: Changed only by `ResourceScheduler`.
        score: Its order; lowest first.
    """

    __slots__ = ("_notify", "needs", "order", "owner", "priority", "score", "started", "state")

    def __init__(self, owner: str, resources: Iterable[Resource], device: int, priority: int = 1) -> None:
        self.owner = owner
        self.needs: dict[Pool, int] = {}
        for resource in resources:
            if resource.count > 0:
                pool = (resource.name, None if resource.shared else device)
                self.needs[pool] = self.needs.get(pool, 0) + resource.count
        self.priority = max(priority, 1)
        self.score = 0
        self.started = 0  # the score before it was held, restored if no batch was run
        self.order = 0
        self.state = GrantState.RESTING
        self._notify: Callable[[], None] | None = None

    def notify_with(self, notify: Callable[[], None]) -> None:
        """Has a function called when the grant has waited and is held."""
        self._notify = notify

    def notify(self) -> None:
        """Calls that function; by the scheduler's caller."""
        if self._notify is not None:
            self._notify()


class ResourceScheduler:
    """The resources of a server and the grants of its instances.

    Args:
        limits: Units of each resource. With no limits at all there is as much of each as the most demanding
            instance needs.
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
        """Units that exist, by pool."""
        return self._capacity

    @property
    def used(self) -> Mapping[Pool, int]:
        """Units that are held, by pool."""
        return self._used

    def add(self, grants: Collection[ResourceGrant]) -> list[ResourceGrant]:
        """Registers instances; returns the grants that are held because of it.

        Raises:
            InvalidArgumentError: They could never run; nothing is registered. The text is Triton's.
        """
        self._check(grants)
        self._grants.update(grants)
        self._update_capacity(grants)
        return self._grant()

    def remove(self, grants: Iterable[ResourceGrant]) -> list[ResourceGrant]:
        """Removes instances that run no batch, known or not; returns the grants held because of it."""
        leaving = [grant for grant in grants if grant in self._grants]
        for grant in leaving:
            self._reset(grant)
        self._grants.difference_update(leaving)
        self._update_capacity(leaving)
        return self._grant()

    def ask(self, grants: Iterable[ResourceGrant]) -> ResourceGrant | None:
        """Asks for one of several resting grants; those before it in the order wait.

        Returns the one that is held; None if all of them wait.
        """
        for grant in grants:
            grant.score = max(grant.score, self._floor(grant))
        for grant in sorted(grants, key=_score):
            self._wait(grant)
            if self._grant():  # no other one could be granted: nothing was freed
                return grant
        return None

    def release_grant(self, grant: ResourceGrant, again: bool = False) -> list[ResourceGrant]:
        """Releases the resources of a batch that has run.

        With `again` the same grant asks at once; asking after this would be too late, as its resources would
        go to others whatever the scores. Returns the grants held because of it, perhaps the same one.
        """
        self._free(grant)
        if again:
            grant.score = max(grant.score, self._floor(grant))
            self._wait(grant)
        return self._grant()

    def return_grants(self, grants: Iterable[ResourceGrant]) -> list[ResourceGrant]:
        """Gives back unneeded grants, waiting or held; returns those held because of it."""
        for grant in grants:
            self._reset(grant)
        return self._grant()

    def _floor(self, grant: ResourceGrant) -> int:
        """The score of a grant's competitors; the lowest if it needs several pools."""
        return min((self._level.get(pool, 0) for pool in grant.needs), default=0)

    def _wait(self, grant: ResourceGrant) -> None:
        self._orders += 1
        grant.order = self._orders
        grant.state = GrantState.WAITING
        insort(self._waiting, (grant.score, grant.order, grant))

    def _grant(self) -> list[ResourceGrant]:
        """Grants in order what fits."""
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
                # Held, or reserved for it.
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

    def _reset(self, grant: ResourceGrant) -> None:
        if grant.state is GrantState.HELD:
            self._free(grant)
            grant.score = grant.started
        elif grant.state is GrantState.WAITING:
            del self._waiting[bisect_left(self._waiting, (grant.score, grant.order))]
            grant.state = GrantState.RESTING

    def _check(self, grants: Collection[ResourceGrant]) -> None:
        owners = {grant.owner for grant in grants}
        # A reloaded model may differ from its old instances, which go.
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
        """The limit of a pool; 0 for a resource without one."""
        name, device = pool
        named = [limit for limit in self._limits if limit.name == name]
        if device is None:  # a shared resource has no device
            return max((limit.count for limit in named), default=0)
        own = [limit.count for limit in named if limit.device == device]
        return max(own or [limit.count for limit in named if limit.device is None], default=0)

    def _update_capacity(self, grants: Iterable[ResourceGrant]) -> None:
        """Updates the capacity of the pools of added or removed grants."""
        for pool in {pool for grant in grants for pool in grant.needs}:
            needed = [grant.needs[pool] for grant in self._grants if pool in grant.needs]
            if needed:
                self._capacity[pool] = self._limit(pool) if self._limits else max(needed)
            else:
                del self._capacity[pool]
                self._level.pop(pool, None)


def _score(grant: ResourceGrant) -> int:
    return grant.score

"""Decides which models are in memory: budget, victims and order. Pure; times are monotonic nanoseconds.

A *holding* is one loaded copy of a model. Holding states down, events across:

| state     | `ended`             | `ended` without it | `request`, `evict`, `expired`, `shrink` | `gone`  |
|-----------|---------------------|--------------------|-----------------------------------------|---------|
| LOADING   | RESIDENT (measured) | removed            |                                         |         |
| RESIDENT  |                     |                    | UNLOADING                               |         |
| UNLOADING |                     |                    |                                         | removed |

Invariant: the holdings, in all three states, and the memory that they do not explain are within the budget
whenever a load is granted. Only a measurement can exceed it; `shrink` then names victims, and nothing is
granted until they are gone.

A request of a load, by the room that it needs:

| room                                          | result                           |
|-----------------------------------------------|----------------------------------|
| more than the budget, with what it needs      | TOO_LARGE                        |
| is free, besides the claims before it         | GRANTED: holdings LOADING        |
| will be, when what is being unloaded has gone | WAITING: a claim                 |
| will be, when idle models are evicted         | WAITING, with models to evict    |
| none of these                                 | BLOCKED                          |

What is being unloaded and busy does not count as coming: a sequence may begin while its model is evicted, and
live for long. Loads then take other victims, or are BLOCKED.

When something changes, all loads that were not granted are requested again in their order, after
`drop_claims`: so a claim never waits for room that a measurement has taken meanwhile.

Victims are idle, not pinned, resident for `min_resident_ns`, and no part of an ensemble that stays; an
ensemble goes before its parts. A load for a model that was not used for an hour takes no victim that was used
within `min_resident_ns`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from conch_residency.segments import Room, Segments

_S = 1_000_000_000
RARE_NS = 3600 * _S
"""A model is rarely used if it was not used for so long."""
_THRASH_NS = 60 * _S
_THRASH_TIMES = 3
"""Most evictions of each other by two models within `_THRASH_NS` that are no thrashing."""


class HoldingState(Enum):
    """State of a holding; the module has the table."""

    LOADING = "loading"
    RESIDENT = "resident"
    UNLOADING = "unloading"


@dataclass(frozen=True, slots=True)
class ResidencyLimits:
    """Limits of the models in memory, and times for which they stay.

    Attributes:
        budget: Memory, number of models, and memory of GPUs.
        min_resident_ns: Time for which a model stays after its load.
        idle_ns: Time without use after which a model is evicted, unless it has its own; 0 for never.
    """

    budget: Room
    min_resident_ns: int = 0
    idle_ns: int = 0


@dataclass(slots=True, eq=False)
class Holding:
    """One copy of a model.

    Attributes:
        parts: Models that it is composed of, directly or not.
        since_ns: Time of its load.
        used_ns: Time of its last use.
        idle_ns: Its own `ResidencyLimits.idle_ns`; None for the common one.
    """

    name: str
    room: Room
    state: HoldingState
    parts: frozenset[str] = frozenset()
    since_ns: int = 0
    used_ns: int = 0
    idle_ns: int | None = None

    @property
    def bytes(self) -> int:
        """Its memory, without that of GPUs."""
        return self.room.bytes


class RoomOutcome(Enum):
    """Result of a request; the module has the table."""

    GRANTED = "granted"
    WAITING = "waiting"
    BLOCKED = "blocked"
    TOO_LARGE = "too large"


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of a request, with the holdings to be unloaded now, in order."""

    outcome: RoomOutcome
    victims: tuple[Holding, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A load: the room that each model needs, and the models that it needs in memory."""

    needs: Mapping[str, Room]
    keeps: frozenset[str]

    @property
    def room(self) -> Room:
        return _sum(self.needs.values())


@dataclass(slots=True)
class _Uses:
    """The last two times at which a model was asked for while it was not in memory, or used."""

    last_ns: int | None = None
    before_ns: int | None = None


Busy = Callable[[Holding], bool]
"""True if a holding, resident or being unloaded, has requests or live sequences."""


@dataclass(slots=True)
class _Thrashing:
    """Evictions of each other by pairs of models within the last minute; the oldest pairs are first."""

    seen: OrderedDict[frozenset[str], deque[tuple[int, str]]] = field(default_factory=OrderedDict)

    def add(self, victim: str, cause: str, now: int) -> bool:
        """Records an eviction; True if the two have begun to thrash."""
        pair = frozenset({victim, cause})
        times = self.seen.setdefault(pair, deque())
        times.append((now, victim))
        self.seen.move_to_end(pair)
        while next(iter(self.seen.values()))[-1][0] <= now - _THRASH_NS:
            self.seen.popitem(last=False)
        while times[0][0] <= now - _THRASH_NS:
            times.popleft()
        evicted = sum(1 for _, each in times if each == victim)
        return evicted == _THRASH_TIMES + 1 and len(times) - evicted > _THRASH_TIMES


class ResidencyPlan:
    """The residency of one server's models.

    Attributes:
        pinned: Names of models that are never victims.
        unexplained: Memory of the process that no holding explains, as far as that is not tolerable.
        thrashing: Pairs of models that have begun to evict each other, for the log; taken by the caller.
    """

    def __init__(self, limits: ResidencyLimits) -> None:
        self.limits = limits
        self.pinned: set[str] = set()
        self.unexplained = Room()
        self.thrashing: list[frozenset[str]] = []
        self._held: set[Holding] = set()
        self._current: dict[str, Holding] = {}  # loading or resident
        self._ensembles: set[Holding] = set()  # the resident ones
        self._leaving: set[Holding] = set()
        self._total = Room()
        self._segments = Segments(limits.budget)
        self._claims: dict[str, _Job] = {}
        self._loads: dict[str, _Job] = {}
        self._uses: dict[str, _Uses] = {}
        self._pairs = _Thrashing()

    @property
    def total(self) -> Room:
        """Sum of the sizes of all holdings."""
        return self._total

    @property
    def holdings(self) -> Collection[Holding]:
        """All holdings."""
        return self._held

    def holding(self, name: str) -> Holding | None:
        """The holding of a model that is loading or resident."""
        return self._current.get(name)

    def resident(self) -> list[Holding]:
        """The resident holdings, the next victim first."""
        return [self._current[name] for name in self._segments]

    def note_request(self, name: str, now: int) -> None:
        """Records a request for a model that is not in memory."""
        uses = self._uses.setdefault(name, _Uses())
        uses.before_ns, uses.last_ns = uses.last_ns, now

    def used(self, name: str, now: int) -> None:
        """Records that a resident model was used again."""
        holding = self._current.get(name)
        if holding is None or holding.state is not HoldingState.RESIDENT:
            return
        holding.used_ns = now
        self._segments.use(name)
        self.note_request(name, now)

    def request(
        self, job: str, needs: Mapping[str, Room], keeps: Iterable[str], now: int, busy: Busy
    ) -> Decision:
        """Requests room for a load.

        Args:
            job: The model that is to be loaded.
            needs: Room of each model that the load brings into memory; none of them has a `holding`.
            keeps: Models in memory that it needs.
            now: The time.
            busy: True if a resident model can't be evicted now, or one that is being unloaded goes later.
        """
        wanted = _Job(needs, frozenset({job, *keeps}))
        held = _sum(self._current[each].room for each in wanted.keeps if each in self._current)
        if not (wanted.room + held).within(self.limits.budget):
            return Decision(RoomOutcome.TOO_LARGE)
        claimed = _sum(each.room for each in self._claims.values())
        free = self._free() - claimed
        if wanted.room.within(free):
            self._grant(job, wanted)
            return Decision(RoomOutcome.GRANTED)
        coming = free + self._coming(busy)
        victims: list[Holding] = []
        if not wanted.room.within(coming):
            found = self._victims(wanted.room - coming, wanted.keeps, now, busy, self._is_rare(job, now))
            if found is None:
                return Decision(RoomOutcome.BLOCKED)
            victims = found
        self._claims[job] = wanted
        for victim in victims:
            self._unload(victim)
            if victim.name not in wanted.keeps and self._pairs.add(victim.name, job, now):
                self.thrashing.append(frozenset({victim.name, job}))
        return Decision(RoomOutcome.WAITING, tuple(victims))

    def drop_claims(self) -> None:
        """Forgets all claims, before their loads are requested again."""
        self._claims.clear()

    def ended(
        self,
        job: str,
        sizes: Mapping[str, Room],
        parts: Mapping[str, frozenset[str]],
        now: int,
        oldest: bool = False,
    ) -> None:
        """Ends a granted load.

        Args:
            job: Its name in `request`.
            sizes: Measured room of each model that it has brought into memory; none if it failed.
            parts: Models that these are composed of.
            now: The time.
            oldest: True if they go before all others.
        """
        for name in self._loads.pop(job).needs.keys() - sizes.keys():
            self._remove(self._current.pop(name))
        for name, size in sizes.items():
            # A part that another load had counted, and not loaded, has no holding.
            holding = self._current.get(name) or self._hold(name, size)
            holding.parts = parts.get(name, frozenset())
            if holding.parts:
                self._ensembles.add(holding)
            if holding.state is HoldingState.LOADING:
                self._resize(holding, size)
                holding.state = HoldingState.RESIDENT
                holding.since_ns = holding.used_ns = now
                self._segments.add(name, size, oldest)

    def resized(self, name: str, size: Room) -> None:
        """Records a new measurement of a resident model."""
        holding = self._current.get(name)
        if holding is not None and holding.state is HoldingState.RESIDENT:
            self._resize(holding, size)
            self._segments.resize(name, size)

    def set_idle(self, name: str, idle_ns: int | None) -> None:
        """Sets `Holding.idle_ns` of a model that has been loaded."""
        holding = self._current.get(name)
        if holding is not None:
            holding.idle_ns = idle_ns

    def note_unloaded(self, holding: Holding) -> None:
        """Records that an unloaded holding has left memory."""
        self._leaving.remove(holding)
        self._remove(holding)

    def evict(self, name: str) -> list[Holding]:
        """Evicts a resident model, whatever its state, with the ensembles above it; returns them in order."""
        holding = self._current.get(name)
        if holding is None or holding.state is not HoldingState.RESIDENT:
            return []
        group = self._group(holding)
        for each in group:
            self._unload(each)
        return group

    def expired(self, now: int, busy: Busy) -> list[Holding]:
        """Evicts the models that were not used for their `idle_ns`; returns them in order."""
        found: list[Holding] = []
        for holding in self.resident():
            if holding.state is not HoldingState.RESIDENT:
                continue  # it went with its part
            group = self._group(holding)
            if all(
                self._is_idle(each, now) and self._evictable(each, frozenset(), now, busy) for each in group
            ):
                found += group
                for each in group:
                    self._unload(each)
        return found

    def shrink(self, now: int, busy: Busy) -> list[Holding]:
        """Evicts models if measurements exceed the budget; returns as many as can go, in order."""
        surplus = Room() - self._free() - self._coming(busy)
        if surplus.within(Room()):
            return []
        victims = self._victims(surplus, frozenset(), now, busy, False, partly=True) or []
        for victim in victims:
            self._unload(victim)
        return victims

    def _free(self) -> Room:
        return self.limits.budget - self._total - self.unexplained

    def _coming(self, busy: Busy) -> Room:
        return _sum(each.room for each in self._leaving if not busy(each))

    def _grant(self, job: str, wanted: _Job) -> None:
        self._loads[job] = wanted
        for name, size in wanted.needs.items():
            self._hold(name, size)

    def _hold(self, name: str, size: Room) -> Holding:
        holding = self._current[name] = Holding(name, size, HoldingState.LOADING)
        self._held.add(holding)
        self._total += holding.room
        return holding

    def _resize(self, holding: Holding, size: Room) -> None:
        self._total += size - holding.room
        holding.room = size

    def _remove(self, holding: Holding) -> None:
        self._held.remove(holding)
        self._total -= holding.room

    def _unload(self, holding: Holding) -> None:
        holding.state = HoldingState.UNLOADING
        self._leaving.add(holding)
        self._ensembles.discard(holding)
        del self._current[holding.name]
        self._segments.remove(holding.name)

    def _group(self, holding: Holding) -> list[Holding]:
        """A resident model behind the ensembles above it, outermost first."""
        above = [each for each in self._ensembles if holding.name in each.parts]
        return [*sorted(above, key=lambda each: (-len(each.parts), each.name)), holding]

    def _is_idle(self, holding: Holding, now: int) -> bool:
        idle_ns = self.limits.idle_ns if holding.idle_ns is None else holding.idle_ns
        return idle_ns > 0 and holding.used_ns <= now - idle_ns

    def _is_rare(self, name: str, now: int) -> bool:
        uses = self._uses.get(name)
        return uses is None or uses.before_ns is None or uses.before_ns <= now - RARE_NS

    def _evictable(self, holding: Holding, keeps: frozenset[str], now: int, busy: Busy) -> bool:
        name = holding.name
        return (
            holding.state is HoldingState.RESIDENT
            and name not in self.pinned
            and name not in keeps
            and holding.since_ns <= now - self.limits.min_resident_ns
            and not any(name in job.keeps for job in (*self._claims.values(), *self._loads.values()))
            and not busy(holding)
        )

    def _victims(
        self, missing: Room, keeps: frozenset[str], now: int, busy: Busy, rare: bool, partly: bool = False
    ) -> list[Holding] | None:
        """Resident models that give the missing room, in the order to unload them; None if there are none.

        A model that was taken and turns out not to be needed stays. `partly` takes what there is.
        """
        recently = now - self.limits.min_resident_ns
        groups: list[list[Holding]] = []
        taken: set[Holding] = set()
        freed = Room()
        for holding in map(self._current.__getitem__, self._segments):
            if missing.within(freed):
                break
            group = [each for each in self._group(holding) if each not in taken]
            if holding in taken or not all(self._evictable(each, keeps, now, busy) for each in group):
                continue
            if rare and any(each.used_ns > recently for each in group):
                continue
            room = _sum(each.room for each in group)
            if not room.gives(missing - freed):
                continue
            groups.append(group)
            taken.update(group)
            freed += room
        if not missing.within(freed) and not partly:
            return None
        for group in list(reversed(groups)):
            alone = len(group) == 1 and not group[0].parts and not self._has_above(group[0], taken)
            if alone and missing.within(freed - group[0].room):
                groups.remove(group)
                freed -= group[0].room
        return [each for group in groups for each in group]

    @staticmethod
    def _has_above(holding: Holding, taken: Collection[Holding]) -> bool:
        return any(holding.name in each.parts for each in taken)


def _sum(rooms: Iterable[Room]) -> Room:
    total = Room()
    for room in rooms:
        total += room
    return total

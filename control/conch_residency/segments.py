"""Segmented LRU: the order in which resident models are evicted. Pure.

| event                     | effect                                                              |
|---------------------------|---------------------------------------------------------------------|
| a model is loaded         | newest of probation                                                 |
| it is used again          | newest of the protected segment                                     |
| the protected segment has more than its share | its oldest models become the newest of probation |

Victims come from probation first, oldest first. A scan of many models, each used once, passes through
probation and leaves the protected models in memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

PROTECTED_PERCENT = 80
"""Largest share of the budget that the protected segment has."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory in bytes, a number of models, and memory of each GPU with a budget; no GPUs stand for zeros."""

    bytes: int = 0
    models: int = 0
    gpus: tuple[int, ...] = ()

    def __add__(self, other: Room) -> Room:
        if self.gpus or other.gpus:
            gpus = tuple(mine + theirs for mine, theirs in zip_longest(self.gpus, other.gpus, fillvalue=0))
        else:
            gpus = ()
        return Room(self.bytes + other.bytes, self.models + other.models, gpus)

    def __sub__(self, other: Room) -> Room:
        return self + Room(-other.bytes, -other.models, tuple(-each for each in other.gpus))

    @property
    def positive(self) -> Room:
        """It, with zeros for what is below."""
        return Room(max(self.bytes, 0), max(self.models, 0), tuple(max(each, 0) for each in self.gpus))

    def within(self, other: Room) -> bool:
        """True if nothing is more than the other's."""
        if self.bytes > other.bytes or self.models > other.models:
            return False
        return all(mine <= theirs for mine, theirs in zip_longest(self.gpus, other.gpus, fillvalue=0))

    def gives(self, missing: Room) -> bool:
        """True if it has something of what is missing."""
        return bool(
            (self.bytes > 0 < missing.bytes)
            or (self.models > 0 < missing.models)
            or any(mine > 0 < lacks for mine, lacks in zip(self.gpus, missing.gpus, strict=False))
        )

    def share(self, percent: int) -> Room:
        """A share of a budget, of at least one model."""
        return Room(
            self.bytes * percent // 100,
            max(self.models * percent // 100, 1),
            tuple(each * percent // 100 for each in self.gpus),
        )


class Segments:
    """The segments of a budget; each model has a room of its own."""

    def __init__(self, budget: Room) -> None:
        self._share = budget.share(PROTECTED_PERCENT)
        self._probation: OrderedDict[str, Room] = OrderedDict()
        self._protected: OrderedDict[str, Room] = OrderedDict()
        self._used = Room()

    def __iter__(self) -> Iterator[str]:
        """All models, the next victim first."""
        yield from self._probation
        yield from self._protected

    def add(self, name: str, room: Room, oldest: bool = False) -> None:
        """Adds a model that has been loaded, as the newest of probation or as the oldest."""
        self._probation[name] = room
        if oldest:
            self._probation.move_to_end(name, last=False)

    def remove(self, name: str) -> None:
        """Removes a model."""
        if self._probation.pop(name, None) is None:
            self._used -= self._protected.pop(name)

    def use(self, name: str) -> None:
        """Records another use of a model."""
        room = self._probation.pop(name, None)
        if room is None:
            self._protected.move_to_end(name)
            return
        self._protected[name] = room
        self._used += room
        self._demote()

    def resize(self, name: str, room: Room) -> None:
        """Sets the room of a model."""
        if name in self._probation:
            self._probation[name] = room
            return
        self._used += room - self._protected[name]
        self._protected[name] = room
        self._demote()

    def _demote(self) -> None:
        while len(self._protected) > 1 and not self._used.within(self._share):
            name, room = self._protected.popitem(last=False)
            self._used -= room
            self._probation[name] = room

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

PROTECTED_PERCENT = 80
"""Largest share of the budget that the protected segment has."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory in bytes, and a number of models."""

    bytes: int = 0
    models: int = 0

    def __add__(self, other: Room) -> Room:
        return Room(self.bytes + other.bytes, self.models + other.models)

    def __sub__(self, other: Room) -> Room:
        return Room(self.bytes - other.bytes, self.models - other.models)

    def within(self, other: Room) -> bool:
        """True if neither the bytes nor the models are more than the other's."""
        return self.bytes <= other.bytes and self.models <= other.models


class Segments:
    """The segments of a budget; each model has a room of its own."""

    def __init__(self, budget: Room) -> None:
        self._share = Room(
            budget.bytes * PROTECTED_PERCENT // 100, max(budget.models * PROTECTED_PERCENT // 100, 1)
        )
        self._probation: OrderedDict[str, Room] = OrderedDict()
        self._protected: OrderedDict[str, Room] = OrderedDict()
        self._used = Room()

    def __iter__(self) -> Iterator[str]:
        """All models, the next victim first."""
        yield from self._probation
        yield from self._protected

    def add(self, name: str, room: Room) -> None:
        """Adds a model that has been loaded."""
        self._probation[name] = room

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

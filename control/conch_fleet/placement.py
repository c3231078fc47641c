"""Decides which servers are to have which models. Pure.

`place` takes what the models need and what the servers offer. It gives each model its servers in two passes:
servers that have the model keep it, as far as rules and memory allow; then servers with the fewest models get
what is missing. A composing model is placed wherever one of its ensembles is.

Guarantees: the result depends on the arguments only; the known sizes of a server's models never exceed its
memory; a model moves only if a rule or memory asks for it; what `place` has decided it does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

EVERYWHERE = None
"""As `replicas`: on each server that a model's labels allow."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of a model.

    Attributes:
        replicas: Number of servers; `EVERYWHERE` for all that are allowed.
        labels: Labels that a server must have.
        bytes: Memory on each server; 0 if unknown.
        parts: Composing models of an ensemble.
        keep: Servers that are to keep it, most preferred first.
        held: Servers whose memory it takes now, whether or not it is to stay there.
    """

    replicas: int | None = EVERYWHERE
    labels: Mapping[str, str] = field(default_factory=dict)
    bytes: int = 0
    parts: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    held: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Room:
    """Capacity of a server.

    Attributes:
        memory: Bytes for models; None if unlimited.
        used: Bytes of models that are not placed.
        refused: Models that it must not get.
        closed: It keeps what it has, but gets nothing more: it is lost or drains.
    """

    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    memory: int | None = None
    used: int = 0
    refused: frozenset[str] = frozenset()
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """The servers of each model, in the servers' order, and why some models have too few."""

    servers: Mapping[str, tuple[str, ...]]
    problems: Mapping[str, str]


def place(demands: Mapping[str, Demand], rooms: Sequence[Room]) -> Placement:
    """Places models on servers; see the module's guarantees.

    Args:
        demands: The models; if memory has become too little, the last ones give way.
        rooms: The servers, in their order of preference.
    """
    return _Placing(demands, rooms).run()


class _Placing:
    def __init__(self, demands: Mapping[str, Demand], rooms: Sequence[Room]) -> None:
        self._demands = demands
        self._rooms = rooms
        self._placed: dict[str, set[str]] = {room.address: set() for room in rooms}
        self._held = {
            room.address: {name for name, each in demands.items() if room.address in each.held}
            for room in rooms
        }
        self._closures = {name: _closure(name, demands) for name in demands}

    def run(self) -> Placement:
        # Ensembles come before what they are composed of, which follows them.
        for size in sorted({len(each) for each in self._closures.values()}, reverse=True):
            names = [name for name, closure in self._closures.items() if len(closure) == size]
            for name in names:
                self._keep(name)
            for name in sorted(names, key=lambda each: (-self._demands[each].bytes, each)):
                self._fill(name)
        servers = {
            name: tuple(room.address for room in self._rooms if name in self._placed[room.address])
            for name in self._demands
        }
        return Placement(servers, {name: why for name in self._demands if (why := self._problem(name))})

    def _keep(self, name: str) -> None:
        rooms = {room.address: room for room in self._rooms}
        for address in self._demands[name].keep:
            room = rooms.get(address)
            if room is not None and self._wants_more(name) and not self._refusal(name, room, self._placed):
                self._placed[address] |= self._closures[name]

    def _fill(self, name: str) -> None:
        for room in sorted(self._rooms, key=lambda each: len(self._placed[each.address])):
            if room.closed or not self._wants_more(name):
                continue
            if not self._refusal(name, room, self._occupied()):
                self._placed[room.address] |= self._closures[name]

    def _occupied(self) -> dict[str, set[str]]:
        return {address: placed | self._held[address] for address, placed in self._placed.items()}

    def _wants_more(self, name: str) -> bool:
        replicas = self._demands[name].replicas
        return replicas is EVERYWHERE or self._count(name) < replicas

    def _count(self, name: str) -> int:
        return sum(name in placed for placed in self._placed.values())

    def _refusal(self, name: str, room: Room, present: Mapping[str, set[str]]) -> str:
        """Reason for which a server can't get a model beside those present; empty if it can."""
        if mismatch := self._mismatch(name, room):
            return mismatch
        if room.memory is None:
            return ""
        there = present[room.address]
        more = self._bytes(self._closures[name] - there)
        free = room.memory - room.used - self._bytes(there)
        if more > free:
            return f"{room.address} has {size_text(max(free, 0))} free and {size_text(more)} are needed"
        return ""

    def _mismatch(self, name: str, room: Room) -> str:
        for key, value in self._demands[name].labels.items():
            if room.labels.get(key) != value:
                return f"{room.address} has not the label {key} = '{value}'"
        refused = sorted(self._closures[name] & room.refused)
        return f"{refused[0]} was unloaded from {room.address} by others" if refused else ""

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self._demands[name].bytes for name in names)

    def _problem(self, name: str) -> str:
        count, replicas = self._count(name), self._demands[name].replicas
        if replicas is not EVERYWHERE and count >= replicas:
            return ""
        occupied = self._occupied()
        without = [room for room in self._rooms if name not in self._placed[room.address]]
        if replicas is EVERYWHERE and count:
            # Servers that the rule leaves out are no problem.
            without = [room for room in without if not (room.closed or self._mismatch(name, room))]
            if not without:
                return ""
        reasons = [
            f"{room.address} is lost or drains" if room.closed else self._refusal(name, room, occupied)
            for room in without
        ]
        wanted = "all" if replicas is EVERYWHERE else str(replicas)
        found = "; ".join(filter(None, reasons)) or f"there are only {len(self._rooms)} servers"
        return f"{count} of {wanted} copies placed: {found if self._rooms else 'there is no server'}"


def _closure(name: str, demands: Mapping[str, Demand]) -> frozenset[str]:
    """A model and everything it is composed of, as far as it is known."""
    seen: set[str] = set()
    unseen = [name]
    while unseen:
        each = unseen.pop()
        if each in demands and each not in seen:
            seen.add(each)
            unseen += demands[each].parts
    return frozenset(seen)


UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
"""Units of memory in placement files."""


def size_text(size: int) -> str:
    """A number of bytes in a unit of its size."""
    unit = next((unit for unit in ("GB", "MB", "KB") if size >= UNITS[unit]), "B")
    return f"{size / UNITS[unit]:.4g} {unit}"

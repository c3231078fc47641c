"""Data of the fleet's state machine: servers, models, steps and what the machine tells. Pure."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from conch.core.errors import ConchError
from conch_fleet.placement_file import FleetServer


@dataclass(frozen=True, slots=True)
class RollStep:
    """A load or unload on one server; `replaces` is true if the server serves an older copy."""

    kind: Literal["load", "unload"]
    server: str
    model: str
    generation: int = 0
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class Sight:
    """State of a server at one moment, by its index.

    Attributes:
        epoch: Life of the server's process.
        serving: Bytes of each model with a ready version; None if not measured.
        draining: It is not ready, and gets no more models.
        catalogue: Models that it has loaded, or loads for a request.
    """

    epoch: str
    serving: Mapping[str, int | None]
    draining: bool = False
    catalogue: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Change:
    """A model that has begun (or ceased) to be served by the fleet, for the planner."""

    model: str
    serves: bool


@dataclass(frozen=True, slots=True)
class Note:
    """A decision, for the log."""

    text: str
    level: int = logging.INFO


@dataclass(slots=True)
class ServerState:
    """State of one server.

    Attributes:
        up: It is reached; None if that has not been tried.
        absent_at: Time since when it is lost or drains, if it does.
        gone: It is absent for so long that its models are placed elsewhere.
        copies: Generation of each model that it serves; 0 if unknown.
        sizes: Their measured bytes.
        doomed: Copies of dropped models.
        refused: Models that others have unloaded from it.
        running: Steps that have not ended.
        returning: Models that it had before it was started again, until it has tried to load them.
        pauses: Transient failures in a row, and the time of the next try, by model.
    """

    spec: FleetServer
    absent_at: int
    up: bool | None = None
    epoch: str = ""
    draining: bool = False
    gone: bool = False
    copies: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    doomed: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    running: dict[str, RollStep] = field(default_factory=dict)
    returning: set[str] = field(default_factory=set)
    pauses: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Its address."""
        return self.spec.address

    @property
    def usable(self) -> bool:
        """True if it can get models now."""
        return bool(self.up) and not self.draining

    @property
    def replacing(self) -> bool:
        """True while it replaces copies."""
        return bool(self.up) and any(step.replaces for step in self.running.values())

    def has(self, model: str, generation: int) -> bool:
        """True if it serves this generation and changes nothing about it."""
        return self.copies.get(model) == generation and model not in self.running

    def paused(self, model: str, now: int) -> bool:
        """True while a failed step waits for its next try."""
        return model in self.pauses and self.pauses[model][1] > now

    def forget(self) -> None:
        """Begins with a new process of the server."""
        for what in (self.copies, self.sizes, self.doomed, self.refused, self.pauses):
            what.clear()


@dataclass(slots=True)
class ModelState:
    """State of a wanted model.

    Attributes:
        servers: Servers that it is placed on.
        problem: Reason for which it has too few servers.
        bytes: Its memory as last measured.
        error: Error of a server that could not load this generation.
        held: True if that server can't load it until the files change.
    """

    generation: int
    parts: tuple[str, ...]
    servers: tuple[str, ...] = ()
    problem: str = ""
    bytes: int = 0
    error: ConchError | None = None
    held: bool = False


Ended = tuple[RollStep, BaseException | None]
"""A step that has ended, and its error."""

"""`Residency`: the choice of the models that are in memory.

`AllResident` is that of a server which keeps what it has loaded. Another one comes with an add-on, whose
settings set `PartOptions.residency`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conch.core.cold_models import ColdModels
    from conch.core.registry import Registry
    from conch_control.control_options import ControlOptions
    from conch_control.lifecycle.resident_loads import ResidentLoads
    from conch_control.repository.repositories import Repositories
    from conch_control.repository.source import Scan

Errors = Mapping[str, Exception]
"""Errors of a load by model."""


class Residency(ABC):
    """The models of a server that may be out of memory; thread-safe."""

    @property
    @abstractmethod
    def cold(self) -> ColdModels | None:
        """Models that requests can have loaded; None if all models are in memory."""

    @abstractmethod
    def start(self, scan: Scan) -> None:
        """Takes the models of the repositories, and begins to serve their names."""

    @abstractmethod
    def restore(self) -> None:
        """Begins to load the models that the last run had in memory; the ports are open."""

    @abstractmethod
    def catalogue(self, scan: Scan) -> None:
        """Takes a new listing of the repositories."""

    @abstractmethod
    def ready(self, unready: Set[str]) -> bool:
        """True if none of the models that are not ready keeps the server from being ready."""

    @abstractmethod
    def load(self, name: str, run: Callable[[], Errors], pin: bool) -> Errors:
        """Makes room for a load that a call has asked for, and has it run; returns its errors.

        Args:
            name: The model.
            run: Loads it.
            pin: True if the model stays until it is unloaded.

        Raises:
            ConchError: There is no room, or the server stops.
        """

    @abstractmethod
    def unload(self, name: str, with_parts: bool) -> bool:
        """Unloads a model for a call; False if the lifecycle is to do that."""

    @abstractmethod
    def measure(self, name: str) -> None:
        """Measures a model again, of which other versions are in memory now."""

    @abstractmethod
    def pin_for_rollout(self, name: str, pinned: bool) -> None:
        """Keeps a model in memory while True, if it is there or as soon as it is."""

    @abstractmethod
    def stop(self) -> None:
        """Ends all waits; no more loads begin."""

    @abstractmethod
    def close(self) -> None:
        """Stops, and waits for the threads."""


class ResidencyKind(ABC):
    """Settings of a residency."""

    @abstractmethod
    def open(
        self, options: ControlOptions, registry: Registry, repositories: Repositories, loads: ResidentLoads
    ) -> Residency:
        """Makes the residency of one server.

        Args:
            options: Settings of the control plane.
            registry: The models in memory.
            repositories: The repositories of the models.
            loads: Loads and evicts.

        Raises:
            InvalidArgumentError: A setting can't be used.
        """


class AllResident(Residency):
    """The residency of a server whose models stay in memory until they are unloaded."""

    cold = None

    def start(self, scan: Scan) -> None:
        """Starts nothing."""

    def restore(self) -> None:
        """Loads nothing: the startup models are loaded."""

    def catalogue(self, scan: Scan) -> None:
        """Keeps no catalogue."""

    def ready(self, unready: Set[str]) -> bool:
        """True if all models are ready."""
        return not unready

    def load(self, name: str, run: Callable[[], Errors], pin: bool) -> Errors:
        """Has the load run."""
        return run()

    def unload(self, name: str, with_parts: bool) -> bool:
        """Leaves the unload to the lifecycle."""
        return False

    def measure(self, name: str) -> None:
        """Measures nothing."""

    def pin_for_rollout(self, name: str, pinned: bool) -> None:
        """Pins nothing: no model is evicted."""

    def stop(self) -> None:
        """Stops nothing."""

    def close(self) -> None:
        """Closes nothing."""

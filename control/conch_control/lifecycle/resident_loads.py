"""What residency on demand has the lifecycle do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from conch_control.lifecycle.ensemble_dependencies import EnsembleDependencies
from conch_control.lifecycle.memory_usage import resident_bytes
from conch_control.lifecycle.version_states import VersionStates
from conch_control.repository.source import Scan
from conch_control.version_phase import Phase


class ResidentLoads:
    """A `conch_control.residency.residency.Loads`; thread-safe."""

    def __init__(self, dependencies: EnsembleDependencies, states: VersionStates) -> None:
        self._dependencies = dependencies
        self._states = states

    def load(self, name: str, scan: Scan) -> Mapping[str, Exception]:
        """Loads a model after the models that it is composed of; returns the errors by model."""
        return self._dependencies.load([name], scan)

    def evict(self, name: str, gone: Callable[[], None]) -> None:
        """Unloads a model, whose states are forgotten once it has left memory."""

        def left() -> None:
            self._states.forget(name, evicted=True)
            gone()

        self._dependencies.evict(name, left)

    def host_bytes(self, name: str) -> int | None:
        """Growth of the process by the load of all ready versions; None if one is unknown."""
        ready = [each for each in self._states.versions(name).values() if each.phase is Phase.READY]
        known = [each.host_bytes for each in ready if each.host_bytes is not None]
        return sum(known) if known and len(known) == len(ready) else None

    def resident_bytes(self) -> int | None:
        """Resident memory of this process; None if the platform does not report it."""
        return resident_bytes()

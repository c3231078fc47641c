"""Which models an agent runs, as far as its events tell."""

from __future__ import annotations

from collections.abc import Iterable

from conch_control.events import Event
from conch_control.port import Index
from conch_control.states import Phase


class Running:
    """Which models have a version that is ready.

    Args:
        index: What was known at one moment; events come from its revision on.
    """

    def __init__(self, index: Index) -> None:
        self.epoch = index.epoch
        self.revision = index.revision
        self._ready = {
            model.name: {version.version for version in model.versions if version.phase is Phase.READY}
            for model in index.models
        }

    @property
    def names(self) -> frozenset[str]:
        """The models that run."""
        return frozenset(name for name, versions in self._ready.items() if versions)

    def take_in(self, events: Iterable[Event]) -> dict[str, bool]:
        """Takes in events; returns the models that run since or do not any more."""
        before = self.names
        for event in events:
            self.revision = event.revision
            versions = self._ready.setdefault(event.model, set())
            if event.phase is Phase.READY:
                versions.add(event.version)
            elif event.version:
                versions.discard(event.version)
        now = self.names
        return {name: name in now for name in before ^ now}

"""`Rollouts`: which versions of a model are loaded, and which of them gets a request.

An add-on brings them by the entry-point group ``conch.rollouts``: a function with the arguments of
`open_rollouts`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

from conch.core.add_ons import load_add_on
from conch.core.registry import Registry
from conch.core.rollouts import RolloutReport
from conch_control.control_options import ControlOptions
from conch_control.events import EventLog
from conch_control.lifecycle.load_queue import LoadQueue
from conch_control.lifecycle.version_diff import Origin
from conch_control.lifecycle.version_states import VersionStates
from conch_control.managed_rollouts import ManagedBy, ManagedReport
from conch_control.repository.layout import Fingerprint
from conch_control.repository.source import ModelSource

Saturation = Callable[[], Mapping[object, float]]
"""Reads the saturation of all versions, by the identity of their statistics."""


class Rollouts(ABC):
    """Labels and rollouts of one server: a `conch.core.rollouts.RolloutControl`; any thread."""

    @abstractmethod
    def restore(self) -> None:
        """Takes the progress of the last run; before models are loaded."""

    @abstractmethod
    def begins(self, source: ModelSource, state: Fingerprint) -> None:
        """Takes the files of a model that is about to be loaded, and its declaration.

        Raises:
            InvalidArgumentError: The declaration is wrong.
            OSError: It can't be read.
        """

    @abstractmethod
    def ended(self, name: str) -> None:
        """Returns when requests are divided among the versions that serve now."""

    @abstractmethod
    def versions_of(
        self, name: str, available: Collection[int], policy: Callable[[Collection[int]], Collection[int]]
    ) -> list[int]:
        """Versions to load, ascending, of those available; `policy` selects those of the config."""

    @abstractmethod
    def held(self, name: str) -> Collection[int]:
        """Versions that may get requests now, so that no load ends them."""

    @abstractmethod
    def end(self, name: str, reason: str) -> None:
        """Ends a model's rollout, if it has one: it was unloaded, or loaded with another config."""

    @abstractmethod
    def summary(self, model: str) -> RolloutReport | None:
        """A model's rollout without counters and history; None for none."""

    @abstractmethod
    def rollout(self, name: str) -> RolloutReport:
        """See `RolloutControl.rollout`."""

    @abstractmethod
    def rollouts(self) -> list[RolloutReport]:
        """See `RolloutControl.rollouts`."""

    @abstractmethod
    def start_rollout(self, name: str, declaration: Mapping[str, Any], again: bool) -> RolloutReport:
        """See `RolloutControl.start_rollout`."""

    @abstractmethod
    def update_rollout(self, name: str, action: str, weight: float | None = None) -> RolloutReport:
        """See `RolloutControl.update_rollout`."""

    @abstractmethod
    def manage_rollout(
        self, name: str, declaration: Mapping[str, Any], managed_by: ManagedBy
    ) -> ManagedReport:
        """Takes over what the manager of a fleet says of a model's rollout; the model need not be loaded.

        Raises:
            InvalidArgumentError: Declaration or state is wrong.
        """

    @abstractmethod
    def set_label(self, name: str, label: str, version: int | None) -> str:
        """Has a label of a model name a ready version, or removes it with None; returns the identifier.

        Raises:
            InvalidArgumentError: The label is malformed, or has a meaning of its own.
            FailedPreconditionError: A file or the repository declares the labels of this model.
            NotFoundError: There is no such model, version or, where it is to be removed, label.
            UnavailableError: The version is not ready.
        """

    @abstractmethod
    def stop(self) -> None:
        """Changes nothing from now on; requests are divided as they are."""

    @abstractmethod
    def close(self) -> None:
        """Stops, and ends what holds a model; before the models are unloaded."""


def open_rollouts(
    registry: Registry,
    queue: LoadQueue,
    states: VersionStates,
    events: EventLog,
    load: Callable[[str], None],
    source: Callable[[str], ModelSource | None],
    origin: Callable[[str], Origin | None],
    pin: Callable[[str, bool], None],
    saturation: Saturation,
    options: ControlOptions,
) -> Rollouts:
    """Makes the rollouts of one server.

    Args:
        registry: The models that serve.
        queue: The loads of the server.
        states: States of versions.
        events: The server's event log.
        load: Loads a model as it is selected now.
        source: Finds a model in the repositories as they are now.
        origin: Returns what a model was loaded from; None if it is not loaded.
        pin: Keeps a model in memory while True, in on-demand mode.
        saturation: Saturation of versions.
        options: Settings of the control plane.
    """
    made: Rollouts = load_add_on("conch.rollouts", "rollouts")(
        registry, queue, states, events, load, source, origin, pin, saturation, options
    )
    return made

"""An agent without models: it keeps its calls, and answers as the test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from conch.core.errors import NotFoundError
from conch.core.model_control import LoadParameter
from conch.core.rollouts import RolloutReport
from conch_control.agent_api import Index, InstanceStatus, ModelDescription, ModelStatus, VersionStatus
from conch_control.events import EventLog
from conch_control.managed_rollouts import ManagedBy, ManagedReport
from conch_control.version_phase import Phase


class FakeAgent:
    """An `AgentApi` with a real event log.

    Args:
        kept: Most events its log keeps.

    Attributes:
        events: Its log.
        loads: Names of loaded models, with the parameters.
        unloads: Names of unloaded models, with `unload_dependents`.
        drains: Number of drains.
        draining: It was drained.
        labels: Labels of its models.
        reports: Rollouts of its models.
        failures: Make the errors that loads of a model end with, new ones each time: what has been raised
            keeps the frames that it came through.
        staging: Bytes fetched and to fetch of models being staged; the test may change them.
        release: Loads wait for it after they have begun; set from the start.
        loading: Set once a load has begun.
    """

    def __init__(self, kept: int = 100) -> None:
        self.events = EventLog(lambda: 1_700_000_000.5, kept)
        self.loads: list[tuple[str, dict[str, LoadParameter]]] = []
        self.unloads: list[tuple[str, bool]] = []
        self.drains = 0
        self.draining = False
        self.labels: dict[str, dict[str, int]] = {}
        self.reports: dict[str, RolloutReport] = {}
        self.failures: dict[str, Callable[[], Exception]] = {}
        self.staging: dict[str, tuple[int, int]] = {}
        self.release = threading.Event()
        self.release.set()
        self.loading = threading.Event()
        self._phases: dict[str, tuple[Phase, str]] = {"resting": (Phase.UNLOADED, "unloaded")}

    def set(self, name: str, phase: Phase, reason: str = "") -> None:
        """Has a model's version 1 go into a phase."""
        self._phases[name] = phase, reason
        self.events.append(name, 1, phase, reason)

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Goes through the phases of a load, or fails."""
        self.loads.append((name, dict(parameters)))
        if name in self.staging:
            self.set(name, Phase.STAGING)
        self.loading.set()
        self.release.wait()
        if name in self.failures:
            self.set(name, Phase.FAILED, str(self.failures[name]()))
            raise self.failures[name]()
        self.set(name, Phase.LOADING)
        self.set(name, Phase.READY)

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Goes through the phases of an unload."""
        self.unloads.append((name, unload_dependents))
        if name in self._phases:
            self.set(name, Phase.DRAINING)
            self.set(name, Phase.UNLOADED, "unloaded")

    def set_label(self, name: str, label: str, version: int | None) -> None:
        """Sets a label, or removes it."""
        if name not in self._phases:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        labels = self.labels.setdefault(name, {})
        if version is None:
            del labels[label]
        else:
            labels[label] = version

    def rollout(self, name: str) -> RolloutReport:
        """The rollout that the test has given."""
        if name not in self.reports:
            raise NotFoundError(f"model '{name}' has no rollout and no labels")
        return self.reports[name]

    def rollouts(self) -> list[RolloutReport]:
        """All that the test has given."""
        return list(self.reports.values())

    def start_rollout(self, name: str, declaration: Mapping[str, Any], again: bool) -> RolloutReport:
        """Keeps the declaration."""
        self.reports[name] = RolloutReport(name, "api", int(again), "LOADING", declaration=dict(declaration))
        return self.reports[name]

    def manage_rollout(
        self, name: str, declaration: Mapping[str, Any], managed_by: ManagedBy
    ) -> ManagedReport:
        """Keeps the declaration."""
        return ManagedReport(self.start_rollout(name, declaration, False))

    def update_rollout(self, name: str, action: str, weight: float | None = None) -> RolloutReport:
        """Has the action be the state."""
        self.reports[name] = replace(self.rollout(name), state=action, weight=weight or 0.0)
        return self.reports[name]

    def models(self) -> Index:
        """Each model with its one version."""
        revision = self.events.revision
        statuses = tuple(map(self._status, sorted(self._phases)))
        return Index(self.events.epoch, revision, statuses, self.draining)

    def progress(self, names: Collection[str]) -> list[ModelStatus]:
        """The models as they are."""
        return [self._status(name) for name in sorted(names) if name in self._phases]

    def describe(self, name: str) -> ModelDescription:
        """The model, with a config."""
        if name not in self._phases:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        config = json.dumps({"name": name, "max_batch_size": 8, "input": [{"name": "IN", "dims": [-1]}]})
        origins = {"max_batch_size": "config.pbtxt", "input[0].dims": "model"}
        return ModelDescription(
            self._status(name), config, origins, (InstanceStatus(f"{name}_0", "KIND_CPU", -1, 2),)
        )

    def drain(self) -> None:
        """Counts, and tells those who watch."""
        self.drains += 1
        self.draining = True
        self.events.wake()

    def _status(self, name: str) -> ModelStatus:
        phase, reason = self._phases[name]
        done, total = self.staging.get(name, (0, 0)) if phase is Phase.STAGING else (0, 0)
        memory = 3 << 20 if phase is Phase.READY else None
        version = VersionStatus(1, phase, reason, 1_700_000_000.5, memory, done, total)
        return ModelStatus(name, f"/models/{name}", (version,), labels=self.labels.get(name, {}))

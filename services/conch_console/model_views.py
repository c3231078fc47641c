"""Models as JSON for the console's pages: the list, one model, and its history.

Blocking where the agent lists repositories. Threads and locks: any thread; no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conch.core.errors import NotFoundError
from conch.core.model_control import NOT_RESIDENT
from conch.core.registry import Entry, Registry
from conch.core.servable import Servable
from conch.core.spec import TensorSpec
from conch_console.live_feed import event_object
from conch_control.agent_api import AgentApi, ModelStatus
from conch_profiles.profiled_model import profile_of

_MOST_EVENTS = 500


class ModelViews:
    """Reads models from the agent and the registry.

    Args:
        agent: The control plane.
        registry: The models that serve.
    """

    def __init__(self, agent: AgentApi, registry: Registry) -> None:
        self._agent = agent
        self._registry = registry

    def all(self) -> dict[str, Any]:
        """All models, with the epoch and revision from which events go on."""
        index = self._agent.models()
        entries = self._registry.entries
        return {
            "epoch": index.epoch,
            "revision": index.revision,
            "models": [self._model(each, entries.get(each.name, Entry())) for each in index.models],
        }

    def one(self, name: str) -> dict[str, Any]:
        """One model with its tensors. Raises NotFoundError: there is no such model."""
        description = self._agent.describe(name)
        status = description.status
        entry = self._registry.entries.get(status.name, Entry())
        found = self._model(status, entry)
        found["ready"] = {str(version): _signature(model) for version, model in sorted(entry.ready.items())}
        found["groups"] = [
            {"group": each.group, "kind": each.kind, "device": each.device, "count": each.count}
            for each in description.instances
        ]
        found["workers"] = [
            {"state": each.state, "restarts": each.restarts, "pid": each.pid, "reason": each.reason}
            for model in entry.ready.values()
            for each in model.workers
        ]
        found["used_by"] = self._used_by(found["shown"])
        default = entry.default
        steps = () if default is None or default.spec.ensemble is None else default.spec.ensemble.steps
        found["made_of"] = list(dict.fromkeys(step.model_name for step in steps))
        return found

    def history(self, name: str) -> list[dict[str, Any]]:
        """The newest events of a model's versions, oldest first; the rollout has its own."""
        events = [
            each for each in list(self._agent.events.entries) if each.model == name and not each.rollout
        ]
        return [event_object(each) for each in events[-_MOST_EVENTS:]]

    def rollout(self, name: str) -> dict[str, Any]:
        """A model's labels and rollout; empty if it has neither."""
        try:
            return self._agent.rollout(name).as_object()
        except NotFoundError:
            return {}

    def profiles(self, name: str) -> dict[str, Any]:
        """The profiles of the inputs of a model's versions; none of those that are not profiled."""
        entry = self._registry.entries.get(self._agent.describe(name).status.name, Entry())
        return {
            "profiles": [
                {"version": version, **profile.as_object()}
                for version, model in sorted(entry.ready.items())
                if (profile := profile_of(model)) is not None
            ]
        }

    def rollouts(self) -> dict[str, Any]:
        """The rollouts of all models that have one."""
        return {"rollouts": [each.as_object() for each in self._agent.rollouts() if each.rolls]}

    def _used_by(self, name: str) -> list[str]:
        """The ensembles that have a model as a step."""
        return sorted(
            identifier
            for identifier, entry in self._registry.entries.items()
            for model in [entry.default]
            if model is not None and model.spec.ensemble is not None
            if any(step.model_name == name for step in model.spec.ensemble.steps)
        )

    def _model(self, status: ModelStatus, entry: Entry) -> dict[str, Any]:
        default = entry.default
        found: dict[str, Any] = {
            "name": status.name,
            "shown": self._registry.name_of(status.name),
            "location": status.location,
            # A model that waits for its first request has not failed.
            "reason": "" if status.reason == NOT_RESIDENT else status.reason,
            "versions": [
                {
                    "version": each.version,
                    "phase": each.phase.value,
                    "reason": each.reason,
                    "t": each.seconds,
                    "bytes": each.host_bytes,
                    "staged": each.done_bytes,
                    "staging": each.total_bytes,
                    "labels": sorted(
                        label for label, named in status.labels.items() if named == each.version
                    ),
                }
                for each in status.versions
            ],
        }
        if default is not None:
            spec = default.spec
            found |= {
                "backend": spec.backend or spec.platform,
                "ensemble": spec.ensemble is not None,
                "decoupled": spec.decoupled,
                "max_batch": spec.max_batch_size,
                "instances": sum(max(len(group.gpus), 1) * group.count for group in spec.instance_groups),
                "notes": [*default.notes],
            }
        return found


def _signature(model: Servable) -> dict[str, Any]:
    """Inputs and outputs of a version, and its largest batch."""
    spec = model.spec
    config: Mapping[str, Any] = spec.config
    labelled = {
        each.get("name")
        for each in config.get("output", ())
        if isinstance(each, Mapping) and each.get("label_filename")
    }

    def tensor(each: TensorSpec) -> dict[str, Any]:
        return {
            "name": each.name,
            "datatype": each.datatype,
            "shape": list(spec.full_dims(each)),
            "optional": each.optional,
            "labels": each.name in labelled,
        }

    return {
        "inputs": [tensor(each) for each in spec.inputs],
        "outputs": [tensor(each) for each in spec.outputs],
        "max_batch": spec.max_batch_size,
        "decoupled": spec.decoupled,
        "sequence": spec.sequence is not None,
    }

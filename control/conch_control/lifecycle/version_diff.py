"""Actions of a load for each version, and the statuses of the versions after its end. Pure.

`diff_versions` compares the loaded definition with the new one, version by version: keep, resize the
instance pool, or load again. `on_success` and `on_failure` turn the result of a load into state transitions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from conch.core.registry import UNLOADED
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.lifecycle.model_definition import Definition
from conch_control.lifecycle.version_states import FORGOTTEN, UNFINISHED, Change, Statuses
from conch_control.repository.layout import (
    Fingerprint,
    of_all_versions,
    of_version,
    split_markers,
)
from conch_control.version_phase import Phase


@dataclass(frozen=True, slots=True)
class Origin:
    """Source and files of a loaded model or a load; `override` if a load request replaced the config."""

    location: str
    state: Fingerprint
    definition: Definition
    override: bool = False


class VersionAction(Enum):
    """Action of a load for a version that serves and stays selected."""

    KEEP = "keep"
    RESIZE = "resize"
    """Only the instance groups differ; falls back to LOAD where a resize is impossible."""
    LOAD = "load"


def diff_versions(before: Origin, after: Origin, versions: Iterable[int]) -> dict[int, VersionAction]:
    """Chooses the action for versions that serve already.

    An override with the same content loads all versions again; a rewritten config file does not.
    """
    old, new = (split_markers(origin.state)[0] for origin in (before, after))
    config = _of_config(before, after)
    shared = (
        config is VersionAction.LOAD
        # Each load runs its own repository agents, which may have created files.
        or bool(before.definition.agents or after.definition.agents)
        or before.location != after.location
        or of_all_versions(old) != of_all_versions(new)
    )

    def changed(version: int) -> bool:
        return shared or of_version(old, version) != of_version(new, version)

    return {version: VersionAction.LOAD if changed(version) else config for version in versions}


def _of_config(before: Origin, after: Origin) -> VersionAction:
    """The action that follows from the configs alone."""
    old, new = before.definition.config, after.definition.config
    if _rest(old) != _rest(new):
        return VersionAction.LOAD
    if old.instance_group != new.instance_group:
        return VersionAction.RESIZE
    return VersionAction.LOAD if after.override else VersionAction.KEEP


def _rest(config: ModelConfig) -> ModelConfig:
    rest = ModelConfig()
    rest.CopyFrom(config)
    rest.ClearField("instance_group")
    rest.ClearField("version_policy")
    return rest


STALE = "it goes on as it was, as its successor failed to load: "
"""Prefix of the reason of a version that still serves after a newer load failed."""


def clear_stale(statuses: Statuses) -> dict[int, Change]:
    """Clears the reasons of ready versions that a failed newer load had set."""
    return {
        version: Change(Phase.READY, "", status.host_bytes)
        for version, status in statuses.items()
        if status.phase is Phase.READY and status.reason
    }


def on_success(
    statuses: Statuses, ready: Collection[int], loaded: Mapping[int, int | None]
) -> dict[int, Change]:
    """Transitions after all versions of a load were built: `ready` serve from now on, `loaded` are new."""
    changes = {version: change for version, change in clear_stale(statuses).items() if version in ready}
    for version, status in statuses.items():
        if version in ready:
            continue
        if status.phase is Phase.READY:
            changes[version] = Change(Phase.DRAINING)
        elif status.phase is Phase.FAILED:  # no longer selected
            changes[version] = Change(Phase.UNLOADED, FORGOTTEN)
    changes |= {version: Change(Phase.READY, "", taken) for version, taken in loaded.items()}
    return changes


def on_failure(statuses: Statuses, failures: Mapping[int, str]) -> dict[int, Change]:
    """Transitions after some versions of a load failed."""
    changes: dict[int, Change] = {}
    for version, status in statuses.items():
        reason = failures.get(version)
        if status.phase in UNFINISHED:
            changes[version] = (
                Change(Phase.UNLOADED, UNLOADED) if reason is None else Change(Phase.FAILED, reason)
            )
        elif status.phase is Phase.READY and reason is not None:
            changes[version] = Change(Phase.READY, STALE + reason, status.host_bytes)
    return changes

"""What a load has to do with each version: nothing, another number of instances, or load it anew. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.lifecycle.model_definition import Definition
from conch_control.lifecycle.version_phase import Phase
from conch_control.lifecycle.version_states import FORGOTTEN, UNFINISHED, UNLOADED, Change, Statuses
from conch_control.repository.layout import Fingerprint, of_all_versions, of_configs, of_version
from conch_control.repository.markers import split_markers


@dataclass(frozen=True, slots=True)
class Origin:
    """What a model was, or is to be, loaded from.

    Attributes:
        location: Where its source is.
        state: The state of its files.
        definition: Its definition.
        override: Whether the config was given in place of the file's.
    """

    location: str
    state: Fingerprint
    definition: Definition
    override: bool = False


class Treatment(Enum):
    """What to do with a version that serves and is to serve."""

    KEEP = "keep"
    RESIZE = "resize"
    """Its instances change at most in their number; where that can't be, it is loaded."""
    LOAD = "load"


def treat(before: Origin, after: Origin, versions: Iterable[int]) -> dict[int, Treatment]:
    """What to do with versions that serve already.

    A config file that was written again without saying anything new asks for all to be loaded anew, and so
    does a config given in place of the file.

    Args:
        before: What they were loaded from.
        after: What is there now.
        versions: The versions.
    """
    old, new = (split_markers(origin.state)[0] for origin in (before, after))
    config = _of_config(before, after)
    shared = (
        config is Treatment.LOAD
        # Each load has repository agents of its own, and the files that they may have made.
        or bool(before.definition.agents or after.definition.agents)
        or before.location != after.location
        or of_all_versions(old) != of_all_versions(new)
    )

    def changed(version: int) -> bool:
        return shared or of_version(old, version) != of_version(new, version)

    return {version: Treatment.LOAD if changed(version) else config for version in versions}


def _of_config(before: Origin, after: Origin) -> Treatment:
    """What the configs alone ask for."""
    old, new = before.definition.config, after.definition.config
    if _rest(old) != _rest(new):
        return Treatment.LOAD
    if old.instance_group != new.instance_group:
        return Treatment.RESIZE
    if after.override:
        return Treatment.LOAD
    if old.version_policy == new.version_policy and of_configs(before.state) != of_configs(after.state):
        return Treatment.LOAD
    return Treatment.KEEP


def _rest(config: ModelConfig) -> ModelConfig:
    rest = ModelConfig()
    rest.CopyFrom(config)
    rest.ClearField("instance_group")
    rest.ClearField("version_policy")
    return rest


STALE = "it goes on as it was, as its successor failed to load: "
"""How the reason begins of a version that is ready although a newer load has failed."""


def cleared(statuses: Statuses) -> dict[int, Change]:
    """Takes back what was said of versions that serve although their successors had failed."""
    return {
        version: Change(Phase.READY, "", status.host_bytes)
        for version, status in statuses.items()
        if status.phase is Phase.READY and status.reason
    }


def swapped(
    statuses: Statuses, ready: Collection[int], loaded: Mapping[int, int | None]
) -> dict[int, Change]:
    """What changes when all that was asked for has been made.

    Args:
        statuses: What is said of the versions.
        ready: Those that take requests from now on.
        loaded: The new ones among them, with the memory that each has taken.
    """
    changes = {version: change for version, change in cleared(statuses).items() if version in ready}
    for version, status in statuses.items():
        if version in ready:
            continue
        if status.phase is Phase.READY:
            changes[version] = Change(Phase.DRAINING)
        elif status.phase is Phase.FAILED:  # it is no longer wanted
            changes[version] = Change(Phase.UNLOADED, FORGOTTEN)
    changes |= {version: Change(Phase.READY, "", taken) for version, taken in loaded.items()}
    return changes


def failed(statuses: Statuses, failures: Mapping[int, str]) -> dict[int, Change]:
    """What changes when some of what was asked for could not be made.

    Args:
        statuses: What is said of the versions.
        failures: Why, by version.
    """
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

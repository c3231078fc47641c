"""What becomes of a model's versions when a load ends. Pure: from what is said of them to what changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from conch_control.book import FORGOTTEN, UNFINISHED, UNLOADED, Change, Statuses
from conch_control.states import Phase

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

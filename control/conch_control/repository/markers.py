"""Marker files: how whoever copies a model says that it is complete, or that it is not yet.

A file ``.incomplete`` says that the model is being written. A file ``.complete``, written last, says that all
is there: nobody has to wait and see whether anything else changes. Each may be in the model's directory, for
all of it, or in a directory there, such as that of a version. They are no part of the model: they come and
go without changing it.
"""

from __future__ import annotations

from collections.abc import Iterable

from conch.core.errors import ConchError
from conch_control.repository.layout import Fingerprint
from conch_control.repository.source import ModelSource, Scan

COMPLETE = ".complete"
INCOMPLETE = ".incomplete"
_MARKERS = frozenset({COMPLETE, INCOMPLETE})


def split_markers(state: Fingerprint) -> tuple[Fingerprint, Fingerprint]:
    """A fingerprint without the markers, and the part of it that is about markers."""
    markers = tuple(entry for entry in state if _is_marker(entry[0]))
    if not markers:
        return state, ()
    return tuple(entry for entry in state if not _is_marker(entry[0])), markers


def is_incomplete(markers: Fingerprint) -> bool:
    """Whether a marker says that something is still to come."""
    return any(path.endswith(INCOMPLETE) for path, *_ in markers)


def without_incomplete(names: Iterable[str], scan: Scan) -> list[str]:
    """Models but for those that are marked as incomplete."""
    return [name for name in names if name not in scan.models or not _marked(scan.models[name])]


def vouched_for(
    state: Fingerprint, markers: Fingerprint, before: Fingerprint, markers_before: Fingerprint
) -> bool:
    """Whether markers say of everything that has changed that it is complete.

    A marker that was there before says nothing of what has changed since: it has to be written anew.

    Args:
        state: The fingerprint now, without markers.
        markers: The markers now.
        before: The fingerprint to compare with.
        markers_before: The markers then.
    """
    fresh = {
        path.removesuffix(COMPLETE).rstrip("/")
        for path, *_ in set(markers).difference(markers_before)
        if not path.endswith(INCOMPLETE)
    }
    if "" in fresh:
        return True
    changed = {
        path.rpartition("/")[0].partition("/")[0] for path, *_ in set(state).symmetric_difference(before)
    }
    return bool(changed) and changed <= fresh


def _marked(source: ModelSource) -> bool:
    try:
        return is_incomplete(split_markers(source.fingerprint())[1])
    except (ConchError, OSError):
        return False  # whoever loads it will see


def _is_marker(path: str) -> bool:
    directory, _, name = path.rpartition("/")
    return name in _MARKERS and "/" not in directory

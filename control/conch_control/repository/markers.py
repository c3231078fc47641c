"""Marker files, with which a copying tool tells whether a model is complete.

``.incomplete``: the model is being written. ``.complete``, written last: everything is there, and settling
can be skipped. A marker stands in the model's directory, for all of it, or in a subdirectory such as a
version's. Markers are no part of the model: adding or removing one is no change.
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
    """Splits a fingerprint into the model's files and the markers."""
    markers = tuple(entry for entry in state if _is_marker(entry[0]))
    if not markers:
        return state, ()
    return tuple(entry for entry in state if not _is_marker(entry[0])), markers


def is_incomplete(markers: Fingerprint) -> bool:
    """True if a marker says that files are missing."""
    return any(path.endswith(INCOMPLETE) for path, *_ in markers)


def without_incomplete(names: Iterable[str], scan: Scan) -> list[str]:
    """The models that are not marked as incomplete."""
    return [name for name in names if name not in scan.models or not _marked(scan.models[name])]


def marked_complete(
    state: Fingerprint, markers: Fingerprint, before: Fingerprint, markers_before: Fingerprint
) -> bool:
    """True if new markers cover everything that has changed.

    A marker that existed before does not count; it must be rewritten.

    Args:
        state: Fingerprint now, without markers.
        markers: Markers now.
        before: Fingerprint to compare with.
        markers_before: Markers then.
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
        return False  # the load reports the error


def _is_marker(path: str) -> bool:
    directory, _, name = path.rpartition("/")
    return name in _MARKERS and "/" not in directory

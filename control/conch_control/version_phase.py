"""The phases of a model version and the allowed transitions. Pure.

| from     | to                                        | event                                    |
|----------|-------------------------------------------|------------------------------------------|
| (none)   | any                                       | first report of the version              |
| STAGING  | LOADING, FAILED, UNLOADED                 | files are local; failed; superseded      |
| LOADING  | WARMING, READY, FAILED, UNLOADED          | instances exist; failed; superseded      |
| WARMING  | READY, FAILED, UNLOADED                   | warm-up is done; failed; superseded      |
| READY    | READY, DRAINING                           | replaced by a new copy; unloaded         |
| DRAINING | UNLOADED, STAGING, LOADING, READY, FAILED | last request done; loaded again meanwhile|
| UNLOADED | STAGING, LOADING                          | loaded again                             |
| FAILED   | STAGING, LOADING, UNLOADED                | retried; no longer selected              |

Triton's repository index has fewer states; `Phase.index_state` maps to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Phase(Enum):
    """Phase of a model version."""

    STAGING = "STAGING"
    """Files are being fetched."""
    LOADING = "LOADING"
    """The backend creates the instances."""
    WARMING = "WARMING"
    """Warm-up samples run."""
    READY = "READY"
    """Accepts requests."""
    DRAINING = "DRAINING"
    """Accepts no new requests; finishes the ones in flight."""
    UNLOADED = "UNLOADED"
    """Not loaded, with no resources left."""
    FAILED = "FAILED"
    """Loading failed; the reason has the error."""

    @property
    def index_state(self) -> str:
        """State in Triton's repository index."""
        return _INDEX_STATES[self]

    def may_become(self, after: Phase) -> bool:
        """True if the transition is allowed."""
        return after in _FOLLOWING[self]


_INDEX_STATES: Mapping[Phase, str] = {
    Phase.STAGING: "LOADING",
    Phase.LOADING: "LOADING",
    Phase.WARMING: "LOADING",
    Phase.READY: "READY",
    Phase.DRAINING: "UNLOADING",
    Phase.UNLOADED: "UNAVAILABLE",
    Phase.FAILED: "UNAVAILABLE",
}
_ENDS = frozenset({Phase.FAILED, Phase.UNLOADED})
_FOLLOWING: Mapping[Phase, frozenset[Phase]] = {
    Phase.STAGING: _ENDS | {Phase.LOADING},
    Phase.LOADING: _ENDS | {Phase.WARMING, Phase.READY},
    Phase.WARMING: _ENDS | {Phase.READY},
    # A hot swap replaces a ready version by a new copy.
    Phase.READY: frozenset({Phase.READY, Phase.DRAINING}),
    # A new load may start before the last request finishes.
    Phase.DRAINING: frozenset({Phase.UNLOADED, Phase.STAGING, Phase.LOADING, Phase.READY, Phase.FAILED}),
    Phase.UNLOADED: frozenset({Phase.STAGING, Phase.LOADING}),
    Phase.FAILED: frozenset({Phase.STAGING, Phase.LOADING, Phase.UNLOADED}),
}

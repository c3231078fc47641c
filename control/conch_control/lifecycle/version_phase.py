"""The life of a model version: its phases, and which may follow which.

``STAGING -> LOADING -> WARMING -> READY -> DRAINING -> UNLOADED``; any phase before ``READY`` may end in
``FAILED``, or in ``UNLOADED`` where the load was given up. The repository index of Triton's protocol has
fewer states; `Phase.index_state` is the one that a phase shows there.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Phase(Enum):
    """Where a model version is in its life."""

    STAGING = "STAGING"
    """Its files are being fetched."""
    LOADING = "LOADING"
    """Its backend and its instances are being made."""
    WARMING = "WARMING"
    """Its warm-up samples are being run."""
    READY = "READY"
    """It takes requests."""
    DRAINING = "DRAINING"
    """It takes no new requests, and finishes those it has."""
    UNLOADED = "UNLOADED"
    """Nothing is left of it, or there never was."""
    FAILED = "FAILED"
    """It could not be loaded; the reason says why."""

    @property
    def index_state(self) -> str:
        """The state in the repository index of Triton's protocol."""
        return _INDEX_STATES[self]

    def may_become(self, after: Phase) -> bool:
        """Whether another phase may follow this one."""
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
    # A version that serves is replaced by one that was made beside it: it stays ready.
    Phase.READY: frozenset({Phase.READY, Phase.DRAINING}),
    # It may be wanted again before its last request has finished.
    Phase.DRAINING: frozenset({Phase.UNLOADED, Phase.STAGING, Phase.LOADING, Phase.READY, Phase.FAILED}),
    Phase.UNLOADED: frozenset({Phase.STAGING, Phase.LOADING}),
    Phase.FAILED: frozenset({Phase.STAGING, Phase.LOADING, Phase.UNLOADED}),
}

"""Metrics of the access policy: refused calls, calls of each principal, reloads. Used by `MetricsPort`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conch.observability.metrics.sample_text import Family, sample

_REFUSED = Family("conch_access_refused_total", "counter", "Calls that the access policy refused, by reason")
_REQUESTS = Family(
    "conch_principal_requests_total", "counter", "Calls that the access policy admitted, by principal"
)
_RELOADS = Family("conch_access_reloads_total", "counter", "Reloads of a changed access policy, by result")
_FETCHES = Family(
    "conch_access_key_fetches_total", "counter", "Fetches of keys that sign tokens from a URL, by result"
)


@dataclass(frozen=True, slots=True)
class AccessCounts:
    """What an access policy has counted.

    Attributes:
        refused: Refused calls by reason: ``unauthenticated``, ``forbidden`` or ``limited``.
        requests: Admitted calls by principal.
        reloads: Reloads by result: ``ok`` or ``failed``.
        fetches: Fetches of signing keys by result, as `reloads`.
    """

    refused: Mapping[str, int]
    requests: Mapping[str, int]
    reloads: Mapping[str, int]
    fetches: Mapping[str, int]


class AccessMetrics:
    """Reads the counts of an access policy."""

    def __init__(self, counts: Callable[[], AccessCounts]) -> None:
        self._counts = counts

    def __call__(self) -> list[tuple[Family, list[str]]]:
        """The families with their samples."""
        counts = self._counts()
        return [
            (_REFUSED, _samples(_REFUSED, "reason", counts.refused)),
            (_REQUESTS, _samples(_REQUESTS, "principal", counts.requests)),
            (_RELOADS, _samples(_RELOADS, "result", counts.reloads)),
            (_FETCHES, _samples(_FETCHES, "result", counts.fetches)),
        ]


def _samples(family: Family, label: str, counts: Mapping[str, int]) -> list[str]:
    return [sample(family.name, count, {label: name}) for name, count in sorted(counts.items())]

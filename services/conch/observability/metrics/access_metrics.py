"""Metrics of the access policy: refused calls, calls of each principal, reloads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conch.observability.metrics.metric_families import Family, counted

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
    """Counts of an access policy.

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


def access_families(counts: AccessCounts) -> list[tuple[Family, list[str]]]:
    """The families of an access policy with their samples."""
    return [
        (_REFUSED, counted(_REFUSED, "reason", counts.refused)),
        (_REQUESTS, counted(_REQUESTS, "principal", counts.requests)),
        (_RELOADS, counted(_RELOADS, "result", counts.reloads)),
        (_FETCHES, counted(_FETCHES, "result", counts.fetches)),
    ]

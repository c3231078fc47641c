"""Restricted APIs: categories of routes that need a secret in a request's headers.

Source: Triton's ``--http-restricted-api=<api,api>:<key>=<value>``; a request must carry the header ``<key>``
with that value.
"""

from __future__ import annotations

from conch.frontends.http.routing import Restrictions
from conch.frontends.restrictions import parse_groups

CATEGORIES = frozenset(
    (
        "health",
        "metadata",
        "inference",
        "shared-memory",
        "model-config",
        "model-repository",
        "statistics",
        "trace",
        "logging",
    )
)


def parse_restrictions(specifications: list[str]) -> Restrictions:
    """Reads ``<api,api>:<key>=<value>`` specifications.

    Raises:
        ValueError: One is malformed, or names an unknown API or one that has been named before.
    """
    groups = parse_groups(specifications, CATEGORIES, "api")
    return {name: (key.lower(), value) for name, (key, value) in groups.items()}

"""Restricted APIs: categories of routes that need a secret in a request's headers.

Source: Triton's ``--http-restricted-api=<api,api>:<key>=<value>``; a request must carry the header ``<key>``
with that value.
"""

from __future__ import annotations

from conch.frontends.http.routing import Restrictions

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
    restrictions: dict[str, tuple[str, str]] = {}
    for specification in specifications:
        names, colon, secret = specification.partition(":")
        key, equals, value = secret.partition("=")
        if not (names and colon and key and equals):
            raise ValueError(f"'{specification}' is not of the form '<API>,<API>:<key>=<value>'")
        for name in names.split(","):
            if name not in CATEGORIES:
                raise ValueError(f"unknown restricted api '{name}'")
            if name in restrictions:
                raise ValueError(f"restricted api '{name}' can not be specified in multiple config groups")
            restrictions[name] = (key.lower(), value)
    return restrictions

"""Restricted protocols and APIs: groups of calls that need a secret, as flags say it."""

from __future__ import annotations

from collections.abc import Collection


def parse_groups(specifications: list[str], known: Collection[str], what: str) -> dict[str, tuple[str, str]]:
    """Reads ``<group,group>:<key>=<value>`` specifications.

    Args:
        specifications: They.
        known: The groups there are.
        what: What the groups are called: ``protocol`` or ``api``.

    Returns:
        Group name to (key, value).

    Raises:
        ValueError: One is malformed, or names an unknown group or one that has been named before.
    """
    restrictions: dict[str, tuple[str, str]] = {}
    for specification in specifications:
        groups, colon, secret = specification.partition(":")
        key, equals, value = secret.partition("=")
        if not (groups and colon and key and equals):
            raise ValueError(f"'{specification}' is not of the form '<{what}>,<{what}>:<key>=<value>'")
        for group in groups.split(","):
            if group not in known:
                raise ValueError(f"unknown restricted {what} '{group}'")
            if group in restrictions:
                raise ValueError(
                    f"restricted {what} '{group}' can not be specified in multiple config groups"
                )
            restrictions[group] = (key, value)
    return restrictions

"""Whether a version of Python is one that a ``requires-python`` allows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_CLAUSE = re.compile(r"(~=|==|!=|<=|>=|<|>)\s*(\d+(?:\.\d+)*)(\.\*)?")

Version = tuple[int, ...]

_COMPARISONS: Mapping[str, Callable[[Version, Version], bool]] = {
    "<=": lambda version, other: version <= other,
    ">=": lambda version, other: version >= other,
    "<": lambda version, other: version < other,
    ">": lambda version, other: version > other,
}


def allows(specifier: str, version: Version) -> bool:
    """Whether all clauses of a specifier hold for a version.

    Args:
        specifier: Such as ``>=3.10,<3.13`` or ``==3.12.*``; empty for any version.
        version: Three numbers.

    Raises:
        ValueError: A clause is none; those of pre-releases are not known.
    """
    return all(_holds(clause.strip(), version) for clause in specifier.split(",") if clause.strip())


def _holds(clause: str, version: Version) -> bool:
    match = _CLAUSE.fullmatch(clause)
    if match is None:
        raise ValueError(clause)
    operator, digits, wildcard = match.groups()
    parts = tuple(int(part) for part in digits.split("."))
    if wildcard is not None and operator not in ("==", "!="):
        raise ValueError(clause)
    if operator == "~=":
        if len(parts) < 2:
            raise ValueError(clause)
        return version >= _padded(parts) and version[: len(parts) - 1] == parts[:-1]
    if operator in ("==", "!="):
        same = version[: len(parts)] == parts if wildcard is not None else version == _padded(parts)
        return same == (operator == "==")
    return _COMPARISONS[operator](version, _padded(parts))


def _padded(parts: Version) -> Version:
    return (*parts, 0, 0, 0)[: max(3, len(parts))]

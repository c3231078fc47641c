"""Paths with symbolic links: where they lead, and which entries of which directories they hang on."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

_MOST_LINKS = 40  # as many as the kernel follows


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a path leads to.

    Attributes:
        path: The path without links; where something is missing, the path that would be.
        hinges: Directory and name of each link on the way, and of the first thing that is missing: when one
            of them changes, the path may lead elsewhere.
    """

    path: str
    hinges: tuple[tuple[str, str], ...]


def resolve(path: str) -> Resolved:
    """Follows an absolute path."""
    hinges: list[tuple[str, str]] = []
    missing = False
    real = "/"
    left = path.split("/")[::-1]
    while left:
        name = left.pop()
        if name in ("", "."):
            continue
        if name == "..":
            real = os.path.dirname(real)
            continue
        here = os.path.join(real, name)
        try:
            target = os.readlink(here)
        except OSError as error:
            if error.errno != errno.EINVAL and not missing:  # EINVAL is what is no link
                missing = True
                hinges.append((real, name))
            real = here
            continue
        hinges.append((real, name))
        if len(hinges) > _MOST_LINKS:
            return Resolved(here, tuple(hinges))
        if target.startswith("/"):
            real = "/"
        left += target.split("/")[::-1]
    return Resolved(real, tuple(hinges))

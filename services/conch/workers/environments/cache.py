"""Environments that were unpacked or built, kept on disk for the next load and the next server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conch.core.errors import InvalidArgumentError

DIRECTORY = "environment-cache"
LIMIT = "environment-cache-mb"
_DEFAULT_MB = 10 * 1024


@dataclass(frozen=True, slots=True)
class EnvironmentCache:
    """A directory of environments.

    Attributes:
        directory: Where they are; made when the first one is.
        limit_mb: How much of them is kept when a new one comes, in MiB; what is in use stays in any case.
    """

    directory: Path
    limit_mb: int = _DEFAULT_MB

    @classmethod
    def of(cls, options: Mapping[str, str]) -> EnvironmentCache:
        """The cache that the options of the backend say, else the one in the user's cache directory.

        Raises:
            InvalidArgumentError: An option can't be used.
        """
        given = options.get(DIRECTORY)
        if given is not None and not given:
            raise InvalidArgumentError(f"--backend-config=python,{DIRECTORY} must name a directory")
        limit = options.get(LIMIT, str(_DEFAULT_MB))
        if not limit.isdecimal():
            raise InvalidArgumentError(
                f"--backend-config=python,{LIMIT} must be a whole number of MiB, not '{limit}'"
            )
        return cls(Path(given or _user_cache()).absolute(), int(limit))


def _user_cache() -> str:
    # As the XDG base directory specification has it: a relative path there is to be ignored.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "conch", "environments")

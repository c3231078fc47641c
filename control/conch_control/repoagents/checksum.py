"""The agent that loads a model only if its files are what its config says they are.

The keys of its parameters are ``MD5:<path>`` and ``SHA256:<path>``, the values hexadecimal digests; paths are
relative to the model's directory. Texts are Triton's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch_control.config.paths import stays_within
from conch_control.repoagents.base import RepositoryHook

_ALGORITHMS: Mapping[str, Callable[[], Any]] = {
    "MD5": lambda: hashlib.md5(usedforsecurity=False),
    "SHA256": hashlib.sha256,
}


class Checksum(RepositoryHook):
    """Compares digests when a model is loaded."""

    def load(self, directory: Path) -> Path:
        """Checks all files.

        Raises:
            InvalidArgumentError: A file is another one, or can't be read, or a parameter makes no sense.
            UnsupportedError: A digest is of another kind.
        """
        for key, expected in self.context.parameters.items():
            name, colon, path = key.partition(":")
            if not colon:
                raise InvalidArgumentError(f"failed to parse key: {key}")
            algorithm = _ALGORITHMS.get(name.upper())
            if algorithm is None:
                raise UnsupportedError(f"Unsupported checksum algorithm: {name}")
            if not stays_within(directory, path):
                raise InvalidArgumentError(
                    f"failed to open text file for read {path}: the file must be in the model's directory"
                )
            got = _digest(directory / path, path, algorithm)
            if got != expected.lower():
                raise InvalidArgumentError(
                    f"Mismatched {name.upper()} hash for file {path}, expect: {expected}, got: {got}"
                )
        return directory


def _digest(file: Path, path: str, algorithm: Callable[[], Any]) -> str:
    try:
        with file.open("rb") as content:
            return str(hashlib.file_digest(content, algorithm).hexdigest())  # reads in pieces
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidArgumentError(f"failed to open text file for read {path}: {reason}") from None

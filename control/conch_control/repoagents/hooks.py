"""The base class of repository agents, and the built-in agent ``checksum``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch_control.repository.layout import stays_within


@dataclass(frozen=True, slots=True)
class ModelContext:
    """The model an agent works on.

    Attributes:
        model: Model name.
        config: The model's config as written, in JSON form.
        parameters: The agent's parameters from that config.
    """

    model: str
    config: Mapping[str, Any]
    parameters: Mapping[str, str]


class RepositoryHook:
    """A repository agent for one load of one model. Subclasses override what they need.

    `load` is followed by `load_complete` or `load_failed`; after `load_complete`, an unload or a later
    load (with an agent object of its own) calls `unload` and `unload_complete`. Calls never overlap.

    Args:
        context: The model.

    Attributes:
        context: The model.
    """

    def __init__(self, context: ModelContext) -> None:
        self.context = context

    def load(self, directory: Path) -> Path:
        """Called before anything of the model is loaded.

        Args:
            directory: The model's directory as the previous agent left it; read-only.

        Returns:
            The directory to load the model from: the same, or another local one with config and versions,
            which must
            exist until `load_failed` or `unload_complete`.

        Raises:
            Exception: The model must not be loaded; the text has the reason. `load_failed` is not called
                then.
        """
        return directory

    def load_complete(self) -> None:
        """Called when the model is ready."""

    def load_failed(self) -> None:
        """Called when the load failed after `load` succeeded."""

    def unload(self) -> None:
        """Called when the model accepts no more requests."""

    def unload_complete(self) -> None:
        """Called when all resources of the model are released."""


_ALGORITHMS: Mapping[str, Callable[[], Any]] = {
    "MD5": lambda: hashlib.md5(usedforsecurity=False),
    "SHA256": hashlib.sha256,
}


class Checksum(RepositoryHook):
    """Loads a model only if its files have the digests in its config.

    Parameters are ``MD5:<path>`` and ``SHA256:<path>`` with hexadecimal digests; paths are relative to the
    model's directory. Texts are Triton's.
    """

    def load(self, directory: Path) -> Path:
        """Checks all files.

        Raises:
            InvalidArgumentError: A digest differs, a file can't be read, or a parameter is malformed.
            UnsupportedError: The digest algorithm is unknown.
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
            return str(hashlib.file_digest(content, algorithm).hexdigest())  # reads in chunks
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidArgumentError(f"failed to open text file for read {path}: {reason}") from None

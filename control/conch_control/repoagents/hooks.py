"""What a repository agent is: a class whose objects accompany one load of one model each."""

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
    """What an agent is told of the model it is for.

    Attributes:
        model: Model name.
        config: The model's config as its repository has it, in JSON form.
        parameters: The agent's parameters in that config.
    """

    model: str
    config: Mapping[str, Any]
    parameters: Mapping[str, str]


class RepositoryHook:
    """A repository agent at work on one load of a model; agents override what they need.

    `load` is followed by `load_complete` or `load_failed`, and `load_complete`, when the model is unloaded or
    replaced by a later load (which gets an object of its own), by `unload` and `unload_complete`. One of them
    is called at a time.

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
            directory: The model's directory, as the agent before this one has left it; not to be written to.

        Returns:
            The directory to load the model from: the same, or another one on this machine, with config and
            versions, which must be there until `load_failed` or `unload_complete`.

        Raises:
            Exception: The model must not be loaded; the text says why. `load_failed` is not called then.
        """
        return directory

    def load_complete(self) -> None:
        """Called when the model serves."""

    def load_failed(self) -> None:
        """Called when the model could not be loaded, after `load` has succeeded."""

    def unload(self) -> None:
        """Called when the model takes no more requests."""

    def unload_complete(self) -> None:
        """Called when nothing of the model is left."""


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

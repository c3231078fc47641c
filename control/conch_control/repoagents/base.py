"""What a repository agent is: a class whose objects accompany one load of one model each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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

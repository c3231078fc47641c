"""The default model of a platform's port."""

from __future__ import annotations

from conch.core.errors import InvalidArgumentError
from conch.door.door import Door


def only_model(door: Door) -> str:
    """The name of the only loaded model.

    Raises:
        InvalidArgumentError: There are none, or several; the text is Triton's.
    """
    names = {model.spec.name for entry in door.models.entries.values() for model in entry.ready.values()}
    if len(names) != 1:
        raise InvalidArgumentError(
            "Expect the model repository contains only a single model if default model is not specified"
        )
    return names.pop()


def check_loaded(door: Door, model: str) -> None:
    """Checks that a model is loaded. Raises InvalidArgumentError: it is not; the text is Triton's."""
    if not any(door.models.entries[each].ready for each in door.models.identifiers(model)):
        raise InvalidArgumentError(f"Expect the default model '{model}' is loaded")

"""The default model of a platform's port."""

from __future__ import annotations

from conch.core.errors import InvalidArgumentError
from conch.core.server_state import ServerState


def only_model(core: ServerState) -> str:
    """The name of the only loaded model.

    Raises:
        InvalidArgumentError: There are none, or several; the text is Triton's.
    """
    names = {model.spec.name for entry in core.registry.entries.values() for model in entry.ready.values()}
    if len(names) != 1:
        raise InvalidArgumentError(
            "Expect the model repository contains only a single model if default model is not specified"
        )
    return names.pop()


def check_loaded(core: ServerState, model: str) -> None:
    """Checks that a model is loaded. Raises InvalidArgumentError: it is not; the text is Triton's."""
    if not any(core.registry.entries[each].ready for each in core.registry.identifiers(model)):
        raise InvalidArgumentError(f"Expect the default model '{model}' is loaded")

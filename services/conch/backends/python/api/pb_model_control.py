"""Model management for models: load, unload and readiness of other models. Used by: `pb_utils`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from conch.backends.python.api.pb_errors import TritonModelException
from conch.backends.python.calls.call_context import current_call_context, loading
from conch.core.errors import ConchError
from conch.core.model_control import LoadParameter


def load_model(model_name: str, config: str | None = "", files: Mapping[str, bytes] | None = None) -> None:
    """Loads or reloads a model; returns when it is ready.

    Args:
        model_name: Its name.
        config: A config in JSON that replaces the file's.
        files: Files that replace the repository's: contents by path, as in ``file:1/model.onnx``.

    Raises:
        TritonModelException: It cannot be loaded; the version that served before still does.
        TypeError: The config is not text, or a file is not bytes.
    """
    parameters: dict[str, LoadParameter] = {}
    if config:
        if not isinstance(config, str):
            raise TypeError(f"config must be a string, not {type(config)}")
        parameters["config"] = config
    for path, content in (files or {}).items():
        if not isinstance(content, bytes):
            raise TypeError(f"Object of type '{type(content).__name__}' is not an instance of 'bytes'")
        parameters[path] = content
    caller = current_call_context()
    with _failing("Failed to load model", caller.name), loading(caller, model_name, TritonModelException):
        caller.server.load(model_name, parameters)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unloads a model; its requests finish in the background.

    Args:
        model_name: Its name; no error if it is not loaded.
        unload_dependents: Whether to unload the models that were loaded for it, too.

    Raises:
        TritonModelException: Unloading is not allowed.
    """
    caller = current_call_context()
    with _failing("Failed to unload model", caller.name):
        caller.server.unload(model_name, bool(unload_dependents))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Returns whether a model is ready.

    Args:
        model_name: Its name.
        model_version: Its version; empty for the newest.

    Raises:
        TritonModelException: The version is not a number.
    """
    caller = current_call_context()
    with _failing("Failed to check model readiness", caller.name):
        return any(caller.server.model_ready(name, model_version) for name in caller.names(model_name))


@contextmanager
def _failing(what: str, name: str) -> Iterator[None]:
    try:
        yield
    except ConchError as error:
        raise TritonModelException(
            f"{what}: Failed to process the request for model '{name}', message: {error.message}"
        ) from None

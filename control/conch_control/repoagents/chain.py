"""Runs the repository agents of one load: in order for ``load`` and ``unload``, in reverse for completion.

Locks: a chain holds its lock while hooks run, so that they never overlap. Used by: `model_definition`,
`model_lifecycle`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from conch.core.errors import ConchError, InternalError, InvalidArgumentError, as_conch_error
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.json_format import to_json
from conch_control.repoagents.hooks import Checksum, ModelContext, RepositoryHook

log = logging.getLogger(__name__)

GROUP = "conch.repoagents"
"""Entry-point group; each entry names an agent and points to its `RepositoryHook` class."""

HookClass = Callable[[ModelContext], RepositoryHook]
FindHook = Callable[[str], HookClass]

# Needs no entry point, and other packages can't replace it.
BUILT_IN: dict[str, HookClass] = {"checksum": Checksum}


def is_built_in(name: str) -> bool:
    """True if an agent comes with conch."""
    return name in BUILT_IN


def agent_names() -> list[str]:
    """Names of the available agents, ascending."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def find_hook(name: str) -> HookClass:
    """Finds an agent by name.

    Raises:
        InvalidArgumentError: There is none, or a package it needs is not installed.
    """
    built_in = BUILT_IN.get(name)
    if built_in is not None:
        return built_in
    found = entry_points(group=GROUP, name=name)
    if not found:
        names = ", ".join(agent_names())
        raise InvalidArgumentError(f"unable to find repository agent '{name}'; there are: {names}")
    try:
        hook: HookClass = next(iter(found)).load()
    except ImportError as error:
        raise InvalidArgumentError(f"repository agent '{name}' can't be imported: {error}") from error
    return hook


class AgentChain:
    """The agents of one load of a model.

    Each hook runs at most once and only in the order load, complete or failed, unload, unload complete.
    Errors after the load are logged.
    """

    def __init__(self, model: str = "", hooks: Sequence[tuple[str, RepositoryHook]] = ()) -> None:
        self._model = model
        self._hooks = hooks
        self._lock = threading.RLock()  # held while hooks run
        self._loaded: list[tuple[str, RepositoryHook]] = []  # agents whose load hook has succeeded
        self._next: list[str] = []  # steps still allowed

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def load(self, directory: Path) -> Path:
        """Runs the ``load`` hooks; returns the directory to load the model from.

        Raises:
            ConchError: An agent refuses; the ones before it have been notified.
        """
        self._next = ["completed"]
        for name, hook in self._hooks:
            try:
                directory = Path(hook.load(directory))
                if not directory.is_dir():
                    raise InternalError(
                        f"repository agent '{name}' has model '{self._model}' loaded from '{directory}', "
                        f"which is not a directory"
                    )
            except BaseException as error:
                self.completed(False)
                if not isinstance(error, ConchError):
                    log.exception("repository agent '%s' failed for model '%s'", name, self._model)
                raise as_conch_error(error) from error
            self._loaded.append((name, hook))
        return directory

    def completed(self, ok: bool) -> None:
        """Notifies the agents of the result, in reverse order.

        Args:
            ok: True if the model serves.
        """
        with self._lock:
            if self._take("completed"):
                self._call("load_complete" if ok else "load_failed", self._loaded[::-1])
                self._next = ["unload", "unloaded"] if ok else []

    def unload(self) -> None:
        """Notifies the agents that the model accepts no more requests."""
        with self._lock:
            if self._take("unload"):
                self._call("unload", self._loaded)

    def unloaded(self) -> None:
        """Notifies the agents, in reverse order, that the model is gone."""
        with self._lock:
            self.unload()
            if self._take("unloaded"):
                self._call("unload_complete", self._loaded[::-1])

    def _take(self, step: str) -> bool:
        if step not in self._next:
            return False
        self._next.remove(step)
        return True

    def _call(self, method: str, hooks: Sequence[tuple[str, RepositoryHook]]) -> None:
        for name, hook in hooks:
            try:
                getattr(hook, method)()
            except Exception:
                log.exception("repository agent '%s': %s failed for model '%s'", name, method, self._model)


def make_chain(config: ModelConfig, model: str, find: FindHook = find_hook) -> AgentChain:
    """Creates the agents that a config names.

    Raises:
        ConchError: An agent is unknown or can't be created.
    """
    hooks: list[tuple[str, RepositoryHook]] = []
    for agent in config.model_repository_agents.agents:
        make = find(agent.name)
        try:
            hook = make(ModelContext(model, to_json(config), dict(agent.parameters)))
        except Exception as error:
            log.exception("repository agent '%s' could not be made for model '%s'", agent.name, model)
            raise as_conch_error(error) from error
        hooks.append((agent.name, hook))
    return AgentChain(model, hooks)

"""Repository agents: hooks named in a model's config that run when the model is loaded and unloaded.

`RepositoryHook` is their base class, also for other packages; `Checksum` is the built-in agent. `AgentChain`
runs the agents of one load: in order for ``load`` and ``unload``, in reverse for the other hooks.

Threads and locks: hooks of a chain never overlap. `AgentChain.load` runs before other threads have the chain,
without its lock; the other hooks may be due on several threads, and run with the lock held.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conch.core.add_ons import entry_points
from conch.core.errors import (
    ConchError,
    InternalError,
    InvalidArgumentError,
    UnsupportedError,
    as_conch_error,
)
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.json_format import to_json
from conch_control.config.named_files import stays_within

log = logging.getLogger(__name__)


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
    """

    def __init__(self, context: ModelContext) -> None:
        self.context = context

    def load(self, directory: Path) -> Path:
        """Called before anything of the model is loaded.

        Args:
            directory: The model's directory as the previous agent left it; read-only.

        Returns:
            The directory to load the model from: the same, or another local one with config and versions,
            which must exist until `load_failed` or `unload_complete`.

        Raises:
            Exception: The model must not be loaded; the text has the reason. `load_failed` is not called
                then.
        """
        return directory

    def load_complete(self) -> None:
        """Called when the model is ready."""

    def load_failed(self) -> None:
        """Called when the load failed after `load` succeeded and gave a directory that exists."""

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


_FOLLOWING: Mapping[str, Sequence[str]] = {
    "load": ("load_complete", "load_failed"),
    "load_complete": ("unload",),
    "load_failed": (),
    "unload": ("unload_complete",),
    "unload_complete": (),
}
"""Hooks that may run after each hook."""


class AgentChain:
    """The agents of one load of a model.

    `load` is called first, once. The other hooks run at most once each and only in the order of `_FOLLOWING`;
    a call out of order is ignored. Errors after the load are logged.
    """

    def __init__(self, model: str = "", hooks: Sequence[tuple[str, RepositoryHook]] = ()) -> None:
        self._model = model
        self._hooks = hooks
        # Held while hooks other than `load` run; reentrant, as these are others' code.
        self._lock = threading.RLock()
        self._loaded: list[tuple[str, RepositoryHook]] = []  # agents whose load hook has succeeded
        self._next: Sequence[str] = ()  # the hooks that may run now

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def load(self, directory: Path) -> Path:
        """Runs the ``load`` hooks; returns the directory to load the model from.

        Raises:
            ConchError: An agent refuses; the ones before it have been notified.
        """
        self._next = _FOLLOWING["load"]
        for name, hook in self._hooks:
            try:
                directory = Path(hook.load(directory))
                if not directory.is_dir():
                    raise InternalError(
                        f"repository agent '{name}' has model '{self._model}' loaded from '{directory}', "
                        f"which is not a directory"
                    )
            except BaseException as error:  # boundary: the agent's code
                self.load_failed()
                if not isinstance(error, ConchError):
                    log.exception("repository agent '%s' failed for model '%s'", name, self._model)
                raise as_conch_error(error) from error
            self._loaded.append((name, hook))
        return directory

    def load_complete(self) -> None:
        """Notifies the agents, in reverse order, that the model is ready."""
        with self._lock:
            self._run("load_complete", self._loaded[::-1])

    def load_failed(self) -> None:
        """Notifies the agents, in reverse order, that the load failed."""
        with self._lock:
            self._run("load_failed", self._loaded[::-1])

    def unload(self) -> None:
        """Notifies the agents that the model accepts no more requests."""
        with self._lock:
            self._run("unload", self._loaded)

    def unload_complete(self) -> None:
        """Notifies the agents, in reverse order, that the model is gone; before, if due, runs `unload`."""
        with self._lock:
            self._run("unload", self._loaded)
            self._run("unload_complete", self._loaded[::-1])

    def _run(self, method: str, hooks: Sequence[tuple[str, RepositoryHook]]) -> None:
        if method not in self._next:
            return
        self._next = ()  # while the hooks run
        for name, hook in hooks:
            try:
                getattr(hook, method)()
            except Exception:  # boundary: the agent's code
                log.exception("repository agent '%s': %s failed for model '%s'", name, method, self._model)
        self._next = _FOLLOWING[method]


def make_chain(config: ModelConfig, model: str, find: FindHook = find_hook) -> AgentChain:
    """Creates the agents that a config names. Raises ConchError: an agent is unknown or can't be created."""
    hooks: list[tuple[str, RepositoryHook]] = []
    for agent in config.model_repository_agents.agents:
        make = find(agent.name)
        try:
            hook = make(ModelContext(model, to_json(config), dict(agent.parameters)))
        except Exception as error:  # boundary: the agent's code
            log.exception("repository agent '%s' could not be made for model '%s'", agent.name, model)
            raise as_conch_error(error) from error
        hooks.append((agent.name, hook))
    return AgentChain(model, hooks)

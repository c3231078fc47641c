"""The repository as front ends see it: what there is, loading and unloading, readiness."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from conch.core.cache.service import CacheService
from conch.core.clock import wall_seconds
from conch.core.errors import (
    ConchError,
    InvalidArgumentError,
    UnsupportedError,
    as_conch_error,
)
from conch.core.registry import Entry, Registry, VersionState
from conch.core.server_core import IndexEntry, LoadParameter
from conch_control.composition import Composition, LoadOne
from conch_control.definition import PollError
from conch_control.ensemble_loader import EnsembleError
from conch_control.events import EventLog
from conch_control.lifecycle import UNLOADED, Lifecycle
from conch_control.loader import GetBackend, Loader
from conch_control.options import WILDCARD, ControlOptions
from conch_control.port import Index, ModelStatus, VersionStatus
from conch_control.readiness import as_wanted
from conch_control.repository.local import LocalRepository
from conch_control.repository.repositories import Repositories
from conch_control.repository.source import Scan
from conch_control.states import Phase

log = logging.getLogger(__name__)

_DUPLICATE = "model appears in two or more repositories"
_PARAMETER_TYPES = {bool: "BOOL", int: "INT", str: "STRING", bytes: "BYTES"}


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A model that could not be loaded at the start.

    Attributes:
        name: Model name.
        error: Why; its text is for clients.
    """

    name: str
    error: ConchError

    @property
    def reason(self) -> str:
        """Why, for operators."""
        if isinstance(self.error, PollError | EnsembleError):
            return self.error.reason
        return self.error.message

    def __str__(self) -> str:
        return f"failed to load '{self.name}': {self.reason}"


class Agent:
    """Carries out what planners, operators and clients ask for; `AgentPort` and `RepositoryAgent` in one.

    Args:
        options: Settings of the control plane.
        registry: Where models are published.
        get_backend: Finds a backend by name.
        cache: The response cache for models that want one; None for none.

    Raises:
        InvalidArgumentError: The options contradict each other.
    """

    def __init__(
        self,
        options: ControlOptions,
        registry: Registry,
        get_backend: GetBackend,
        cache: CacheService | None = None,
    ) -> None:
        _check_options(options)
        self._registry = registry
        self._options = options
        self._repositories = Repositories(map(LocalRepository, options.repositories))
        self._lifecycle = Lifecycle(options, registry, Loader(options, get_backend, registry, cache))
        self._composition = Composition(options, registry, self._lifecycle)
        self.events = EventLog(wall_seconds)
        # Why models that should be there are not, where it never came to loading a version.
        self._unpolled: dict[str, str] = {}
        self._missed_at_start: frozenset[str] = frozenset()

    def start(self) -> list[LoadFailure]:
        """Loads the models of the start, several at a time.

        Returns:
            Those that could not be loaded; the others serve.

        Raises:
            InvalidArgumentError: A repository is not a directory.
        """
        self._repositories.check()
        scan = self._repositories.scan()
        names = self._startup_names(scan)
        if not names:
            return []
        errors = self._composition.load(names, scan, self._loading(scan))
        failures = [self._failure(name, errors[name]) for name in names if name in errors]
        self._missed_at_start = frozenset(self._unpolled)
        return failures

    def index(self, ready_only: bool) -> list[IndexEntry]:
        """All models of the repositories, by name, with the state of each version."""
        scan = self._repositories.scan()
        published = self._registry.entries
        lines: list[IndexEntry] = []
        for name in sorted({*scan.models, *scan.duplicates}):
            if name in scan.duplicates:
                lines.append(IndexEntry(name, state="UNAVAILABLE", reason=_DUPLICATE))
            else:
                lines.extend(self._lines(name, published.get(name, Entry())))
        return [line for line in lines if line.state == "READY"] if ready_only else lines

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Loads or reloads a model, and returns when it is ready.

        Args:
            name: Model name.
            parameters: ``config`` replaces the model's config with one in JSON.

        Raises:
            ConchError: The model can't be loaded; the text is Triton's.
        """
        _check_name(name)
        override = _config_override(parameters)
        scan = self._repositories.scan()
        errors = self._composition.load([name], scan, self._loading(scan), override)
        error = errors.get(name)
        if error is not None:
            if isinstance(error, EnsembleError):
                log.error("failed to load '%s': %s", name, error.reason)
                self._missed(name, error.reason)
            raise error

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Starts unloading a model; one that is not loaded is no error.

        Args:
            name: Model name.
            unload_dependents: Also unload the models of an ensemble that were loaded for it only.
        """
        self._unpolled.pop(name, None)
        self._composition.unload(name, unload_dependents)

    def models(self) -> Index:
        """All models with their states, by name."""
        revision = self.events.revision
        scan = self._repositories.scan()
        published = self._registry.entries
        found = []
        for name in sorted({*scan.models, *scan.duplicates, *published}):
            entry = published.get(name, Entry())
            source = scan.models.get(name)
            reason = _DUPLICATE if name in scan.duplicates else self._unpolled.get(name, "")
            versions = tuple(
                VersionStatus(version, _phase_of(state), state.reason)
                for version, state in sorted(entry.states.items())
            )
            found.append(ModelStatus(name, "" if source is None else source.location, versions, reason))
        return Index(self.events.epoch, revision, tuple(found))

    def ready(self) -> bool:
        """Whether every model that is to serve does; see `as_wanted`.

        A model whose definition could not be read counts only if that was at the start: a client must not
        take a server out of service by asking for one.
        """
        entries = self._registry.entries.values()
        return self._missed_at_start.isdisjoint(self._unpolled) and all(map(as_wanted, entries))

    def close(self, timeout_s: float) -> bool:
        """Unloads everything; further loads fail.

        Args:
            timeout_s: How long requests have to finish.

        Returns:
            Whether everything finished in time.
        """
        return self._lifecycle.close(timeout_s)

    def _startup_names(self, scan: Scan) -> list[str]:
        startup = self._options.startup_models
        if self._options.mode == "none" or WILDCARD in startup:
            return sorted({*scan.models, *scan.duplicates})
        return list(dict.fromkeys(startup))

    def _failure(self, name: str, error: Exception) -> LoadFailure:
        shown = as_conch_error(error)
        if shown is not error:
            log.error("failed to load '%s'", name, exc_info=error)
        failure = LoadFailure(name, shown)
        # A model the operator named is missed even if there is no trace of it.
        if name not in self._registry.entries:
            self._unpolled[name] = failure.reason
        return failure

    def _loading(self, scan: Scan) -> LoadOne:
        return lambda name, override: self._load(name, scan, override)

    def _load(self, name: str, scan: Scan, override: str | None) -> None:
        if name in scan.duplicates:
            log.error("failed to poll model '%s': not unique across all model repositories", name)
            self._missed(name, _DUPLICATE)
            raise PollError(name, _DUPLICATE)
        source = scan.models.get(name)
        if source is None:
            log.error("failed to poll model '%s': model not found in any model repository", name)
            raise PollError(name, "model not found in any model repository")
        try:
            self._lifecycle.load(source, override)
        except (PollError, EnsembleError) as error:
            self._missed(name, error.reason)
            raise
        self._unpolled.pop(name, None)

    def _missed(self, name: str, reason: str) -> None:
        entry = self._registry.entries.get(name)
        if entry is None or not entry.ready:
            self._unpolled[name] = reason

    def _lines(self, name: str, entry: Entry) -> list[IndexEntry]:
        if entry.states:
            return [
                IndexEntry(name, str(version), state.state, state.reason)
                for version, state in sorted(entry.states.items())
            ]
        reason = self._unpolled.get(name)
        return [IndexEntry(name) if reason is None else IndexEntry(name, "", "UNAVAILABLE", reason)]


def _check_options(options: ControlOptions) -> None:
    if options.mode not in ("none", "explicit"):
        raise UnsupportedError(f"model control mode '{options.mode}' is not supported yet")
    if options.startup_models and options.mode != "explicit":
        raise InvalidArgumentError(
            "Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
        )
    if WILDCARD in options.startup_models and len(options.startup_models) > 1:
        raise InvalidArgumentError(
            f"Wildcard model name '{WILDCARD}' must be the ONLY startup model if specified at all."
        )


def _phase_of(state: VersionState) -> Phase:
    if state == UNLOADED:
        return Phase.UNLOADED
    phases = {"LOADING": Phase.LOADING, "READY": Phase.READY, "UNLOADING": Phase.DRAINING}
    return phases.get(state.state, Phase.FAILED)


def _check_name(name: str) -> None:
    trimmed = name.strip()
    if not trimmed:
        raise InvalidArgumentError("Model name cannot be empty. Please enter a valid name to deploy.")
    if trimmed == ".." or "/" in trimmed:
        raise InvalidArgumentError(
            f"invalid model name '{name}', model name must not contain path traversal characters"
        )


def _config_override(parameters: Mapping[str, LoadParameter]) -> str | None:
    override: str | None = None
    for key, value in parameters.items():
        if key == "config":
            if not isinstance(value, str):
                raise InvalidArgumentError("Config parameter 'config' must have string type for its value")
            override = value
        elif key.startswith("file:"):
            raise UnsupportedError(f"load parameter '{key}': model file overrides are not supported yet")
        else:
            kind = _PARAMETER_TYPES[type(value)]
            raise InvalidArgumentError(f"Unrecognized load parameter '{key}' with type '{kind}'")
    return override

"""The repository as front ends see it: what there is, loading and unloading, readiness."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from conch.core.calls import Calls
from conch.core.clock import wall_seconds
from conch.core.custom_metrics import FAMILIES, CustomFamilies
from conch.core.errors import (
    ConchError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedError,
    as_conch_error,
)
from conch.core.execution.placement import devices_of
from conch.core.loads import LoadStatistics
from conch.core.registry import Entry, Registry
from conch.core.response_cache.service import CacheService
from conch.core.server_state import IndexEntry, LoadParameter
from conch.core.spec import ModelSpec
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.origins import CONFIG_FILE, OVERRIDE, config_origins
from conch_control.events import EventLog
from conch_control.lifecycle.access_policy import ForModels, Gate
from conch_control.lifecycle.ensemble_dependencies import Composition, LoadOne
from conch_control.lifecycle.ensemble_loader import EnsembleError
from conch_control.lifecycle.load_overrides import overridden, read_overrides
from conch_control.lifecycle.model_definition import PollError
from conch_control.lifecycle.model_lifecycle import Lifecycle
from conch_control.lifecycle.model_loader import GetBackend, Loader
from conch_control.lifecycle.uploaded_files import remove_abandoned
from conch_control.lifecycle.version_diff import STALE
from conch_control.lifecycle.version_states import UNFINISHED, Book
from conch_control.options import WILDCARD, ControlOptions
from conch_control.port import Index, InstanceStatus, ModelDescription, ModelStatus
from conch_control.repository.markers import without_incomplete
from conch_control.repository.repositories import open_repositories
from conch_control.repository.source import ModelSource, Repository, Scan

log = logging.getLogger(__name__)


_DUPLICATE = "model appears in two or more repositories"
_NO_DEVICE = -1


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
        on_drain: Makes the server not ready.
        repositories: More repositories than the options name.
        families: Where models make metrics of their own while they are loaded.

    Attributes:
        repositories: Where models come from.
        events: What has happened to the models.
        loads: How long loads take, and how many fail.

    Raises:
        InvalidArgumentError: The options contradict each other.
    """

    def __init__(
        self,
        options: ControlOptions,
        registry: Registry,
        get_backend: GetBackend,
        cache: CacheService | None = None,
        on_drain: Callable[[], None] = lambda: None,
        *,
        repositories: Iterable[Repository] = (),
        families: CustomFamilies = FAMILIES,
    ) -> None:
        _check_options(options)
        self._registry = registry
        self._options = options
        self.repositories = open_repositories(options, repositories)
        if options.namespacing:
            registry.namespaces = tuple(repository.location for repository in self.repositories)
        self._on_drain = on_drain
        self.events = EventLog(wall_seconds)
        self._book = Book(registry, self.events)
        # A model may load others where a client may; the operator's switch is for clients.
        models = ForModels(self)
        calls = Calls(registry, Gate(models, options.mode))
        loader = Loader(options, get_backend, registry, cache, calls, families)
        self.loads = LoadStatistics()
        self._lifecycle = Lifecycle(options, registry, loader, self._book, self.loads)
        models.around_loads = self._lifecycle.one_more
        self._composition = Composition(options, registry, self._lifecycle, self.loads)
        # At the last look:
        self._seen: Mapping[str, ModelSource] = {}
        self._identifiers: Mapping[str, tuple[str, ...]] = {}

    def start(self) -> list[LoadFailure]:
        """Loads the models of the start, several at a time.

        Returns:
            Those that could not be loaded; the others serve.

        Raises:
            InvalidArgumentError: A repository is not a directory.
        """
        self.repositories.check()
        remove_abandoned()
        scan = self._scan()
        names = self._startup_names(scan)
        if not names:
            return []
        errors = self._composition.load(names, scan, self._loading(scan))
        return [self._failure(name, errors[name]) for name in names if name in errors]

    def index(self, ready_only: bool) -> list[IndexEntry]:
        """All models of the repositories, by name, with the state of each version.

        Of a repository that does not answer, they are those that it had when it did.
        """
        scan = self._glance()
        failures = self._book.failures
        published = self._registry.entries
        shown = self._registry.name_of
        lines: list[IndexEntry] = []
        names = {*scan.models, *scan.duplicates, *scan.remembered}
        for name in sorted(names, key=lambda each: (shown(each), each)):
            if name in scan.duplicates:
                lines.append(IndexEntry(name, state="UNAVAILABLE", reason=_DUPLICATE))
            else:
                lines.extend(_lines(shown(name), published.get(name, Entry()), failures.get(name)))
        return [line for line in lines if line.state == "READY"] if ready_only else lines

    def load(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Loads or reloads a model, and returns when it is ready.

        Args:
            name: Model name, for all models of that name where they have namespaces; or an identifier.
            parameters: ``config`` replaces the model's config with one in JSON; ``file:<path>``, beside it,
                all its files.

        Raises:
            ConchError: The model can't be loaded; the text is Triton's.
        """
        _check_name(self._registry.name_of(name))
        overrides = read_overrides(parameters)
        scan = self._glance()
        if overrides.files and self._registry.namespaces:
            raise UnsupportedError("files can't be given with a load where models have namespaces")
        try:
            scan = overridden(name, overrides, scan)
            names = scan.identified(name)
            if any(self._composition.needs_late(each, scan, overrides.config) for each in names):
                scan = overridden(name, overrides, self._scan())
                names = scan.identified(name)
        except InvalidArgumentError as wrong:
            log.error("Poll failed for model directory '%s': %s", name, wrong.message)
            raise PollError(name, wrong.message) from wrong
        errors = self._composition.load(names, scan, self._loading(scan), overrides.config)
        for each in names:
            error = errors.get(each)
            if isinstance(error, EnsembleError):
                log.error("failed to load '%s': %s", each, error.reason)
                if overrides.config is None:
                    self._book.failed(each, error.reason)
            if error is not None:
                raise error

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Starts unloading a model; one that is not loaded is no error.

        Args:
            name: Model name, for all models of that name where they have namespaces; or an identifier.
            unload_dependents: Also unload the models of an ensemble that were loaded for it only.
        """
        known = dict.fromkeys((*self._registry.identifiers(name), *self._identifiers.get(name, ())))
        for identifier in known or (name,):
            self._composition.unload(identifier, unload_dependents)

    def models(self) -> Index:
        """All models with their states, by name."""
        scan = self._glance()
        known = self._book.snapshot()
        sources = {**scan.remembered, **scan.models}
        found = []
        for name in sorted({*sources, *scan.duplicates, *known.versions, *known.failures}):
            source = None if name in scan.duplicates else sources.get(name)
            reason = _DUPLICATE if name in scan.duplicates else known.failures.get(name, "")
            versions = tuple(status for _, status in sorted(known.versions.get(name, {}).items()))
            found.append(ModelStatus(name, "" if source is None else source.location, versions, reason))
        return Index(self.events.epoch, known.revision, tuple(found))

    def unfinished(self) -> list[ModelStatus]:
        """The models with versions that are being loaded, by name, without a look at the storage."""
        known = self._book.snapshot().versions
        return self.progress(
            [
                name
                for name, versions in known.items()
                if any(status.phase in UNFINISHED for status in versions.values())
            ]
        )

    def progress(self, names: Collection[str]) -> list[ModelStatus]:
        """Some models with how far their files are fetched, by name, without a look at the storage."""
        known, seen = self._book.snapshot(), self._seen
        return [
            ModelStatus(
                name,
                seen[name].location if name in seen else "",
                tuple(status for _, status in sorted(known.versions[name].items())),
                known.failures.get(name, ""),
            )
            for name in sorted(names)
            if name in known.versions
        ]

    def describe(self, name: str) -> ModelDescription:
        """All there is to say about one model.

        Raises:
            NotFoundError: There is no such model.
        """
        found = [
            each for each in self.models().models if name in (each.name, self._registry.name_of(each.name))
        ]
        if not found:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        if len(found) > 1:
            names = ", ".join(each.name for each in found)
            raise InvalidArgumentError(f"several repositories have a model '{name}': name one of {names}")
        (status,) = found
        newest = self._registry.entries.get(status.name, Entry()).latest
        if newest is None:
            return ModelDescription(status, "", {}, ())
        spec = newest.spec
        return ModelDescription(status, json.dumps(spec.config), self._origins(spec), _instances(spec))

    def drain(self) -> None:
        """Makes the server not ready, so that nobody sends it more; it goes on answering what comes."""
        log.info("draining: the server is not ready from now on, and goes on answering what comes")
        self._on_drain()

    def ready(self) -> bool:
        """Whether every model that is to serve does; see `as_wanted`.

        A model whose definition could not be read has no versions, and does not count, as in Triton.
        """
        return all(map(as_wanted, self._registry.entries.values()))

    def stop_loads(self) -> None:
        """Stops loads that are under way as far as they can be, and refuses all that come; for good."""
        self._lifecycle.stop_loads()

    def close(self, timeout_s: float) -> bool:
        """Unloads everything; further loads fail.

        Args:
            timeout_s: How long requests have to finish.

        Returns:
            Whether everything finished in time.
        """
        try:
            return self._lifecycle.close(timeout_s)
        finally:
            self.events.close()
            self.repositories.close()

    def _scan(self) -> Scan:
        return self._noted(self.repositories.scan())

    def _glance(self) -> Scan:
        """As `_scan`, but does not wait for repositories that are much slower than others."""
        return self._noted(self.repositories.glance())

    def _noted(self, scan: Scan) -> Scan:
        self._seen, self._identifiers = {**scan.remembered, **scan.models}, scan.identifiers
        return scan

    def _origins(self, spec: ModelSpec) -> Mapping[str, str]:
        origin = self._lifecycle.origin(spec.identifier)
        if origin is None:
            return {}
        effective = ModelConfig.FromString(spec.config_message)
        completed = ModelConfig.FromString(spec.config_message)
        del completed.instance_group[:]  # what is not written of them is the server's choice
        source = OVERRIDE if origin.override else CONFIG_FILE
        return config_origins(origin.definition.written, completed, effective, source)

    def _startup_names(self, scan: Scan) -> list[str]:
        startup = self._options.startup_models
        if self._options.mode != "explicit" or WILDCARD in startup:
            names = sorted({*scan.models, *scan.duplicates})
            # The planner has those loaded when they are complete.
            return names if self._options.mode in ("none", "explicit") else without_incomplete(names, scan)
        return list(dict.fromkeys(each for name in startup for each in scan.identified(name)))

    def _failure(self, name: str, error: Exception) -> LoadFailure:
        shown = as_conch_error(error)
        if shown is not error:
            log.error("failed to load '%s'", name, exc_info=error)
        failure = LoadFailure(name, shown)
        if isinstance(shown, EnsembleError):  # all others have been logged where they failed
            log.error("%s", failure)
        # A model the operator named is missed even if there is no trace of it.
        if not self._registry.entries.get(name, Entry()).states:
            self._book.failed(name, failure.reason)
        return failure

    def _loading(self, scan: Scan) -> LoadOne:
        return lambda name, override, asked: self._load(name, scan, override, asked)

    def _load(self, name: str, scan: Scan, override: str | None, asked: int) -> None:
        if name in scan.duplicates:
            log.error("failed to poll model '%s': not unique across all model repositories", name)
            self._book.failed(name, _DUPLICATE)
            self.loads.failed(name)
            raise PollError(name, _DUPLICATE)
        source = scan.models.get(name)
        if source is None:
            raise _not_found(name, scan)
        self._lifecycle.load(source, override, asked)


def _lines(name: str, entry: Entry, failure: str | None) -> list[IndexEntry]:
    if entry.states:
        # Of a model that is ready a failure as a whole is that of a newer load.
        stale = "" if failure is None else STALE + failure
        return [
            IndexEntry(name, str(version), state.state, state.reason or _remarks(entry, version, stale))
            for version, state in sorted(entry.states.items())
        ]
    return [IndexEntry(name) if failure is None else IndexEntry(name, "", "UNAVAILABLE", failure)]


def _remarks(entry: Entry, version: int, stale: str) -> str:
    """What the index says of a version that serves: a newer load that failed, outputs against its config."""
    model = entry.ready.get(version)
    return "" if model is None else "; ".join([*filter(None, (stale,)), *model.notes])


def _not_found(name: str, scan: Scan) -> PollError:
    """Why a model can't be looked at; caused by the storage if it may just not be seen now."""
    reason = "model not found in any model repository"
    if scan.unreadable:
        failures = "; ".join(f"'{location}': {text}" for location, text in scan.unreadable.items())
        reason += f" that can be read; some can not: {failures}"
    log.error("failed to poll model '%s': %s", name, reason)
    error = PollError(name, reason)
    if scan.unreadable:
        error.__cause__ = OSError(reason)  # what tells callers that another try may succeed
    return error


def _check_options(options: ControlOptions) -> None:
    if options.startup_models and options.mode != "explicit":
        raise InvalidArgumentError(
            "Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
        )
    if WILDCARD in options.startup_models and len(options.startup_models) > 1:
        raise InvalidArgumentError(
            f"Wildcard model name '{WILDCARD}' must be the ONLY startup model if specified at all."
        )


def _instances(spec: ModelSpec) -> tuple[InstanceStatus, ...]:
    return tuple(
        InstanceStatus(
            group.name, f"KIND_{group.kind}", device if group.kind == "GPU" else _NO_DEVICE, group.count
        )
        for group in spec.instance_groups
        for device in devices_of(group)
    )


def _check_name(name: str) -> None:
    trimmed = name.strip()
    if not trimmed:
        raise InvalidArgumentError("Model name cannot be empty. Please enter a valid name to deploy.")
    if trimmed == ".." or "/" in trimmed:
        raise InvalidArgumentError(
            f"invalid model name '{name}', model name must not contain path traversal characters"
        )


def as_wanted(entry: Entry) -> bool:
    """Whether a model is as its operator wants it: it serves, or has been taken out of service.

    Triton looks at each version: one that is being loaded, that has failed or that finishes its last requests
    makes a server not ready, though another version of the model serves. Replicas that follow one storage
    would all stop getting requests at once for a broken update that no client ever sees, so here a model
    with a version that serves counts as ready whatever becomes of its others, and so does a model that is
    being unloaded.
    """
    return bool(entry.ready) or all(_gone(state.state, state.reason) for state in entry.states.values())


def _gone(state: str, reason: str) -> bool:
    return state == "UNLOADING" or (state == "UNAVAILABLE" and reason == "unloaded")

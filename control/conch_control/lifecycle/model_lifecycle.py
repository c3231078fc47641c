"""Loads and unloads single models: all selected versions of a model, or none.

A load runs in these steps: queue (`load_queue`), stage the files, read the definition, build the versions
beside the ones that serve, swap the registry entry once, drain what was replaced. Unchanged versions stay;
a changed instance count resizes the pool.

Owns: what each model was loaded from, and leases on its files. Locks: the load queue's lock guards it; the
locks of `VersionStates` and the registry are taken inside it. A holder of the lock whose load is not
stopped may publish.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from conch.core.clock import monotonic_ns
from conch.core.errors import ConchError, InvalidArgumentError, UnavailableError
from conch.core.load_statistics import LoadStatistics
from conch.core.registry import UNLOADED, Entry, Registry
from conch.core.servable import Servable
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.draining import Drainer, unload_order
from conch_control.lifecycle.ensemble_loader import EnsembleError
from conch_control.lifecycle.load_queue import LoadQueue, QueuedLoad
from conch_control.lifecycle.model_definition import Definition, NoVersionError, PollError, read_definition
from conch_control.lifecycle.model_loader import ModelLoader
from conch_control.lifecycle.rollouts import Rollouts
from conch_control.lifecycle.staging import Fetcher, Lease, poll_error
from conch_control.lifecycle.version_builder import BuiltVersions, VersionBuilder, with_code
from conch_control.lifecycle.version_diff import (
    Origin,
    VersionAction,
    clear_stale,
    diff_versions,
    on_failure,
    on_success,
)
from conch_control.lifecycle.version_states import FORGOTTEN, UNFINISHED, Change, VersionStates
from conch_control.native_agents import NativeAgents
from conch_control.repository.layout import Fingerprint, select_versions, without_rollout
from conch_control.repository.namespaces import Namespaced, namespace_of, unwrapped
from conch_control.repository.source import DataOnly, ModelSource, Renamed
from conch_control.version_phase import Phase

log = logging.getLogger(__name__)

_NO_ENTRY = Entry()
_EXITING = "Server exiting"


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """Origin of a loaded model, and the lease of its files."""

    origin: Origin
    lease: Lease


class ModelLifecycle:
    """Loads models into the registry and unloads them.

    Loads of one model run one at a time, those of different models in parallel up to ``load_threads``.
    `rollouts` choose among the versions of models; None for none.
    """

    def __init__(
        self,
        options: ControlOptions,
        registry: Registry,
        loader: ModelLoader,
        states: VersionStates,
        queue: LoadQueue,
        statistics: LoadStatistics | None = None,
        rollouts: Rollouts | None = None,
    ) -> None:
        self._registry = registry
        self._loader = loader
        self._options = options
        self._states = states
        self.queue = queue
        self._lock = queue.lock
        self._statistics = LoadStatistics() if statistics is None else statistics
        self._agents = NativeAgents(options.repoagent_directory)
        self.builder = VersionBuilder(loader, states, self.queue, options)
        self._fetcher = Fetcher(options, states, self.queue)
        self.drainer = Drainer(self._lock, registry, states)
        self._loaded: dict[str, _Loaded] = {}
        self._leases: dict[Servable, Lease] = {}
        self._rollouts = rollouts

    def origin(self, name: str) -> Origin | None:
        """Origin of a loaded model; None if the model is not loaded."""
        loaded = self._loaded.get(name)
        return None if loaded is None else loaded.origin

    def load(
        self, source: ModelSource, override: str | None = None, requested_ticket: int | None = None
    ) -> None:
        """Loads or reloads a model and returns when it is ready.

        Does nothing if the files are unchanged. An override always loads, and stays in force until the
        files change or the model is unloaded.

        Args:
            source: The model.
            override: Config in JSON that replaces the file.
            requested_ticket: Ticket of the caller's `LoadQueue.call`; None to begin one.

        Raises:
            PollError: The definition can't be read.
            SupersededError: A newer call has replaced it.
            ConchError: It can't be loaded; the previous versions still serve.
        """
        if requested_ticket is None:
            with self.queue.call() as ticket:
                self.load(source, override, ticket)
            return
        try:
            self._load(source, override, requested_ticket)
        finally:
            self._ended(source.name)

    def _load(self, source: ModelSource, override: str | None, requested_ticket: int) -> None:
        name = source.name
        self._statistics.begun(name)
        while True:
            self.queue.check_open()
            looked = self.queue.ticket()
            state = self._fingerprint(name, source)
            queued = QueuedLoad(name, requested_ticket, looked, without_rollout(state), override)
            submitted = self.queue.submit(queued)
            if submitted is queued:
                self._run(queued, source)
                return
            if submitted is None:
                continue
            error = self.queue.wait(submitted)
            if error is None:
                return
            if submitted.override == override:
                raise error
            # It failed with another config.

    def refresh(self, name: str, keep: bool = False) -> None:
        """Loads a model again from its current definition; does nothing if it is not loaded.

        `keep` loads only versions that do not serve.

        Raises:
            ConchError: It can't be loaded; the previous versions still serve.
        """
        with self.queue.call() as ticket:
            queued = QueuedLoad(name, ticket)
            self.queue.append(queued)
            with self.queue.running(queued):
                loaded = self._loaded.get(name)
                if loaded is not None:
                    with self._ending(queued):
                        self._loader.check(loaded.origin.definition)
                        self._apply(queued, loaded, keep)
        self._ended(name)

    def _ended(self, name: str) -> None:
        if self._rollouts is not None and not self.queue.closed:
            self._rollouts.ended(name)

    def unload(
        self, name: str, then: Callable[[], None] = lambda: None, gone: Callable[[], None] = lambda: None
    ) -> None:
        """Unpublishes a model at once; requests in flight finish in the background.

        Stops loads of the model; an unknown one is ignored. Draining ensembles can still resolve it. `then`
        is called after the last request, unless the server stops, and `gone` once its memory is free.
        """
        with self._lock:
            self.queue.unload(name)
            self._states.clear_failure(name)
            self._statistics.unloaded(name)
            entry = self._registry.entries.get(name)
            loaded = None if entry is None else self._retire(name, entry, then, gone)
        if loaded is not None:
            loaded.origin.definition.agents.unload()
            loaded.lease.drop()
        if entry is None or not entry.ready:
            gone()

    def _retire(
        self, name: str, entry: Entry, then: Callable[[], None], gone: Callable[[], None]
    ) -> _Loaded | None:
        """Unpublishes all versions of a model and ends them in the background; called with the lock held."""
        loaded = self._loaded.pop(name, None)
        users = self.drainer.dependents_of(name)
        self.drainer.keep_resolvable(entry.ready.values(), needed=bool(users))
        # Unloading also clears failed versions.
        ending = UNFINISHED | {Phase.FAILED}
        changes = {
            version: Change(Phase.UNLOADED, UNLOADED)
            for version, status in self._states.versions(name).items()
            if status.phase in ending
        }
        draining = dict.fromkeys(entry.ready, Change(Phase.DRAINING))
        statuses = self._states.change(name, {**changes, **draining}, {})
        left, held = set(entry.ready), set(entry.ready)
        for version, model in entry.ready.items():

            def done(version: int = version) -> None:
                with self._lock:
                    left.discard(version)
                    last = not left and not self.queue.closed
                if last:
                    then()

            def freed(version: int = version) -> None:
                with self._lock:
                    held.discard(version)
                    last = not held
                if last:
                    gone()

            lease = self._leases.pop(model, None)
            self.drainer.retire(model, lease, statuses[version], done, users, freed)
        return loaded

    def stop_loads(self) -> None:
        """Stops all loads and refuses new ones."""
        self.queue.close(UnavailableError(_EXITING))

    def close(self, timeout_s: float) -> bool:
        """Unloads everything; requests still queued at the end of the timeout fail.

        Returns True if all requests finished in time.
        """
        deadline = time.monotonic() + timeout_s
        error = UnavailableError(_EXITING)
        self.drainer.stop()
        self.queue.close(error)
        for names in unload_order(self._registry.entries):
            for name in names:
                self.unload(name)
            self.drainer.wait(deadline)
        ended = self.queue.wait_idle(max(deadline - time.monotonic(), 0))
        return not self.drainer.fail_queued(error) and ended

    def _run(self, queued: QueuedLoad, source: ModelSource) -> None:
        name = queued.name
        with self.queue.running(queued), self._ending(queued):
            loaded = self._loaded.get(name)
            if (
                queued.override is None
                and loaded is not None
                and loaded.origin.state == queued.state
                and loaded.origin.location == source.location
            ):
                with self._lock:
                    queued.check()
                    stale = clear_stale(self._states.versions(name))
                    if stale:
                        self._states.change(name, stale)
                    self._states.clear_failure(name)
                return
            # Before reading: any later change makes the next load a reload.
            looked = self.queue.ticket()
            lease = self._fetcher.fetch(queued, source)
            try:
                queued.check()
                self.queue.fetched(queued, lease.fingerprint, looked)
                bare = unwrapped(source)
                definition = read_definition(
                    name,
                    lease.directory,
                    self._options,
                    queued.override,
                    self._agents.find,
                    namespace=namespace_of(source),
                    renamed=isinstance(bare, Renamed),
                    data_only=bare if isinstance(bare, DataOnly) and bare.data_only else None,
                )
                if isinstance(source, Namespaced):
                    definition = replace(definition, parts=source.identify(definition.config))
                # The last release of the files ends the agents' life cycle.
                lease.before_release(definition.agents.unload_complete)
                origin = Origin(source.location, lease.fingerprint, definition, queued.override is not None)
                with ExitStack() as undo:
                    undo.callback(definition.agents.load_failed)
                    self._loader.check(definition)
                    self._apply(queued, _Loaded(origin, lease))
                    undo.pop_all()
                definition.agents.load_complete()
                if loaded is not None:
                    # Outside the lock: this may delete files.
                    loaded.origin.definition.agents.unload()
                    loaded.lease.drop()
            finally:
                lease.drop()

    def _apply(self, queued: QueuedLoad, wanted: _Loaded, keep: bool = False) -> None:
        """Builds the versions of a definition, with `keep` those that do not serve, and swaps them in."""
        start = monotonic_ns()
        name, definition = queued.name, wanted.origin.definition
        versions = self._select(definition)
        serving = self._registry.entries.get(name, _NO_ENTRY).ready
        loaded = self._loaded.get(name)
        staying = [version for version in versions if version in serving]
        if keep:
            actions = dict.fromkeys(staying, VersionAction.KEEP)
        elif loaded is None or loaded is wanted:  # `refresh` passes the loaded one itself
            actions = {}
        else:
            actions = diff_versions(loaded.origin, wanted.origin, staying)
        built = self.builder.build(queued, definition, versions, serving, actions)
        with self._lock:
            good = queued.stopped is None and not built.failures
            leaving: list[threading.Thread] = []
            if good:
                versions = sorted({*versions, *self._held(name, loaded, wanted, serving)})
                replaces = any(version in serving for version in built.loaded)
                leaving = self._swap(name, wanted, versions, built)
                for version in built.loaded:
                    self._statistics.loaded(name, version, built.load_ns[version])
                if replaces:
                    self._statistics.swapped(monotonic_ns() - start)
        if good:
            # A load returns after removed instances have finalized, unless a model requested
            # it, which may itself run on one of them.
            self.drainer.join(leaving, lambda: queued.stopped is not None or self.queue.nested_loads > 0)
            return
        built.abandon()
        with self._lock:
            queued.check()
            self._states.change(name, on_failure(self._states.versions(name), built.failures))
        raise _load_error(name, built.failures)

    def _held(
        self, name: str, loaded: _Loaded | None, wanted: _Loaded, serving: Mapping[int, Servable]
    ) -> list[int]:
        """Serving versions that a rollout holds, perhaps since the load began, and may stay as they are."""
        if self._rollouts is None or loaded is None:
            return []
        held = [version for version in self._rollouts.held(name) if version in serving]
        if loaded is wanted:
            return held
        actions = diff_versions(loaded.origin, wanted.origin, held)
        return [version for version, action in actions.items() if action is VersionAction.KEEP]

    def _swap(
        self, name: str, wanted: _Loaded, versions: list[int], built: BuiltVersions
    ) -> list[threading.Thread]:
        """Publishes built versions and retires replaced ones; returns the threads that end instances."""
        serving = self._registry.entries.get(name, _NO_ENTRY).ready
        ready = {version: built.loaded.get(version) or serving[version] for version in versions}
        going = {version: model for version, model in serving.items() if ready.get(version) is not model}
        for resize in built.resizes.values():
            resize.commit()
        self.drainer.keep_resolvable(going.values())
        before = self._states.versions(name)
        changes = on_success(before, ready.keys(), built.host_bytes)
        statuses = self._states.change(name, changes, ready)
        self._states.clear_failure(name)
        if self._loaded.get(name) is not wanted:
            self._loaded[name] = wanted
            wanted.lease.keep()
        for model in built.loaded.values():
            self._leases[model] = wanted.lease.keep()
        for version, model in going.items():
            self.drainer.retire(
                model, self._leases.pop(model, None), statuses[version] if version not in ready else None
            )
        leaving = [
            self.drainer.start(serving[version], resize.finish) for version, resize in built.resizes.items()
        ]
        if built.resizes:
            log.info("changed the instances of '%s'", name)
        if built.loaded or going:
            log.info("successfully loaded '%s'", name)
        return leaving

    @contextmanager
    def _ending(self, queued: QueuedLoad) -> Iterator[None]:
        """Reports the final states when a load ends with an error."""
        name = queued.name
        try:
            yield
            self._statistics.succeeded(name)
        except BaseException as error:  # raised again
            with self._lock:
                stopped = queued.stopped
                if stopped is None:
                    # The failure of a client's override does not persist.
                    self._statistics.failed(name, lasting=queued.override is None)
                if stopped is not None:
                    self._states.end(name, UNFINISHED, Change(Phase.UNLOADED, stopped.message))
                elif isinstance(error, PollError | EnsembleError):
                    # A client's own config tells nothing of the versions that the repository has.
                    failed = Change(Phase.FAILED, error.reason)
                    forgotten = Change(Phase.UNLOADED, FORGOTTEN)
                    self._states.end(name, UNFINISHED, failed if queued.override is None else forgotten)
                    self._states.failed(name, error.reason)
                else:
                    self._states.end(name, UNFINISHED, Change(Phase.UNLOADED, FORGOTTEN))
                    if isinstance(error, NoVersionError):
                        self._states.publish_known(name, lasting=queued.override is None)
            if stopped is not None and stopped is not error:
                raise stopped from None
            raise

    def _fingerprint(self, name: str, source: ModelSource) -> Fingerprint:
        """Current state of a model's files. Raises PollError: storage or declaration is at fault."""
        try:
            state = source.fingerprint()
            if self._rollouts is not None:
                self._rollouts.begins(source, state)
            return state
        except (ConchError, OSError) as error:
            failure = poll_error(name, error)
            self._statistics.failed(name)
            self._states.failed(name, failure.reason)
            raise failure from error

    def _select(self, definition: Definition) -> list[int]:
        """Versions to load. Raises NoVersionError: there is none."""
        name, config = definition.name, definition.config

        def policy(available: Collection[int]) -> list[int]:
            return select_versions(config, available)

        try:
            if self._rollouts is None:
                return policy(definition.versions)
            return self._rollouts.versions_of(name, definition.versions, policy)
        except InvalidArgumentError as error:
            log.error("failed to load '%s': %s", name, with_code(error))
            raise NoVersionError(name, error.message) from error


def _load_error(name: str, reasons: Mapping[int, str]) -> InvalidArgumentError:
    details = "".join(
        f"version {version} is at UNAVAILABLE state: {reason};\n" for version, reason in reasons.items()
    )
    return InvalidArgumentError(f"load failed for model '{name}': {details}")

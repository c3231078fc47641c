"""Carries loads and unloads out on the core: all versions of a model, or nothing.

While a model is loaded anew its old versions keep serving. The registry entry is swapped once, when all
new versions are ready; what was replaced finishes its requests in the background. Versions in which nothing
has changed go on as they are, with more instances or fewer where that is what has changed.

One lock, that of the operations, guards what is loaded: who holds it and finds a load not stopped may publish
what it has made. The book's and the registry's locks are inside it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from conch.core.clock import monotonic_ns
from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.core.loads import LoadStatistics
from conch.core.registry import Entry, Registry
from conch.core.servable import Servable
from conch_control.lifecycle.draining import Drains, waves
from conch_control.lifecycle.ensemble_loader import EnsembleError
from conch_control.lifecycle.load_queue import Operation, Operations
from conch_control.lifecycle.memory_usage import MemoryMeter
from conch_control.lifecycle.model_definition import Definition, NoVersionError, PollError, read_definition
from conch_control.lifecycle.model_loader import Loader
from conch_control.lifecycle.staging import Fetcher, Lease, look
from conch_control.lifecycle.version_builder import Made, Maker, with_code
from conch_control.lifecycle.version_diff import Origin, cleared, failed, swapped, treat
from conch_control.lifecycle.version_phase import Phase
from conch_control.lifecycle.version_states import FORGOTTEN, UNFINISHED, UNLOADED, Book, Change
from conch_control.options import ControlOptions
from conch_control.repository.layout import select_versions
from conch_control.repository.namespaces import Namespaced, namespace_of
from conch_control.repository.source import ModelSource

log = logging.getLogger(__name__)

_NO_ENTRY = Entry()
_EXITING = "Server exiting"


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """What a model was loaded from, and the files of that."""

    origin: Origin
    lease: Lease


class Lifecycle:
    """Loads models into a registry and takes them out again.

    Loads of one model follow one another; those of different models run side by side, up to
    ``load_threads`` of them. See `Operations` for loads that others make pointless.

    Args:
        options: Settings of the control plane.
        registry: Where models are published.
        loader: Makes versions ready.
        book: Where everything is said that becomes of versions; publishes in the registry.
        statistics: Where loads are counted; None for nowhere that anybody looks.
    """

    def __init__(
        self,
        options: ControlOptions,
        registry: Registry,
        loader: Loader,
        book: Book,
        statistics: LoadStatistics | None = None,
    ) -> None:
        self._registry = registry
        self._loader = loader
        self._options = options
        self._book = book
        self._operations = Operations(max(options.load_threads, 1))
        self._lock = self._operations.lock
        self._statistics = LoadStatistics() if statistics is None else statistics
        self._maker = Maker(
            loader,
            book,
            self._operations,
            options.load_retries,
            MemoryMeter(),
            options.keep_latencies,
            options.keep_first_responses,
            options.keep_summaries,
        )
        self._fetcher = Fetcher(options, book, self._operations)
        self._drains = Drains(self._lock, registry, book)
        self._loaded: dict[str, _Loaded] = {}
        self._leases: dict[Servable, Lease] = {}

    def call(self) -> AbstractContextManager[int]:
        """A call that may load something, but not what is unloaded meanwhile; gives its ticket."""
        return self._operations.call()

    def one_more(self) -> AbstractContextManager[None]:
        """Lets one more load run meanwhile than the options say."""
        return self._operations.one_more()

    def ticket(self) -> int:
        """A ticket of something that is asked for now, inside a call."""
        return self._operations.ticket()

    def origin(self, name: str) -> Origin | None:
        """What a model was loaded from; None for one that is not loaded."""
        loaded = self._loaded.get(name)
        return None if loaded is None else loaded.origin

    def load(self, source: ModelSource, override: str | None = None, asked: int | None = None) -> None:
        """Loads or reloads a model, and returns when it is ready.

        Nothing happens if it is loaded and its files are what they were. A config override always loads,
        and stays in force until the files change or the model is unloaded.

        Args:
            source: Where the model comes from.
            override: A config in JSON to use in place of the file.
            asked: Ticket of the call; None for a call that begins here.

        Raises:
            PollError: Its definition can't be had.
            SupersededError: Something newer has been asked for.
            ConchError: It can't be loaded; what served before still does.
        """
        self._statistics.begun(source.name)
        with self._operations.call() as ticket:
            while True:
                self._operations.check_open()
                looked = self._operations.ticket()
                with self._noting(source.name):
                    state = look(source)
                operation = Operation(
                    source.name, ticket if asked is None else asked, looked, state, override
                )
                entered = self._operations.enter(operation)
                if entered is operation:
                    self._run(operation, source)
                    return
                if entered is None:
                    continue
                error = self._operations.wait(entered)
                if error is None:
                    return
                if entered.override == override:
                    raise error
                # It did so with a config that was not ours.

    def refresh(self, name: str) -> None:
        """Loads a model anew as it was defined when it was loaded; nothing for one that is not loaded.

        Raises:
            ConchError: It can't be loaded; what served before still does.
        """
        with self._operations.call() as ticket:
            operation = Operation(name, ticket)
            self._operations.join(operation)
            with self._operations.turn(operation):
                loaded = self._loaded.get(name)
                if loaded is not None:
                    with self._ending(operation):
                        self._loader.check(loaded.origin.definition)
                        self._apply(operation, loaded)

    def unload(self, name: str, then: Callable[[], None] = lambda: None) -> None:
        """Takes a model out of service at once; its requests finish in the background.

        Loads of it that are under way are stopped. It stays in reach of ensembles that are unloaded or
        replaced already, until their requests finish.

        Args:
            name: Model name; one that is not loaded is no error.
            then: What to do when its requests have finished, unless the server stops.
        """
        with self._lock:
            self._operations.unload(name)
            self._book.settled(name)
            self._statistics.unloaded(name)
            entry = self._registry.entries.get(name)
            if entry is None:
                return
            loaded = self._loaded.pop(name, None)
            users = self._drains.users_of(name)
            self._drains.keep_in_reach(entry.ready.values(), needed=bool(users))
            # A failed version that is unloaded has been dealt with.
            ending = UNFINISHED | {Phase.FAILED}
            changes = {
                version: Change(Phase.UNLOADED, UNLOADED)
                for version, status in self._book.versions(name).items()
                if status.phase in ending
            }
            draining = dict.fromkeys(entry.ready, Change(Phase.DRAINING))
            statuses = self._book.change(name, {**changes, **draining}, {})
            left = set(entry.ready)
            for version, model in entry.ready.items():

                def done(version: int = version) -> None:
                    with self._lock:
                        left.discard(version)
                        last = not left and not self._operations.closed
                    if last:
                        then()

                lease = self._leases.pop(model, None)
                self._drains.retire(model, lease, statuses[version], done, users)
        if loaded is not None:
            loaded.origin.definition.agents.unload()
            loaded.lease.drop()

    def stop_loads(self) -> None:
        """Stops loads that are under way as far as they can be, and refuses all that come; for good."""
        self._operations.close(UnavailableError(_EXITING))

    def close(self, timeout_s: float) -> bool:
        """Unloads everything; loads that are under way fail.

        Args:
            timeout_s: How long requests have to finish; those still queued then are answered with an
                error.

        Returns:
            Whether everything finished.
        """
        deadline = time.monotonic() + timeout_s
        error = UnavailableError(_EXITING)
        self._drains.stop()
        self._operations.close(error)
        for names in waves(self._registry.entries):
            for name in names:
                self.unload(name)
            self._drains.wait(deadline)
        ended = self._operations.wait_ended(max(deadline - time.monotonic(), 0))
        return not self._drains.give_up(error) and ended

    def _run(self, operation: Operation, source: ModelSource) -> None:
        name = operation.name
        with self._operations.turn(operation), self._ending(operation):
            loaded = self._loaded.get(name)
            if operation.override is None and loaded is not None and _same(loaded.origin, operation, source):
                with self._lock:
                    operation.check()
                    self._book.change(name, cleared(self._book.versions(name)))
                    self._book.settled(name)
                return
            # Taken before anything is read: what changes from here on makes the next load a reload.
            looked = self._operations.ticket()
            lease = self._fetcher.fetch(operation, source)
            try:
                operation.check()
                self._operations.fetched(operation, lease.fingerprint, looked)
                namespace = namespace_of(source)
                definition = read_definition(
                    name, lease.directory, self._options, operation.override, namespace=namespace
                )
                if isinstance(source, Namespaced):
                    definition = replace(definition, parts=source.identify(definition.config))
                # Nothing of the model is left when nobody needs its files.
                lease.before_release(definition.agents.unloaded)
                origin = Origin(
                    source.location, lease.fingerprint, definition, operation.override is not None
                )
                try:
                    self._loader.check(definition)
                    self._apply(operation, _Loaded(origin, lease))
                except BaseException:
                    definition.agents.completed(False)
                    raise
                definition.agents.completed(True)
                if loaded is not None:
                    # Not under the lock: files may be deleted.
                    loaded.origin.definition.agents.unload()
                    loaded.lease.drop()
            finally:
                lease.drop()

    def _apply(self, operation: Operation, wanted: _Loaded) -> None:
        """Makes the versions of a definition and swaps them in; those that need nothing stay."""
        start = monotonic_ns()
        name, definition = operation.name, wanted.origin.definition
        versions = _select(definition)
        serving = self._registry.entries.get(name, _NO_ENTRY).ready
        loaded = self._loaded.get(name)
        staying = [version for version in versions if version in serving]
        same = loaded is None or loaded is wanted  # the latter when it is to be loaded as it was
        treatments = {} if same or loaded is None else treat(loaded.origin, wanted.origin, staying)
        made = self._maker.make(operation, definition, versions, serving, treatments)
        with self._lock:
            good = operation.stopped is None and not made.failures
            leaving: list[threading.Thread] = []
            if good:
                replaces = any(version in serving for version in made.loaded)
                leaving = self._swap(name, wanted, versions, made)
                for version in made.loaded:
                    self._statistics.loaded(name, version, made.load_ns[version])
                if replaces:
                    self._statistics.swapped(monotonic_ns() - start)
        if good:
            # A load returns when the instances that it takes away have finalized: unless it is asked for by a
            # model, which may itself run on one of them.
            self._drains.join(leaving, lambda: operation.stopped is not None or self._operations.awaited > 0)
            return
        made.abandon()
        with self._lock:
            operation.check()
            self._book.change(name, failed(self._book.versions(name), made.failures))
        raise _load_error(name, made.failures)

    def _swap(self, name: str, wanted: _Loaded, versions: list[int], made: Made) -> list[threading.Thread]:
        """Publishes what has been made, and has what it replaces finish.

        Returns:
            The threads on which instances end that were taken away from versions that stay.
        """
        serving = self._registry.entries.get(name, _NO_ENTRY).ready
        ready = {version: made.loaded.get(version) or serving[version] for version in versions}
        going = {version: model for version, model in serving.items() if ready.get(version) is not model}
        for resize in made.resizes.values():
            resize.commit()
        self._drains.keep_in_reach(going.values())
        before = self._book.versions(name)
        changes = swapped(before, ready.keys(), made.host_bytes)
        statuses = self._book.change(name, changes, ready)
        self._book.settled(name)
        if self._loaded.get(name) is not wanted:
            self._loaded[name] = wanted
            wanted.lease.keep()
        for model in made.loaded.values():
            self._leases[model] = wanted.lease.keep()
        for version, model in going.items():
            self._drains.retire(
                model, self._leases.pop(model, None), statuses[version] if version not in ready else None
            )
        leaving = [
            self._drains.start(serving[version], resize.finish) for version, resize in made.resizes.items()
        ]
        if made.resizes:
            log.info("changed the instances of '%s'", name)
        if made.loaded or going:
            log.info("successfully loaded '%s'", name)
        return leaving

    @contextmanager
    def _ending(self, operation: Operation) -> Iterator[None]:
        """Says what has become of versions when a load ends with an error, and why."""
        name = operation.name
        try:
            yield
            self._statistics.succeeded(name)
        except BaseException as error:
            with self._lock:
                stopped = operation.stopped
                if stopped is None:
                    # What is wrong with a client's own config does not last.
                    self._statistics.failed(name, lasting=operation.override is None)
                if stopped is not None:
                    self._book.end(name, UNFINISHED, Change(Phase.UNLOADED, stopped.message))
                elif isinstance(error, PollError | EnsembleError):
                    if operation.override is None:
                        self._book.end(name, UNFINISHED, Change(Phase.FAILED, error.reason))
                        self._book.failed(name, error.reason)
                    else:  # what is wrong with a client's own config nobody else misses
                        self._book.end(name, UNFINISHED, Change(Phase.UNLOADED, FORGOTTEN))
                else:
                    self._book.end(name, UNFINISHED, Change(Phase.UNLOADED, FORGOTTEN))
                    if isinstance(error, NoVersionError):
                        self._book.known(name)
            if stopped is not None and stopped is not error:
                raise stopped from None
            raise

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        """Notes why a model can't be had."""
        try:
            yield
        except PollError as error:
            self._statistics.failed(name)
            self._book.failed(name, error.reason)
            raise


def _same(origin: Origin, operation: Operation, source: ModelSource) -> bool:
    return origin.location == source.location and origin.state == operation.state


def _select(definition: Definition) -> list[int]:
    """The versions to load.

    Raises:
        NoVersionError: There are none.
    """
    try:
        return select_versions(definition.config, definition.versions)
    except InvalidArgumentError as error:
        log.error("failed to load '%s': %s", definition.name, with_code(error))
        raise NoVersionError(definition.name, error.message) from error


def _load_error(name: str, reasons: Mapping[int, str]) -> InvalidArgumentError:
    details = "".join(
        f"version {version} is at UNAVAILABLE state: {reason};\n" for version, reason in reasons.items()
    )
    return InvalidArgumentError(f"load failed for model '{name}': {details}")

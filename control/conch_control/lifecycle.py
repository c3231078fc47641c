"""Carries loads and unloads out on the core: all versions of a model, or nothing.

While a model is loaded anew its old versions keep serving. The registry entry is swapped once, when all
new versions are ready; what was replaced finishes its requests in the background. A model that has changed
in nothing but the number of its instances is not loaded anew: it goes on with more of them, or fewer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from conch.core.errors import (
    ConchError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
    as_conch_error,
)
from conch.core.instances.fleet import Resize
from conch.core.registry import Entry, Registry, VersionState
from conch.core.servable import Servable
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.definition import Definition, read_definition
from conch_control.ensemble_loader import parts_of
from conch_control.loader import Loader
from conch_control.options import ControlOptions
from conch_control.repository.layout import Fingerprint, without_configs
from conch_control.repository.source import ModelSource
from conch_control.repository.versions import select_versions

log = logging.getLogger(__name__)

READY = VersionState("READY")
UNLOADED = VersionState("UNAVAILABLE", "unloaded")

_NO_ENTRY = Entry()


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a model was loaded from."""

    fingerprint: Fingerprint
    definition: Definition


def _with_code(error: ConchError) -> str:
    """An error as Triton nests it in other texts: ``Invalid argument: text``."""
    return f"{error.label}: {error.message}"


class Lifecycle:
    """Loads models into a registry and takes them out again.

    Loads and unloads of one model follow one another; those of different models run side by side, up to
    ``load_threads`` of them.

    Args:
        options: Settings of the control plane.
        registry: Where models are published; nobody else publishes there.
        loader: Makes versions ready.
    """

    def __init__(self, options: ControlOptions, registry: Registry, loader: Loader) -> None:
        self._registry = registry
        self._loader = loader
        self._options = options
        self._slots = threading.BoundedSemaphore(max(options.load_threads, 1))
        self._lock = threading.Lock()  # guards what follows, and changes of the registry
        self._model_locks: dict[str, threading.Lock] = {}
        self._loaded: dict[str, _Loaded] = {}
        self._draining: dict[threading.Thread, Servable] = {}
        self._closed = False

    def load(self, source: ModelSource, override: str | None = None) -> None:
        """Loads or reloads a model, and returns when it is ready.

        Nothing happens if it is loaded and its files are what they were. A config override always loads,
        and stays in force until the files change or the model is unloaded.

        Args:
            source: Where the model comes from.
            override: A config in JSON to use in place of the file.

        Raises:
            PollError: Its definition can't be read.
            ConchError: It can't be loaded; what served before still does.
        """
        name = source.name
        with self._model_lock(name), self._slots:
            self._check_open()
            # Taken before anything is read: what changes from here on makes the next load a reload.
            staged = source.stage(_nothing, lambda: self._closed)
            state = staged.fingerprint
            loaded = self._loaded.get(name)
            if override is None and loaded is not None and loaded.fingerprint == state:
                return
            definition = read_definition(name, staged.directory, self._options, override)
            made = _Loaded(state, definition)
            replaced = None if loaded is None else loaded.definition.agents.unloaded
            try:
                self._loader.check(definition)
                if loaded is None or not self._resize(loaded, made):
                    self._load_versions(definition, replaced)
            except BaseException:
                definition.agents.completed(False)
                raise
            definition.agents.completed(True)
            if loaded is not None:
                loaded.definition.agents.unload()
            with self._lock:
                self._loaded[name] = made

    def refresh(self, name: str) -> None:
        """Loads a model anew as it was defined when it was loaded; nothing for one that is not loaded.

        Raises:
            ConchError: It can't be loaded; what served before still does.
        """
        with self._model_lock(name), self._slots:
            self._check_open()
            loaded = self._loaded.get(name)
            if loaded is not None:
                self._loader.check(loaded.definition)
                self._load_versions(loaded.definition)

    def unload(self, name: str, timeout_s: float = -1, then: Callable[[], None] | None = None) -> None:
        """Takes a model out of service at once; its requests finish in the background.

        It stays in reach of ensembles that are unloaded or replaced already, until their requests finish.

        Args:
            name: Model name; one that is not loaded is no error.
            timeout_s: How long to wait for a load of the model that is under way; -1 for its end.
            then: What to do when its requests have finished.
        """
        if name not in self._registry.entries:
            return
        with self._model_lock(name, timeout_s):
            with self._lock:
                loaded = self._loaded.pop(name, None)
                entry = self._registry.entries[name]
                users = [
                    thread
                    for thread, user in self._draining.items()
                    if name in parts_of(Entry({user.spec.version: user}))
                ]
                self._begin_draining(entry.ready, needed=bool(users))
                unloading = {version: VersionState("UNLOADING") for version in entry.ready}
                # A failed version that is unloaded has been dealt with.
                states = {
                    version: state if state.state == "UNLOADING" else UNLOADED
                    for version, state in entry.states.items()
                }
                self._registry.publish(name, Entry({}, {**states, **unloading}))
            if loaded is not None:
                loaded.definition.agents.unload()

            def last() -> None:
                if loaded is not None:
                    loaded.definition.agents.unloaded()
                if then is not None and not self._closed:
                    then()

            done = _when_all(len(entry.ready), last)
            for version, model in entry.ready.items():
                self._retire(model, unloading[version], done, users)

    def close(self, timeout_s: float) -> bool:
        """Unloads everything; loads that are under way fail.

        Args:
            timeout_s: How long requests have to finish; those still queued then are answered with an
                error.

        Returns:
            Whether everything finished.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
        finished = True
        for names in _waves(self._registry.entries):
            for name in names:
                try:
                    self.unload(name, max(deadline - time.monotonic(), 0))
                except UnavailableError:
                    finished = False  # its load hangs, and will find the lifecycle closed
            with self._lock:
                threads = list(self._draining)
            for thread in threads:
                thread.join(max(deadline - time.monotonic(), 0))
        with self._lock:
            left = list(self._draining.values())
        for model in left:
            model.fail_queued(UnavailableError("Server exiting"))
        return finished and not left

    def _load_versions(self, definition: Definition, replaced: Callable[[], None] | None = None) -> None:
        name = definition.name
        try:
            versions = select_versions(definition.config, definition.versions)
        except InvalidArgumentError as error:
            log.error("failed to load '%s': %s", name, _with_code(error))
            raise InternalError(f"failed to load '{name}', no version is available") from error
        serving = self._registry.entries.get(name, _NO_ENTRY).ready
        fresh = [version for version in versions if version not in serving]
        self._set_states(name, dict.fromkeys(fresh, VersionState("LOADING")))
        loaded: dict[int, Servable] = {}
        failures: dict[int, ConchError] = {}
        for version in versions:
            log.info("loading: %s:%d", name, version)
            try:
                loaded[version] = self._loader.load(definition, version)
            except BaseException as error:
                # Models are other people's code: one that calls sys.exit() fails like any other.
                failures[version] = self._failure(name, version, error)
        if not failures and self._swap(name, loaded, serving, replaced):
            log.info("successfully loaded '%s'", name)
            return
        for model in loaded.values():
            model.close()
        reasons = {version: _with_code(error) for version, error in failures.items()}
        self._set_states(
            name,
            {
                version: VersionState("UNAVAILABLE", reasons[version]) if version in reasons else UNLOADED
                for version in fresh
            },
        )
        self._check_open()
        raise _load_error(name, reasons)

    def _resize(self, loaded: _Loaded, made: _Loaded) -> bool:
        """Changes how many instances a model has, where that is all that a load is about.

        Returns:
            Whether it was; if not, nothing has changed.

        Raises:
            InvalidArgumentError: An instance can't be made; nothing has changed.
        """
        name = made.definition.name
        if not _same_but_groups(loaded, made):
            return False
        resizes: list[Resize] = []
        for version, model in self._registry.entries.get(name, _NO_ENTRY).ready.items():
            try:
                resize = self._loader.resize(made.definition, model)
            except BaseException as error:
                _abandon(resizes)
                raise _load_error(name, {version: _with_code(self._failure(name, version, error))}) from error
            if resize is None:
                _abandon(resizes)
                return False
            resizes.append(resize)
        if not resizes:
            return False
        with self._lock:
            closed = self._closed
            if not closed:
                for resize in resizes:
                    resize.commit()
        if closed:
            _abandon(resizes)
            self._check_open()
        ready = self._registry.entries[name].ready
        for model, resize in zip(ready.values(), resizes, strict=True):
            self._start_draining(model, resize.finish)
        log.info("changed the number of instances of '%s'", name)
        return True

    def _failure(self, name: str, version: int, error: BaseException) -> ConchError:
        shown = as_conch_error(error)
        # The traceback of an error of ours says nothing that its text does not.
        trace = None if isinstance(error, ConchError) else error
        log.error("failed to load '%s' version %d: %s", name, version, _with_code(shown), exc_info=trace)
        return shown

    def _swap(
        self,
        name: str,
        loaded: Mapping[int, Servable],
        serving: Mapping[int, Servable],
        replaced: Callable[[], None] | None,
    ) -> bool:
        """Publishes new versions in place of all old ones; refuses once the lifecycle is closed.

        `replaced` is called when nothing of the old ones is left.
        """
        unloading = {version: VersionState("UNLOADING") for version in serving if version not in loaded}
        with self._lock:
            if self._closed:
                return False
            states = self._registry.entries.get(name, _NO_ENTRY).states
            # Versions that failed before and are no longer wanted are forgotten.
            past = {
                version: state
                for version, state in states.items()
                if state.state == "UNLOADING" or state == UNLOADED
            }
            ready = dict.fromkeys(loaded, READY)
            self._begin_draining(serving)
            self._registry.publish(name, Entry(dict(loaded), {**past, **unloading, **ready}))
        done = None if replaced is None else _when_all(len(serving), replaced)
        for version, model in serving.items():
            self._retire(model, unloading.get(version), done)
        return True

    def _begin_draining(self, models: Mapping[int, Servable], needed: bool = False) -> None:
        """Keeps versions in reach of those who have begun something on them, until they are closed."""
        for model in models.values():
            if needed or model.spec.sequence is not None:
                self._registry.begin_draining(model.spec.name, model)

    def _retire(
        self,
        model: Servable,
        state: VersionState | None,
        done: Callable[[], None] | None = None,
        users: Iterable[threading.Thread] = (),
    ) -> None:
        """Closes a model that is no longer published, in the background.

        Args:
            model: The model.
            state: Its version's state as published; set to unloaded at the end, unless something else
                has happened to the version since. None where a successor has taken over.
            done: What to do after that.
            users: Threads that wait for the last requests of ensembles that need the model, begun before.
        """

        def unload() -> None:
            spec = model.spec
            try:
                for user in users:
                    user.join()
                model.close()
                log.info("successfully unloaded '%s' version %d", spec.name, spec.version)
            finally:
                self._registry.end_draining(spec.name, model)
                with self._lock:
                    entry = self._registry.entries.get(spec.name, _NO_ENTRY)
                    # By identity: an equal state may belong to a later unload of the same version.
                    if state is not None and entry.states.get(spec.version) is state:
                        states = {**entry.states, spec.version: UNLOADED}
                        self._registry.publish(spec.name, Entry(entry.ready, states))
                if done is not None:
                    done()

        self._start_draining(model, unload)

    def _start_draining(self, model: Servable, drain: Callable[[], None]) -> None:
        """Waits in the background for what is no longer wanted of a model to finish."""

        def run() -> None:
            try:
                drain()
            finally:
                with self._lock:
                    del self._draining[threading.current_thread()]

        thread = threading.Thread(target=run, name=f"conch-unload-{model.spec.name}", daemon=True)
        with self._lock:
            self._draining[thread] = model
            thread.start()  # here, so that whoever finds it can join it

    def _set_states(self, name: str, states: Mapping[int, VersionState]) -> None:
        if not states:
            return
        with self._lock:
            entry = self._registry.entries.get(name, _NO_ENTRY)
            self._registry.publish(name, Entry(entry.ready, {**entry.states, **states}))

    @contextmanager
    def _model_lock(self, name: str, timeout_s: float = -1) -> Iterator[None]:
        with self._lock:
            lock = self._model_locks.setdefault(name, threading.Lock())
        if not lock.acquire(timeout=timeout_s):
            raise UnavailableError(f"model '{name}' is still being loaded")
        try:
            yield
        finally:
            lock.release()

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("Server exiting")


def _when_all(count: int, then: Callable[[], None]) -> Callable[[], None]:
    """What to call so many times, from any thread, for something to be done the last time."""
    lock = threading.Lock()
    left = count

    def done() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            then()

    return done


def _nothing(done: int, total: int) -> None:
    """Takes the progress of sources that nobody watches."""


def _same_but_groups(loaded: _Loaded, made: _Loaded) -> bool:
    """Whether nothing has changed that is not in the instance groups, as far as files and config tell."""
    if loaded.definition.agents or made.definition.agents:
        return False  # each load has agents of its own, and the files they may have made
    if without_configs(loaded.fingerprint) != without_configs(made.fingerprint):
        return False
    configs = []
    for definition in (loaded.definition, made.definition):
        config = ModelConfig()
        config.CopyFrom(definition.config)
        config.ClearField("instance_group")
        configs.append(config)
    return configs[0] == configs[1]


def _abandon(resizes: Iterable[Resize]) -> None:
    for resize in resizes:
        resize.abandon()


def _load_error(name: str, reasons: Mapping[int, str]) -> InvalidArgumentError:
    details = "".join(
        f"version {version} is at UNAVAILABLE state: {reason};\n" for version, reason in reasons.items()
    )
    return InvalidArgumentError(f"load failed for model '{name}': {details}")


def _waves(entries: Mapping[str, Entry]) -> Iterator[list[str]]:
    """All models, ensembles before what they are made of: their requests need it to the end."""
    left = set(entries)
    while left:
        needed = {part for name in left for part in parts_of(entries[name]) if part != name}
        wave = sorted(left - needed) or sorted(left)
        yield wave
        left -= set(wave)

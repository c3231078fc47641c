"""Builds the versions of a load beside the ones that serve: all of them, or reports why not.

Threads and locks: runs on the thread of the load; the load queue's lock guards reports of progress.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import ConchError, as_conch_error
from conch.core.execution.instance_pool import Resize
from conch.core.model_control import cancellable_load
from conch.core.servable import Servable
from conch_control.config.model_spec import first_response_buckets, uncustomizable_families
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.load_queue import LoadQueue, QueuedLoad
from conch_control.lifecycle.memory_usage import MemoryMeter, log_taken
from conch_control.lifecycle.model_definition import Definition
from conch_control.lifecycle.model_loader import ModelLoader
from conch_control.lifecycle.version_diff import VersionAction
from conch_control.lifecycle.version_states import FORGOTTEN, UNFINISHED, Change, VersionStates
from conch_control.version_phase import Phase

log = logging.getLogger(__name__)


@dataclass(slots=True)
class BuiltVersions:
    """Result of a build, to be published or abandoned as a whole.

    Attributes:
        host_bytes: Growth of process memory for each; None if unknown.
        resizes: Prepared instance changes of versions that stay.
        failures: Errors by version, in Triton's nested form.
    """

    loaded: dict[int, Servable] = field(default_factory=dict)
    host_bytes: dict[int, int | None] = field(default_factory=dict)
    load_ns: dict[int, int] = field(default_factory=dict)
    resizes: dict[int, Resize] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def abandon(self) -> None:
        """Closes everything that was built."""
        for model in self.loaded.values():
            model.close()
        self.abandon_resizes()

    def abandon_resizes(self) -> None:
        """Closes instances that were added."""
        for resize in self.resizes.values():
            resize.abandon()
        self.resizes = {}


class VersionBuilder:
    """Builds versions, with retries."""

    def __init__(
        self,
        loader: ModelLoader,
        states: VersionStates,
        queue: LoadQueue,
        options: ControlOptions,
        clock: Clock = monotonic_ns,
    ) -> None:
        self._loader = loader
        self._states = states
        self._queue = queue
        self._options = options
        self._meter = MemoryMeter()
        self._clock = clock

    def build(
        self,
        queued: QueuedLoad,
        definition: Definition,
        versions: Iterable[int],
        serving: Mapping[int, Servable],
        actions: Mapping[int, VersionAction],
    ) -> BuiltVersions:
        """Builds the selected versions of a definition; starts nothing new once the load is stopped.

        A version that serves is loaded unless `actions` has another action for it.

        Raises:
            ConchError: The load was stopped before anything was built.
        """
        built = BuiltVersions()
        resized = [version for version in versions if actions.get(version) is VersionAction.RESIZE]
        with cancellable_load(lambda: queued.stopped is not None):
            changed = self._resize(built, definition, serving, resized)
        if not changed:
            actions = {**actions, **dict.fromkeys(resized, VersionAction.LOAD)}
        if built.failures:
            return built
        anew = [
            version for version in versions if actions.get(version, VersionAction.LOAD) is VersionAction.LOAD
        ]
        with ExitStack() as undo:
            undo.callback(built.abandon)
            self._begin(queued, [version for version in anew if version not in serving])
            for version in anew:
                if queued.stopped is None:
                    self._load(built, queued, definition, version, version not in serving)
            undo.pop_all()
        return built

    def _resize(
        self,
        built: BuiltVersions,
        definition: Definition,
        serving: Mapping[int, Servable],
        versions: Iterable[int],
    ) -> bool:
        """Prepares resizes; returns False if the versions must be loaded instead."""
        for version in versions:
            try:
                resize = self._loader.resize(definition, serving[version])
            except BaseException as error:  # boundary: a backend, which runs model code
                built.failures[version] = _failure(definition.name, version, error)
                return True
            if resize is None:
                built.abandon_resizes()
                return False
            built.resizes[version] = resize
        return True

    def _begin(self, queued: QueuedLoad, versions: Iterable[int]) -> None:
        """Moves new versions to LOADING and forgets wrongly guessed ones."""
        name = queued.name
        with self._queue.lock:
            queued.check()
            said = self._states.versions(name)
            unfinished = {version for version, status in said.items() if status.phase in UNFINISHED}
            staging = dict.fromkeys(set(versions) - unfinished, Change(Phase.STAGING))
            self._states.change(name, staging)
            ended = dict.fromkeys(unfinished - set(versions), Change(Phase.UNLOADED, FORGOTTEN))
            self._states.change(name, {**ended, **dict.fromkeys(versions, Change(Phase.LOADING))})

    def _load(
        self, built: BuiltVersions, queued: QueuedLoad, definition: Definition, version: int, fresh: bool
    ) -> None:
        name = definition.name

        def say(*changes: Change) -> None:
            with self._queue.lock:
                if fresh and queued.stopped is None:
                    for change in changes:
                        self._states.change(name, {version: change})

        for left in range(self._options.load_retries, -1, -1):
            log.info("loading: %s:%d", name, version)
            measurement = self._meter.begin()
            start = self._clock()
            warm_ups: list[int] = []  # when they began

            def warm(began: list[int] = warm_ups) -> None:
                began.append(self._clock())
                say(Change(Phase.WARMING))

            try:
                with cancellable_load(lambda: queued.stopped is not None):
                    model = built.loaded[version] = self._loader.load(definition, version, warm)
            except BaseException as error:
                # Boundary: a backend, which runs model code. It may raise anything, also SystemExit.
                self._meter.end(measurement)
                reason = _failure(name, version, error)
            else:
                end = self._clock()
                built.load_ns[version] = end - start
                warm_up = f", {(end - warm_ups[0]) / 1e9:.2f} s of it warm-up" if warm_ups else ""
                log.info("'%s' version %d loaded in %.2f s%s", name, version, (end - start) / 1e9, warm_up)
                for problem in uncustomizable_families(definition.config):
                    log.warning("model '%s': %s", name, problem.message)
                if self._options.keep_latencies:
                    model.statistics.keep_latencies()
                if self._options.keep_first_responses:
                    bounds_ms = first_response_buckets(model.spec.config)
                    model.statistics.keep_first_responses(bounds_ms, model.spec.decoupled)
                if self._options.keep_summaries:
                    model.statistics.keep_summaries()
                grown = built.host_bytes[version] = self._meter.end(measurement)
                log_taken(f"'{name}' version {version}", grown)
                return
            if not left or queued.stopped is not None:
                built.failures[version] = reason
                return
            log.info("retrying to load '%s' version %d, %d more times", name, version, left)
            say(Change(Phase.FAILED, reason), Change(Phase.LOADING))


def _failure(name: str, version: int, error: BaseException) -> str:
    """Logs the error of a version and returns it in Triton's nested form."""
    shown = as_conch_error(error)
    text = with_code(shown)
    # A ConchError's text says it all; other errors are logged with traceback.
    trace = None if isinstance(error, ConchError) else error
    log.error("failed to load '%s' version %d: %s", name, version, text, exc_info=trace)
    return text


def with_code(error: ConchError) -> str:
    """An error in Triton's nested form, ``Invalid argument: text``."""
    return f"{error.label}: {error.message}"

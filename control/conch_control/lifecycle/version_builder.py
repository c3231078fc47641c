"""Makes the versions that a load asks for, beside those that serve: all of them, or it says why not."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import ConchError, as_conch_error
from conch.core.execution.fleet import Resize
from conch.core.servable import Servable
from conch.core.stopping import stopping_with
from conch_control.config.model_spec import first_response_buckets
from conch_control.lifecycle.load_queue import Operation, Operations
from conch_control.lifecycle.memory_usage import MemoryMeter, mebibytes
from conch_control.lifecycle.model_definition import Definition
from conch_control.lifecycle.model_loader import Loader
from conch_control.lifecycle.version_diff import Treatment
from conch_control.lifecycle.version_phase import Phase
from conch_control.lifecycle.version_states import FORGOTTEN, UNFINISHED, Book, Change

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Made:
    """What has been made for a load, to be published or abandoned as a whole.

    Attributes:
        loaded: New versions.
        host_bytes: By how much the process has grown for each, where that is known.
        load_ns: How long each of them took.
        resizes: Changes of the number of instances of versions that stay.
        failures: Why versions could not be made, as it reads inside other texts.
    """

    loaded: dict[int, Servable] = field(default_factory=dict)
    host_bytes: dict[int, int | None] = field(default_factory=dict)
    load_ns: dict[int, int] = field(default_factory=dict)
    resizes: dict[int, Resize] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def abandon(self) -> None:
        """Closes all of it; what serves stays as it was."""
        for model in self.loaded.values():
            model.close()
        self.abandon_resizes()

    def abandon_resizes(self) -> None:
        """Closes instances that were added."""
        for resize in self.resizes.values():
            resize.abandon()
        self.resizes = {}


class Maker:
    """Makes versions.

    Args:
        loader: Makes one version ready.
        book: Where it is said how far they are.
        operations: Tells when a load is not to go on.
        retries: How often a version that failed is tried again.
        meter: Measures what they take.
        keep_latencies: Whether they count how long each request takes.
        keep_first_responses: Whether they count how long first responses take.
        keep_summaries: Whether they keep what quantiles of times are made of.
        clock: Monotonic time in nanoseconds.
    """

    def __init__(
        self,
        loader: Loader,
        book: Book,
        operations: Operations,
        retries: int,
        meter: MemoryMeter,
        keep_latencies: bool = False,
        keep_first_responses: bool = False,
        keep_summaries: bool = False,
        clock: Clock = monotonic_ns,
    ) -> None:
        self._loader = loader
        self._book = book
        self._operations = operations
        self._retries = retries
        self._meter = meter
        self._keep_latencies = keep_latencies
        self._keep_first_responses = keep_first_responses
        self._keep_summaries = keep_summaries
        self._clock = clock

    def make(
        self,
        operation: Operation,
        definition: Definition,
        versions: Iterable[int],
        serving: Mapping[int, Servable],
        treatments: Mapping[int, Treatment],
    ) -> Made:
        """Makes what a load needs.

        Args:
            operation: The load; once it is stopped nothing more is begun.
            definition: The model.
            versions: The versions that it selects.
            serving: Versions that serve.
            treatments: What to do with those of them that are selected; they are loaded if nothing is said.

        Raises:
            ConchError: The load was stopped before anything was made.
        """
        made = Made()
        resized = [version for version in versions if treatments.get(version) is Treatment.RESIZE]
        with stopping_with(lambda: operation.stopped is not None):
            changed = self._resize(made, definition, serving, resized)
        if not changed:
            treatments = {**treatments, **dict.fromkeys(resized, Treatment.LOAD)}
        if made.failures:
            return made
        anew = [version for version in versions if treatments.get(version, Treatment.LOAD) is Treatment.LOAD]
        try:
            self._begin(operation, [version for version in anew if version not in serving])
            for version in anew:
                if operation.stopped is None:
                    self._load(made, operation, definition, version, version not in serving)
        except BaseException:
            made.abandon()
            raise
        return made

    def _resize(
        self, made: Made, definition: Definition, serving: Mapping[int, Servable], versions: Iterable[int]
    ) -> bool:
        """Makes changes of instances ready; False if these versions have to be loaded anew."""
        for version in versions:
            try:
                resize = self._loader.resize(definition, serving[version])
            except BaseException as error:
                made.failures[version] = _failure(definition.name, version, error)
                return True
            if resize is None:
                made.abandon_resizes()
                return False
            made.resizes[version] = resize
        return True

    def _begin(self, operation: Operation, versions: Iterable[int]) -> None:
        """Says that versions which do not serve are being loaded; those guessed wrong are forgotten."""
        name = operation.name
        with self._operations.lock:
            operation.check()
            said = self._book.versions(name)
            unfinished = {version for version, status in said.items() if status.phase in UNFINISHED}
            staging = dict.fromkeys(set(versions) - unfinished, Change(Phase.STAGING))
            self._book.change(name, staging)
            ended = dict.fromkeys(unfinished - set(versions), Change(Phase.UNLOADED, FORGOTTEN))
            self._book.change(name, {**ended, **dict.fromkeys(versions, Change(Phase.LOADING))})

    def _load(
        self, made: Made, operation: Operation, definition: Definition, version: int, fresh: bool
    ) -> None:
        name = definition.name

        def say(*changes: Change) -> None:
            with self._operations.lock:
                if fresh and operation.stopped is None:
                    for change in changes:
                        self._book.change(name, {version: change})

        for left in range(self._retries, -1, -1):
            log.info("loading: %s:%d", name, version)
            measurement = self._meter.begin()
            start = self._clock()
            try:
                with stopping_with(lambda: operation.stopped is not None):
                    model = made.loaded[version] = self._loader.load(
                        definition, version, lambda: say(Change(Phase.WARMING))
                    )
            except BaseException as error:
                # Models are other people's code: one that calls sys.exit() fails like any other.
                self._meter.end(measurement)
                reason = _failure(name, version, error)
            else:
                made.load_ns[version] = self._clock() - start
                if self._keep_latencies:
                    model.statistics.keep_latencies()
                if self._keep_first_responses:
                    bounds_ms = first_response_buckets(model.spec.config)
                    model.statistics.keep_first_responses(bounds_ms, model.spec.decoupled)
                if self._keep_summaries:
                    model.statistics.keep_summaries()
                grown = made.host_bytes[version] = self._meter.end(measurement)
                if grown is not None:
                    log.info("'%s' version %d has taken %s", name, version, mebibytes(grown))
                return
            if not left or operation.stopped is not None:
                made.failures[version] = reason
                return
            log.info("retrying to load '%s' version %d, %d more times", name, version, left)
            say(Change(Phase.FAILED, reason), Change(Phase.LOADING))


def _failure(name: str, version: int, error: BaseException) -> str:
    """Logs why a version could not be made, and says it as Triton nests it: ``Invalid argument: text``."""
    shown = as_conch_error(error)
    text = with_code(shown)
    # The traceback of an error of ours says nothing that its text does not.
    trace = None if isinstance(error, ConchError) else error
    log.error("failed to load '%s' version %d: %s", name, version, text, exc_info=trace)
    return text


def with_code(error: ConchError) -> str:
    """An error as Triton nests it in other texts: ``Invalid argument: text``."""
    return f"{error.label}: {error.message}"

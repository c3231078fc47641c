"""Loads and unloads models together with the ensembles that depend on them.

| event                             | effect on other models                                                 |
|-----------------------------------|------------------------------------------------------------------------|
| ensemble is loaded                | composing models load first; new ones are marked implicit              |
| composing model is unloaded       | dependent ensembles unload and wait                                    |
| composing model is loaded again   | waiting ensembles reload; loaded ones refresh (checks, labels)         |
| ensemble is unloaded "with parts" | implicit models without other dependents unload                        |

Owns: implicit models, waiting ensembles, overrides in force. Locks: `_lock` guards them, never held while
loading. Threads: a pool `conch-load` per call with several models.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter

from conch.core.errors import ConchError, without_details
from conch.core.load_statistics import LoadStatistics
from conch.core.registry import Entry, Registry
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.ensemble_loader import EnsembleError, composing_models, cycle_text, failure_text
from conch_control.lifecycle.load_queue import SupersededError
from conch_control.lifecycle.model_definition import NoVersionError, PollError
from conch_control.lifecycle.model_lifecycle import ModelLifecycle
from conch_control.lifecycle.version_states import VersionStates
from conch_control.repository.dependency_graph import (
    Graph,
    build_graph,
    find_cycles,
    read_composing_models,
    run_in_order,
)
from conch_control.repository.source import DUPLICATE, Scan

log = logging.getLogger(__name__)

NOT_LOADED = "the model could not be loaded"


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """An ensemble that waits for a composing model; a new object for each wait."""

    override: str | None


_NO_ENTRY = Entry()


class EnsembleDependencies:
    """Dependencies between the models of a server."""

    def __init__(
        self,
        options: ControlOptions,
        registry: Registry,
        lifecycle: ModelLifecycle,
        states: VersionStates,
        statistics: LoadStatistics,
    ) -> None:
        self._options = options
        self._registry = registry
        self._lifecycle = lifecycle
        self._states = states
        self._statistics = statistics
        self._lock = threading.Lock()  # guards the next three
        self._implicit: set[str] = set()  # loaded only for ensembles
        self._waiting: dict[str, _Waiting] = {}  # ensembles that wait for a composing model
        self._overrides: dict[str, str] = {}  # overrides in force, by loaded model

    def load(self, names: Iterable[str], scan: Scan, override: str | None = None) -> dict[str, Exception]:
        """Loads models after their composing models; returns the errors by model, also of composing ones."""
        wanted = frozenset(names)
        with self._lifecycle.queue.call() as ticket:
            graph = self._graph(wanted, scan, override)
            cyclic = find_cycles(graph)
            entries = self._registry.entries
            served = {name: entries.get(name, _NO_ENTRY).ready for name in graph}

            def run(name: str, failures: Mapping[str, Exception]) -> None:
                if name in cyclic:
                    raise self._refusal(name, cycle_text(name, cyclic[name]))
                if not failures.keys().isdisjoint(graph[name]):
                    self._check_parts(name, graph[name], failures)
                self._load_one(name, scan, override if name in wanted else None, ticket)
                self._check_still_composed(name)

            order = {name: () if name in cyclic else graph[name] for name in graph} if cyclic else graph
            failures = run_in_order(order, run, self._options.load_threads)
            entries = self._registry.entries
            changed = {
                name for name, before in served.items() if entries.get(name, _NO_ENTRY).ready != before
            }
            self._note_loaded(wanted, served, changed, failures, override)
            if changed:
                self._refresh(changed, served)
                if self._options.mode != "on-demand":  # there a request loads them
                    self._reload_waiting(scan, changed, failures)
            return failures

    def load_selected(self, name: str, scan: Scan) -> None:
        """Loads a model whose selection of versions has changed, and perhaps its files, if it is loaded.

        Raises:
            ConchError: It can't be loaded; the previous versions still serve.
        """
        with self._lifecycle.queue.call() as ticket:
            if self._lifecycle.origin(name) is None:  # a later unload supersedes this call
                return
            before = self._ready(name)
            self._load_one(name, scan, None, ticket)
            self._lifecycle.refresh(name, keep=True)  # with equal files nothing was done
            if self._ready(name) != before:
                self._refresh({name}, ())

    def _load_one(self, name: str, scan: Scan, override: str | None, ticket: int) -> None:
        if name in scan.duplicates:
            log.error("failed to poll model '%s': not unique across all model repositories", name)
            self._states.failed(name, DUPLICATE)
            self._statistics.failed(name)
            raise PollError(name, DUPLICATE)
        source = scan.models.get(name)
        if source is None:
            raise _not_found(name, scan)
        self._lifecycle.load(source, override, ticket)

    def needs_late_answers(self, name: str, scan: Scan, override: str | None) -> bool:
        """True if a load may need a model of a repository that has not answered yet.

        That is the model, composing models that do not serve, or waiting ensembles.
        """
        if not scan.late:
            return False
        with self._lock:
            if not self._waiting.keys().isdisjoint(scan.remembered):
                return True
        graph = self._graph(frozenset({name}), scan, override)
        known = scan.models.keys() - scan.remembered.keys() | scan.duplicates
        return any(each not in known and (each == name or not self._ready(each)) for each in graph)

    def unload(self, name: str, with_parts: bool) -> None:
        """Unloads a model, and the ensembles that depend on it; an unknown one is ignored.

        `with_parts` also unloads, after its last request, the models loaded only for it.
        """
        with self._lock:
            self._waiting.pop(name, None)
            self._overrides.pop(name, None)
            self._implicit.discard(name)
        self._unload_dependents(name)
        parts = sorted(set(composing_models(self._entry(name)))) if with_parts else []
        self._lifecycle.unload(name, then=lambda: self._unload_unused(parts))
        # Again, for ensembles whose loads were about to end; later ones check themselves.
        if not self._ready(name):
            self._unload_dependents(name)

    def evict(self, name: str, gone: Callable[[], None]) -> None:
        """Unloads a model without loaded ensembles above it; `gone` is called once its memory is free."""
        with self._lock:
            self._waiting.pop(name, None)
            self._overrides.pop(name, None)
            self._implicit.discard(name)
        self._lifecycle.unload(name, gone=gone)

    def _unload_dependents(self, name: str) -> None:
        """Unloads dependent ensembles and lets them wait for the model."""
        ensembles = self._dependents({name})
        with self._lock:
            self._waiting.update(
                (ensemble, _Waiting(self._overrides.get(ensemble))) for ensemble in ensembles
            )
        for ensemble in ensembles:
            self._lifecycle.unload(ensemble)

    def _unload_unused(self, parts: Iterable[str]) -> None:
        for part in parts:
            if part in self._implicit and not self._dependents({part}):
                self.unload(part, True)

    def _graph(self, wanted: frozenset[str], scan: Scan, override: str | None) -> Graph:
        """Composing models, as far as the repositories tell."""

        def parts(name: str) -> tuple[str, ...]:
            source = scan.models.get(name)
            if source is None:
                return ()
            return read_composing_models(source, self._options, override if name in wanted else None)

        return build_graph(wanted, parts)

    def _entry(self, name: str) -> Entry:
        return self._registry.entries.get(name, _NO_ENTRY)

    def _ready(self, name: str) -> Mapping[int, object]:
        return self._entry(name).ready

    def _check_parts(self, name: str, parts: Iterable[str], failures: Mapping[str, Exception]) -> None:
        """Raises Triton's error for an ensemble whose composing models failed to load."""
        failed = {part: failures[part] for part in parts if part in failures and not self._ready(part)}
        missing = [part for part, error in failed.items() if isinstance(error, PollError)]
        if missing:
            raise self._refusal(
                name,
                f"ensemble {name} contains models that are not available or ambiguous: {', '.join(missing)}",
            )
        for part, error in failed.items():
            if isinstance(error, EnsembleError):
                raise self._refusal(
                    name,
                    f"ensemble '{name}' depends on '{part}' which is not valid. Model '{part}' failed with "
                    f"error: {error.reason}",
                )
            reason = failure_text(self._entry(part))
            if not reason:
                shown = without_details(error, NOT_LOADED)
                reason = shown.reason if isinstance(shown, NoVersionError) else shown.message
            raise self._refusal(
                name,
                f"ensemble '{name}' depends on '{part}' which has no loaded version. Model '{part}' loading "
                f"failed with error: {reason}",
            )

    def _check_still_composed(self, name: str) -> None:
        """Unloads the ensemble if a composing model was unloaded during its load.

        Raises:
            EnsembleError: One was.
        """
        for part in composing_models(self._entry(name)):
            if not self._ready(part):
                self._lifecycle.unload(name)
                raise self._refusal(
                    name, f"ensemble '{name}' depends on '{part}' which has no loaded version."
                )

    def _refusal(self, name: str, reason: str) -> EnsembleError:
        """The error of an ensemble that can't be loaded; counts it as a failed load."""
        self._statistics.failed(name)
        return EnsembleError(name, reason)

    def _note_loaded(
        self,
        wanted: frozenset[str],
        served: Mapping[str, Mapping[int, object]],
        changed: Container[str],
        failures: Mapping[str, Exception],
        override: str | None,
    ) -> None:
        with self._lock:
            for name in served.keys() - failures.keys():
                self._waiting.pop(name, None)
                if name in wanted:
                    self._implicit.discard(name)
                elif not served[name]:
                    self._implicit.add(name)
                if name in wanted and override is not None:
                    self._overrides[name] = override
                elif name in changed:  # else the override is still in force
                    self._overrides.pop(name, None)
            for name in wanted:
                if isinstance(failures.get(name), EnsembleError) and not served[name]:
                    self._waiting[name] = _Waiting(override)

    def _dependents(self, names: set[str]) -> list[str]:
        """Loaded ensembles that depend on any of the models, outermost first."""
        parts = {
            name: set(composing_models(entry))
            for name, entry in self._registry.entries.items()
            if entry.ready
        }
        dependents: set[str] = set()
        found = set(names)
        while found:
            found = {name for name in parts.keys() - dependents - names if parts[name] & found}
            dependents |= found
        needed_by: Graph = {
            name: tuple(other for other in dependents if name in parts[other]) for name in sorted(dependents)
        }
        return list(TopologicalSorter(needed_by).static_order())

    def _refresh(self, changed: set[str], fresh: Iterable[str]) -> None:
        """Refreshes loaded ensembles after changes of composing models."""
        for name in reversed(self._dependents(changed)):
            if name in fresh and name in changed:
                continue
            try:
                self._lifecycle.refresh(name)
            except SupersededError:
                continue  # an unload is no failure
            except ConchError as error:
                log.error(
                    "ensemble '%s' goes on as it was, though a model that it needs has changed: %s",
                    name,
                    error.message,
                )

    def _reload_waiting(self, scan: Scan, changed: Iterable[str], tried: Container[str]) -> None:
        """Reloads waiting ensembles of changed models if all their models are ready; others keep waiting.

        `tried` ensembles have just failed with the current models.
        """
        fresh = set(changed)
        while fresh:
            with self._lock:
                waiting = sorted(self._waiting.items(), key=lambda each: each[0])
            back: set[str] = set()
            for name, entry in waiting:
                source = scan.models.get(name)
                if source is None or name in tried:
                    continue
                parts = read_composing_models(source, self._options, entry.override)
                if fresh.isdisjoint(parts) or not all(self._ready(part) for part in parts):
                    continue
                with self._lock:
                    if self._waiting.get(name) is not entry:
                        continue
                    # Under the lock: a later explicit unload gets a higher ticket.
                    ticket = self._lifecycle.queue.ticket()
                try:
                    self._load_one(name, scan, entry.override, ticket)
                    self._check_still_composed(name)
                except ConchError as error:
                    log.error("failed to load '%s' again: %s", name, error.message)
                    continue
                with self._lock:
                    if self._waiting.get(name) is entry:
                        del self._waiting[name]
                back.add(name)
            fresh, tried = back, ()


def _not_found(name: str, scan: Scan) -> PollError:
    """The error for a model that no repository lists; transient if one is unreadable."""
    reason = "model not found in any model repository"
    if scan.unreadable:
        failures = "; ".join(f"'{location}': {text}" for location, text in scan.unreadable.items())
        reason += f" that can be read; some can not: {failures}"
    log.error("failed to poll model '%s': %s", name, reason)
    error = PollError(name, reason)
    if scan.unreadable:
        error.__cause__ = OSError(reason)  # marks the error as transient
    return error

"""Loads and unloads models with regard to the ensembles that they are parts of.

An ensemble's parts are loaded before it. A part that was loaded for an ensemble only may go with it. While a
part is unloaded so are the ensembles that need it, and they come back with it; when a part has been reloaded
they are checked against it and get its labels.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from graphlib import TopologicalSorter

from conch.core.errors import ConchError, as_conch_error
from conch.core.loads import LoadStatistics
from conch.core.registry import Entry, Registry
from conch_control.lifecycle.ensemble_loader import EnsembleError, circle_text, failure_text, parts_of
from conch_control.lifecycle.load_queue import SupersededError
from conch_control.lifecycle.model_definition import NoVersionError, PollError
from conch_control.lifecycle.model_lifecycle import Lifecycle
from conch_control.options import ControlOptions
from conch_control.repository.dependency_graph import Graph, build_graph, circles, read_parts, run_in_order
from conch_control.repository.source import Scan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Left:
    """An ensemble that waits for a part; each time it begins to wait anew.

    Attributes:
        override: Config in JSON to use in place of its file, or None.
    """

    override: str | None


LoadOne = Callable[[str, str | None, int], None]
"""Loads a model by name, with a config in JSON to use in place of its file or None, and the ticket of the
call that asks for it; raises `ConchError`."""


class Composition:
    """Who needs whom among the models of a server.

    Args:
        options: Settings of the control plane.
        registry: Where models are published.
        lifecycle: Loads and unloads single models, and counts those loads.
        statistics: Where the loads of ensembles are counted that fail before or after that.
    """

    def __init__(
        self, options: ControlOptions, registry: Registry, lifecycle: Lifecycle, statistics: LoadStatistics
    ) -> None:
        self._options = options
        self._registry = registry
        self._lifecycle = lifecycle
        self._statistics = statistics
        self._lock = threading.Lock()  # guards these
        self._for_others: set[str] = set()  # loaded for ensembles only
        self._left: dict[str, _Left] = {}  # ensembles that wait for a part
        self._overrides: dict[str, str] = {}  # configs in JSON in place of files, of what is loaded

    def load(
        self, names: Iterable[str], scan: Scan, load_one: LoadOne, override: str | None = None
    ) -> dict[str, Exception]:
        """Loads models, after what they are made of.

        Args:
            names: The models.
            scan: What the repositories hold.
            load_one: Loads one of them.
            override: A config in JSON to use for all that are named in place of their files.

        Returns:
            What went wrong, by model; also for models that others are made of.
        """
        with self._lifecycle.call() as ticket:
            return self._load(frozenset(names), scan, load_one, override, ticket)

    def _load(
        self, wanted: frozenset[str], scan: Scan, load_one: LoadOne, override: str | None, ticket: int
    ) -> dict[str, Exception]:
        graph = self._graph(wanted, scan, override)
        turning = circles(graph)
        served = {name: self._ready(name) for name in graph}

        def run(name: str, failures: Mapping[str, Exception]) -> None:
            with self._counting(name):
                if name in turning:
                    raise EnsembleError(name, circle_text(name, turning[name]))
                self._check_parts(name, graph[name], failures)
            load_one(name, override if name in wanted else None, ticket)
            self._check_whole(name)

        order = {name: () if name in turning else graph[name] for name in graph}
        failures = run_in_order(order, run, self._options.load_threads)
        self._note_loaded(wanted, served, failures, override)
        changed = {name for name, before in served.items() if self._ready(name) != before}
        if changed:
            self._refresh(changed, served)
            self._bring_back(scan, load_one, changed, failures)
        return failures

    def needs_late(self, name: str, scan: Scan, override: str | None) -> bool:
        """Whether something that a load concerns may be in a repository that has not answered so far.

        That is the model, what it is made of and does not serve, and ensembles that may come back with it.

        Args:
            name: The model.
            scan: What the repositories hold.
            override: A config in JSON to use for the model in place of its file.
        """
        if not scan.late:
            return False
        with self._lock:
            if not self._left.keys().isdisjoint(scan.remembered):
                return True
        graph = self._graph(frozenset({name}), scan, override)
        known = scan.models.keys() - scan.remembered.keys() | scan.duplicates
        return any(each not in known and (each == name or not self._ready(each)) for each in graph)

    def unload(self, name: str, with_parts: bool) -> None:
        """Unloads a model, and the ensembles that need it.

        Args:
            name: The model; one that is not loaded is no error.
            with_parts: Whether to unload, when its requests are finished, what was loaded for it only.
        """
        with self._lock:
            self._left.pop(name, None)
            self._overrides.pop(name, None)
            self._for_others.discard(name)
        self._unload_above(name)
        parts = sorted(set(parts_of(self._entry(name)))) if with_parts else []
        self._lifecycle.unload(name, then=lambda: self._unload_unneeded(parts))
        # Ensembles whose loads were about to end; those that end later look themselves.
        if not self._ready(name):
            self._unload_above(name)

    def _unload_above(self, name: str) -> None:
        """Unloads the ensembles that need a model, until it is back."""
        ensembles = self._above({name})
        with self._lock:
            self._left.update((ensemble, _Left(self._overrides.get(ensemble))) for ensemble in ensembles)
        for ensemble in ensembles:
            self._lifecycle.unload(ensemble)

    def _unload_unneeded(self, parts: Iterable[str]) -> None:
        for part in parts:
            if part in self._for_others and not self._above({part}):
                self.unload(part, True)

    def _graph(self, wanted: frozenset[str], scan: Scan, override: str | None) -> Graph:
        """What models are made of, as far as the repositories tell."""

        def parts(name: str) -> tuple[str, ...]:
            source = scan.models.get(name)
            if source is None:
                return ()
            return read_parts(source, self._options, override if name in wanted else None)

        return build_graph(wanted, parts)

    def _entry(self, name: str) -> Entry:
        return self._registry.entries.get(name, Entry())

    def _ready(self, name: str) -> Mapping[int, object]:
        return self._entry(name).ready

    def _check_parts(self, name: str, parts: Iterable[str], failures: Mapping[str, Exception]) -> None:
        """Raises what Triton says of an ensemble whose parts could not be loaded."""
        failed = {part: failures[part] for part in parts if part in failures and not self._ready(part)}
        missing = [part for part, error in failed.items() if isinstance(error, PollError)]
        if missing:
            raise EnsembleError(
                name,
                f"ensemble {name} contains models that are not available or ambiguous: {', '.join(missing)}",
            )
        for part, error in failed.items():
            if isinstance(error, EnsembleError):
                raise EnsembleError(
                    name,
                    f"ensemble '{name}' depends on '{part}' which is not valid. Model '{part}' failed with "
                    f"error: {error.reason}",
                )
            reason = failure_text(self._entry(part))
            if not reason:
                reason = error.reason if isinstance(error, NoVersionError) else as_conch_error(error).message
            raise EnsembleError(
                name,
                f"ensemble '{name}' depends on '{part}' which has no loaded version. Model '{part}' loading "
                f"failed with error: {reason}",
            )

    def _check_whole(self, name: str) -> None:
        """Checks that no part of an ensemble was unloaded while it was loaded; else it goes too.

        Raises:
            EnsembleError: One was.
        """
        for part in parts_of(self._entry(name)):
            if not self._ready(part):
                self._lifecycle.unload(name)
                with self._counting(name):
                    raise EnsembleError(
                        name, f"ensemble '{name}' depends on '{part}' which has no loaded version."
                    )

    @contextmanager
    def _counting(self, name: str) -> Iterator[None]:
        """Counts a load of an ensemble as failed if it fails here."""
        try:
            yield
        except EnsembleError:
            self._statistics.failed(name)
            raise

    def _note_loaded(
        self,
        wanted: frozenset[str],
        served: Mapping[str, Mapping[int, object]],
        failures: Mapping[str, Exception],
        override: str | None,
    ) -> None:
        with self._lock:
            for name in served.keys() - failures.keys():
                self._left.pop(name, None)
                if name in wanted:
                    self._for_others.discard(name)
                elif not served[name]:
                    self._for_others.add(name)
                if name in wanted and override is not None:
                    self._overrides[name] = override
                elif self._ready(name) != served[name]:  # else nothing has changed, and it is still in force
                    self._overrides.pop(name, None)
            for name in wanted:
                if isinstance(failures.get(name), EnsembleError) and not served[name]:
                    self._left[name] = _Left(override)

    def _above(self, names: set[str]) -> list[str]:
        """Loaded ensembles that need any of some models, each after those that need it."""
        parts = {name: set(parts_of(entry)) for name, entry in self._registry.entries.items() if entry.ready}
        above: set[str] = set()
        found = set(names)
        while found:
            found = {name for name in parts.keys() - above - names if parts[name] & found}
            above |= found
        needed_by: Graph = {
            name: tuple(other for other in above if name in parts[other]) for name in sorted(above)
        }
        return list(TopologicalSorter(needed_by).static_order())

    def _refresh(self, changed: set[str], fresh: Iterable[str]) -> None:
        """Has loaded ensembles see what has become of their parts; those just loaded have."""
        for name in reversed(self._above(changed)):
            if name in fresh and name in changed:
                continue
            try:
                self._lifecycle.refresh(name)
            except SupersededError:
                continue  # it is being unloaded, which is no failure
            except ConchError as error:
                log.error(
                    "ensemble '%s' goes on as it was, though a model that it needs has changed: %s",
                    name,
                    error.message,
                )

    def _bring_back(
        self, scan: Scan, load_one: LoadOne, changed: Iterable[str], tried: Container[str]
    ) -> None:
        """Loads ensembles again whose parts are all there again; those that fail go on waiting.

        Args:
            scan: What the repositories hold.
            load_one: Loads a model.
            changed: Models that have changed: only what needs any of them has another chance.
            tried: Ensembles that have failed with these models as they are now.
        """
        fresh = set(changed)
        while fresh:
            with self._lock:
                waiting = sorted(self._left.items(), key=lambda each: each[0])
            back: set[str] = set()
            for name, left in waiting:
                source = scan.models.get(name)
                if source is None or name in tried:
                    continue
                parts = read_parts(source, self._options, left.override)
                if fresh.isdisjoint(parts) or not all(self._ready(part) for part in parts):
                    continue
                with self._lock:
                    if self._left.get(name) is not left:
                        continue
                    ticket = self._lifecycle.ticket()  # one that an unload on purpose would come after
                try:
                    load_one(name, left.override, ticket)
                    self._check_whole(name)
                except ConchError as error:
                    log.error("failed to load '%s' again: %s", name, error.message)
                    continue
                with self._lock:
                    if self._left.get(name) is left:
                        del self._left[name]
                back.add(name)
            fresh, tried = back, ()

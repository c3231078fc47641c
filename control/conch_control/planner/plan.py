"""Plan of loads and unloads: a pure state machine without threads, clock or storage.

Inputs are snapshots of the repositories, ends of operations, passed time and changes by others, each with
its time. The output is operations to start. States of one model:

| state      | event                                                  | next state                        |
|------------|--------------------------------------------------------|-----------------------------------|
| as asked   | a snapshot differs from what was asked for             | settling                          |
| settling   | two equal snapshots `settle_ns` apart, or a new marker | to do                             |
| settling   | another change                                         | settling, time restarts           |
| to do      | a free slot; composing models are done                 | in progress (load or unload)      |
| in progress| ends with DONE or FAILED                               | as asked, or settling if changed  |
| in progress| ends with TRANSIENT                                    | to do, after a growing pause      |
| as asked   | FAILED, and a composing model was loaded               | to do                             |

A model with a marker ``.incomplete`` stays in settling. Absence settles too, as renaming a directory removes
it for a moment. Absence in a partial snapshot means nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from conch_control.repository.layout import Fingerprint, changed_paths, is_incomplete, marked_complete

FIRST_RETRY_NS = 1_000_000_000
LAST_RETRY_NS = 60_000_000_000
BESIDE = "labels or rollout"
"""Changes without a changed file, for the log."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model in a snapshot.

    Attributes:
        fingerprint: State of its files, without markers.
        markers: State of its marker files.
        parts: Composing models, for an ensemble.
        beside: Settings of the model in the repository besides its files; see `Labelled` and `Declared`.
    """

    fingerprint: Fingerprint
    markers: Fingerprint = ()
    location: str = ""
    parts: tuple[str, ...] = ()
    beside: Hashable = ()

    @property
    def incomplete(self) -> bool:
        """True if a marker says that files are missing."""
        return is_incomplete(self.markers)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Result of polling the repositories.

    Attributes:
        models: The models; None for one whose state is unknown (not polled, unreadable, or a duplicate).
        partial: A repository was unreadable, so that the absence of a model means nothing.
        failed: A repository or a model was unreadable, so that a change may have been missed.
        duplicates: Names in more than one repository; such models are unloaded.
        age_ns: Age of the oldest listing when the poll began.
    """

    models: Mapping[str, FoundModel | None]
    partial: bool = False
    failed: bool = False
    age_ns: int = 0
    duplicates: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Operation:
    """A task for the agent; `changed` has the files that differ from the last load, or `BESIDE`."""

    kind: Literal["load", "unload"]
    name: str
    changed: tuple[str, ...] = field(default=(), compare=False)


class LoadOutcome(Enum):
    """Result of a load or unload."""

    DONE = "done"
    FAILED = "failed"
    """Fails again unless the files change."""
    TRANSIENT = "transient"
    """A retry may succeed."""


class _Unknown(Enum):
    UNKNOWN = "unknown"


_UNKNOWN = _Unknown.UNKNOWN


@dataclass(slots=True)
class _Model:
    """State of one model.

    Attributes:
        since: End of the first poll that found the current state.
        found: Current state; None if absent.
        settled: The current state may be acted on.
        done: State last asked for: a model, None (unloaded or never asked for), or unknown.
        failed: The load failed in a way that other models' files may cure.
        failures: Transient failures in a row.
        retry_at: Time of the next try; 0 for now.
        external: Loaded by others although no repository has it.
        observable: A poll could have found it.
    """

    since: int
    found: FoundModel | None = None
    settled: bool = False
    done: FoundModel | _Unknown | None = None
    in_progress: Operation | None = None
    failed: bool = False
    failures: int = 0
    retry_at: int = 0
    external: bool = False
    observable: bool = True

    @property
    def changed(self) -> bool:
        """True if the current state is not the one last asked for."""
        if self.external:
            return False
        return not _same(self.found, self.done)

    @property
    def incomplete(self) -> bool:
        """True if a marker says so."""
        return self.found is not None and self.found.incomplete

    @property
    def settling(self) -> bool:
        """True if another poll decides whether there is something to do."""
        return self.observable and self.changed and not self.settled and not self.incomplete

    def is_now(self, found: FoundModel | None, now: int) -> None:
        """Records a change."""
        self.found = found
        self.since = now
        self.observable = True
        self.settled = self.failed = False
        self.failures = self.retry_at = 0


def _same(found: FoundModel | None, done: FoundModel | _Unknown | None) -> bool:
    if found is None or done is None:
        return found is done
    return done is not _UNKNOWN and (found.fingerprint, found.beside) == (done.fingerprint, done.beside)


@dataclass
class PlannerPlan:
    """State machine, not thread-safe; acts after `settle_ns` without changes, on `most` models at once."""

    settle_ns: int
    most: int = 4
    _models: dict[str, _Model] = field(default_factory=dict, init=False)

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def adopt(self, snapshot: Snapshot, now: int) -> None:
        """Takes the models of a snapshot as asked for, except incomplete ones.

        Models without a known state are kept, so that their absence is noticed later.
        """
        for name, found in snapshot.models.items():
            if found is None:
                self._models[name] = _Model(now, done=_UNKNOWN, observable=False)
            else:
                done = None if found.incomplete else found
                self._models[name] = _Model(now, found, settled=done is not None, done=done)

    def attach(self, running: Iterable[str], now: int) -> None:
        """Starts with an agent whose running models are known, but not their file states.

        Everything is asked for once; the agent skips what it has.
        """
        for name in running:
            self._models.setdefault(name, _Model(now, observable=False))
        for model in self._models.values():
            model.done, model.external = _UNKNOWN, False

    def snapshot_taken(self, snapshot: Snapshot, began: int, now: int) -> list[Operation]:
        """Processes a snapshot."""
        began -= snapshot.age_ns
        # Duplicate names are no models. Those never loaded are kept.
        twice = {
            name
            for name in snapshot.duplicates & self._models.keys()
            if isinstance(self._models[name].done, FoundModel)
        }
        for name, found in snapshot.models.items():
            if name in twice:
                continue
            if found is not None:
                self._seen(name, found, snapshot.partial, began, now)
            elif (model := self._models.get(name)) is not None and model.found is None:
                model.since = now  # not absent
                model.settled = False
        for name in twice | (self._models.keys() - snapshot.models.keys()):
            model = self._models[name]
            if snapshot.partial:
                if model.found is None:
                    model.since, model.settled = now, False
            elif model.found is not None or not model.observable:
                model.is_now(None, now)
            elif began - model.since >= self.settle_ns:
                model.settled = True
        return self._start(now)

    def finished(self, operation: Operation, outcome: LoadOutcome, now: int) -> list[Operation]:
        """Processes the end of an operation."""
        model = self._models[operation.name]
        model.in_progress = None
        if outcome is LoadOutcome.TRANSIENT or (outcome is LoadOutcome.FAILED and operation.kind == "unload"):
            if not model.changed:  # else the new state is tried at once
                model.failures += 1
                model.retry_at = now + min(FIRST_RETRY_NS << min(model.failures - 1, 10), LAST_RETRY_NS)
            model.done = _UNKNOWN
        else:
            model.failures = model.retry_at = 0
            model.failed = outcome is LoadOutcome.FAILED
            if operation.kind == "load" and outcome is LoadOutcome.DONE:
                self._retry_dependents(operation.name)
        return self._start(now)

    def tick(self, now: int) -> list[Operation]:
        """Processes passed time; see `wake_at`."""
        return self._start(now)

    def external_change(self, name: str, running: bool, now: int) -> list[Operation]:
        """Processes a load or unload by others; it holds until the model's files change."""
        model = self._models.get(name)
        if model is None:
            if running:
                self._models[name] = _Model(now, external=True)
        elif model.found is None:
            model.external = running
        elif not running and model.settled and model.in_progress is None:
            model.done = model.found
            model.failed = False
            model.failures = model.retry_at = 0
        return self._start(now)

    @property
    def wake_at(self) -> int | None:
        """Time of the next `tick`; None for none."""
        waiting = (model.retry_at for model in self._models.values() if self._awaits_retry(model))
        return min(waiting, default=None)

    @property
    def snapshot_due(self) -> int | None:
        """Time of the next poll that settling needs; None for none."""
        times = (model.since + self.settle_ns for model in self._models.values() if model.settling)
        return min(times, default=None)

    @property
    def settling(self) -> frozenset[str]:
        """Models that need that poll."""
        return frozenset(name for name, model in self._models.items() if model.settling)

    @property
    def in_progress(self) -> frozenset[str]:
        """Models with a running operation."""
        return frozenset(name for name, model in self._models.items() if model.in_progress is not None)

    def _seen(self, name: str, found: FoundModel, partial: bool, began: int, now: int) -> None:
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = _Model(now, found)
        elif not _same(found, model.found):
            if partial and model.found is not None and model.found.location != found.location:
                return  # it may be a duplicate
            model.is_now(found, now)
        model.found, model.external = found, False
        if found.incomplete:
            model.since, model.settled = now, False
        elif not model.settled:
            model.settled = began - model.since >= self.settle_ns or _marked_complete(found, model.done)

    def _retry_dependents(self, name: str) -> None:
        """Retries failed ensembles that contain the model."""
        for model in self._models.values():
            if model.failed and name in self._composing(model.found):
                model.failed, model.done = False, _UNKNOWN

    def _start(self, now: int) -> list[Operation]:
        room = self.most - len(self.in_progress)
        begun: list[Operation] = []
        for name, model in list(self._models.items()):
            if model.retry_at <= now:
                model.retry_at = 0
            if (
                model.found is None
                and model.done is None
                and model.in_progress is None
                and not model.external
            ):
                del self._models[name]
        for name, model in self._models.items():
            if len(begun) >= room:
                break
            if model.in_progress is None and model.changed and model.settled and not model.retry_at:
                found = model.found
                if self._is_needed(name) if found is None else self._composing_pending(name, found):
                    continue
                changed = _changes(model.done, found)
                model.in_progress = Operation("unload" if found is None else "load", name, changed)
                model.done, model.failed = found, False
                begun.append(model.in_progress)
        return begun

    def _awaits_retry(self, model: _Model) -> bool:
        return model.retry_at > 0 and model.in_progress is None and model.changed and model.settled

    def _composing_pending(self, name: str, found: FoundModel) -> bool:
        """True if a composing model must be loaded or completed first."""
        return any(
            part.in_progress is not None or (part.changed and part.found is not None and not part.retry_at)
            for other in self._composing(found)
            if (part := self._models.get(other)) is not None and name not in self._composing(part.found)
        )

    def _is_needed(self, name: str) -> bool:
        """True if an ensemble that uses the model is about to change."""
        return any(
            self._becomes_another(model) and isinstance(model.done, FoundModel) and name in model.done.parts
            for model in self._models.values()
        ) or any(
            model.in_progress is not None and model.found is not None and bool(model.found.parts)
            for model in self._models.values()
        )

    def _becomes_another(self, model: _Model) -> bool:
        return model.found is not None and model.changed and not model.incomplete

    def _composing(self, found: FoundModel | None) -> frozenset[str]:
        """All composing models, recursively."""
        return frozenset(self._walk(found)) if found is not None and found.parts else frozenset()

    def _walk(self, found: FoundModel) -> Iterator[str]:
        seen: set[str] = set()
        unseen = list(found.parts)
        while unseen:
            name = unseen.pop()
            if name not in seen:
                seen.add(name)
                yield name
                part = self._models.get(name)
                unseen += part.found.parts if part is not None and part.found is not None else ()


def _changes(done: FoundModel | _Unknown | None, found: FoundModel | None) -> tuple[str, ...]:
    """Changed paths, or `BESIDE`; empty for a new or removed model, or one of unknown state."""
    if not isinstance(done, FoundModel) or found is None:
        return ()
    return changed_paths(done.fingerprint, found.fingerprint) or (BESIDE,)


def _marked_complete(found: FoundModel, done: FoundModel | _Unknown | None) -> bool:
    if isinstance(done, FoundModel):
        return marked_complete(found.fingerprint, found.markers, done.fingerprint, done.markers)
    return marked_complete(found.fingerprint, found.markers, (), ())

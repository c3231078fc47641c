"""What to load and unload, as a pure state machine: no thread, no clock, no storage.

It is told what a look at the repositories has found, that an operation has ended, that time has passed and
what others have done, each with the time it happened. It answers with operations to start. Of each model

```
                  changed, settled              asked for                  it ends
    as it was ----------------------> to be done --------> being done ----------------> as it was
        ^        (never while a          ^  ^                 |     changed meanwhile       |
        |     marker says incomplete)    |  +-----------------+                             |
        +--------------------------------+  later, after a failure of the storage           |
                                         ^                                                  |
                                         +--------------------------------------------------+
```

A change has settled when two looks, the settle time apart, have found the same, or when a marker vouches for
it. That a model is gone has to settle too: while a directory is being renamed there is a moment without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from conch_control.repository.layout import Fingerprint, differing
from conch_control.repository.markers import is_incomplete, vouched_for

FIRST_RETRY_NS = 1_000_000_000
LAST_RETRY_NS = 60_000_000_000


@dataclass(frozen=True, slots=True)
class FoundModel:
    """What a look has found of a model.

    Attributes:
        fingerprint: State of its files, without markers.
        markers: The part of the state that is about markers.
        location: Where it is.
        parts: Models that it is made of, if it is an ensemble.
    """

    fingerprint: Fingerprint
    markers: Fingerprint = ()
    location: str = ""
    parts: tuple[str, ...] = ()

    @property
    def incomplete(self) -> bool:
        """Whether a marker says that something is still to come."""
        return is_incomplete(self.markers)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a look at the repositories has found.

    Attributes:
        models: The models that are there; None for one of which nothing more is known, as its storage did not
            answer, nobody asked, or it is there twice.
        partial: Whether a repository could not be read, so that the absence of a model says nothing.
        failed: Whether that, or a model, could not be read, so that a change may have been missed.
        duplicates: Those that are there twice: what has been loaded under such a name goes.
        age_ns: How old what it has found may have been when it began.
    """

    models: Mapping[str, FoundModel | None]
    partial: bool = False
    failed: bool = False
    age_ns: int = 0
    duplicates: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Operation:
    """Something to have the agent do.

    Attributes:
        kind: What to do.
        name: The model to do it with.
        changed: The files because of which it is loaded again, if it has been asked for in another state.
    """

    kind: Literal["load", "unload"]
    name: str
    changed: tuple[str, ...] = field(default=(), compare=False)


class Outcome(Enum):
    """How an operation has ended."""

    DONE = "done"
    FAILED = "failed"
    """It will fail again as long as the files are what they are."""
    TRANSIENT = "transient"
    """Another try may succeed."""


class _Unknown(Enum):
    UNKNOWN = "unknown"


_UNKNOWN = _Unknown.UNKNOWN


@dataclass(slots=True)
class _Model:
    """What is known of a model.

    Attributes:
        since: When the look ended that was the first to find it as it is now.
        found: How it was found last; None if it was not there.
        settled: Whether that is not about to change.
        done: What the last operation was about: a state of the files, or None for an unload or for a model
            that was never asked for.
        doing: The operation that is under way.
        failed: Whether its load has failed for a reason that files of other models may remove.
        failures: Tries in a row that have failed for a reason that may pass.
        retry_at: When to try again; 0 for as soon as possible.
        theirs: Whether somebody else runs it without its being in a repository.
        looked_for: Whether a look could have found it.
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
        """Whether it is not what was asked for last."""
        if self.external:
            return False
        return not _same(self.found, self.done)

    @property
    def incomplete(self) -> bool:
        """Whether a marker says so."""
        return self.found is not None and self.found.incomplete

    @property
    def settling(self) -> bool:
        """Whether another look will tell whether there is something to do."""
        return self.observable and self.changed and not self.settled and not self.incomplete

    def is_now(self, found: FoundModel | None, now: int) -> None:
        """Takes note of a change."""
        self.found = found
        self.since = now
        self.observable = True
        self.settled = self.failed = False
        self.failures = self.retry_at = 0


def _same(found: FoundModel | None, done: FoundModel | _Unknown | None) -> bool:
    if found is None or done is None:
        return found is done
    return done is not _UNKNOWN and found.fingerprint == done.fingerprint


@dataclass
class Plan:
    """The state machine; not thread-safe.

    Attributes:
        settle_ns: How long nothing must have changed, in nanoseconds.
        most: Most operations under way at the same time.
    """

    settle_ns: int
    most: int = 4
    _models: dict[str, _Model] = field(default_factory=dict, init=False)

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def adopt(self, snapshot: Snapshot, now: int) -> None:
        """Takes what was found for what has been asked for already, but for what is marked incomplete.

        Of what could not be looked at it is not known, so it is not forgotten when it is gone.
        """
        for name, found in snapshot.models.items():
            if found is None:
                self._models[name] = _Model(now, done=_UNKNOWN, observable=False)
            else:
                done = None if found.incomplete else found
                self._models[name] = _Model(now, found, settled=done is not None, done=done)

    def attach(self, running: Iterable[str], now: int) -> None:
        """Begins with an agent of which only the models that it runs are known, not in which state.

        Everything is asked for once; the agent knows what it has.
        """
        for name in running:
            self._models.setdefault(name, _Model(now, observable=False))
        for model in self._models.values():
            model.done, model.external = _UNKNOWN, False

    def snapshot_taken(self, snapshot: Snapshot, began: int, now: int) -> list[Operation]:
        """Takes in what a look has found.

        Args:
            look: What it has found.
            began: When it began.
            now: When it ended.
        """
        began -= snapshot.age_ns
        # A name that more than one repository has is no model. One that was never loaded is not forgotten.
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
                model.since = now  # it is there after all
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

    def finished(self, operation: Operation, outcome: Outcome, now: int) -> list[Operation]:
        """Takes note of the end of an operation."""
        model = self._models[operation.name]
        model.in_progress = None
        if outcome is Outcome.TRANSIENT or (outcome is Outcome.FAILED and operation.kind == "unload"):
            if not model.changed:  # else there is something new to try
                model.failures += 1
                model.retry_at = now + min(FIRST_RETRY_NS << min(model.failures - 1, 10), LAST_RETRY_NS)
            model.done = _UNKNOWN
        else:
            model.failures = model.retry_at = 0
            model.failed = outcome is Outcome.FAILED
            if operation.kind == "load" and outcome is Outcome.DONE:
                self._retry_dependents(operation.name)
        return self._start(now)

    def tick(self, now: int) -> list[Operation]:
        """Takes note of the time; see `wake_at`."""
        return self._start(now)

    def external_change(self, name: str, running: bool, now: int) -> list[Operation]:
        """Takes note of what somebody else has done with a model: it holds until the model's files change."""
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
        """When to call `passed`; None for not at all."""
        waiting = (model.retry_at for model in self._models.values() if self._waits(model))
        return min(waiting, default=None)

    @property
    def snapshot_due(self) -> int | None:
        """When the next look is needed to tell whether something has settled; None for not at all."""
        times = (model.since + self.settle_ns for model in self._models.values() if model.settling)
        return min(times, default=None)

    @property
    def settling(self) -> frozenset[str]:
        """The models that the look is needed for."""
        return frozenset(name for name, model in self._models.items() if model.settling)

    @property
    def in_progress(self) -> frozenset[str]:
        """The models with which something is being done."""
        return frozenset(name for name, model in self._models.items() if model.in_progress is not None)

    def _seen(self, name: str, found: FoundModel, partial: bool, began: int, now: int) -> None:
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = _Model(now, found)
        elif model.found is None or model.found.fingerprint != found.fingerprint:
            if partial and model.found is not None and model.found.location != found.location:
                return  # it may be there twice
            model.is_now(found, now)
        model.found, model.external = found, False
        if found.incomplete:
            model.since, model.settled = now, False
        elif not model.settled:
            model.settled = began - model.since >= self.settle_ns or _vouched(found, model.done)

    def _retry_dependents(self, name: str) -> None:
        """Gives ensembles another chance that may have failed for want of a model."""
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
                before = model.done.fingerprint if isinstance(model.done, FoundModel) else ()
                changed = differing(before, found.fingerprint) if before and found is not None else ()
                model.in_progress = Operation("unload" if found is None else "load", name, changed)
                model.done, model.failed = found, False
                begun.append(model.in_progress)
        return begun

    def _waits(self, model: _Model) -> bool:
        return model.retry_at > 0 and model.in_progress is None and model.changed and model.settled

    def _composing_pending(self, name: str, found: FoundModel) -> bool:
        """Whether a model would be loaded with parts that are not complete, or before them."""
        return any(
            part.in_progress is not None or (part.changed and part.found is not None and not part.retry_at)
            for other in self._composing(found)
            if (part := self._models.get(other)) is not None and name not in self._composing(part.found)
        )

    def _is_needed(self, name: str) -> bool:
        """Whether an ensemble that needs a model now is about to become one that does not."""
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
        """All that a model is made of, in the end."""
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


def _vouched(found: FoundModel, done: FoundModel | _Unknown | None) -> bool:
    if isinstance(done, FoundModel):
        return vouched_for(found.fingerprint, found.markers, done.fingerprint, done.markers)
    return vouched_for(found.fingerprint, found.markers, (), ())

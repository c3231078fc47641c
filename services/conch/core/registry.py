"""Registry: model name and version to the version that serves it; error texts are Triton's.

With namespaces, entries are keyed by identifiers (`ModelSpec.identifier`), and a name resolves to the only
ready model of that name.

Labels name versions. A version text is looked up among them only where it is no number, so that other
requests pay nothing for them. A label outlives the version that it names: requests for it fail until that
version is ready again, or the label names another one.

A model may have a `Route`, which divides the requests without a version among its versions. Such a model is
no entry of `_defaults`; only where a name is missing there, a route is looked for.

Checks of the server's readiness read `unready` and `checked`, which change with the entries: their cost does
not depend on the number of models.

Owns: the published entries, the labels, the routes and the draining versions.
Threads and locks: readers take no lock, as all mappings are replaced, never changed; writers take one lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from conch.core.cold_models import ColdModelError, ColdModels
from conch.core.compiled import mypyc_attr
from conch.core.errors import (
    ConchError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from conch.core.request import InferenceRequest
from conch.core.route import OVERRIDE, Route, RouteCounts
from conch.core.servable import Servable
from conch.core.version_text import STABLE, check_label, parse_version

LabelSource = Literal["api", "file", "repository"]
"""Source of a model's labels: calls that set single ones, or a declaration of all of them.

A label of a repository moves once the version that it is to name is ready; until then requests get the one
that it named before.
"""

_DECLARED: Mapping[LabelSource, str] = {
    "file": "are declared in rollout.toml: change them there",
    "repository": "are those of its model repository: change them there, such as an alias in MLflow",
}


UNLOADED = "unloaded"
"""Reason of a version that was unloaded on request."""


@dataclass(frozen=True, slots=True)
class VersionState:
    """State of one version as the repository index shows it.

    Attributes:
        state: ``READY``, ``UNAVAILABLE``, ``LOADING``, ``UNLOADING`` or ``UNKNOWN``.
        reason: Reason for which it is not ready; empty if there is none.
    """

    state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """The versions of one model name or identifier.

    Attributes:
        ready: Versions that serve requests.
        states: State of every version that was ever loaded or attempted.
        lacking: True if the model was to be loaded and has no version to load.
        labels: Names of versions, ready or not; set by the registry.
        route: Divides requests without a version; set by the registry.
    """

    ready: Mapping[int, Servable] = field(default_factory=dict)
    states: Mapping[int, VersionState] = field(default_factory=dict)
    lacking: bool = False
    labels: Mapping[str, int] = field(default_factory=dict)
    route: Route | None = None

    @property
    def stable(self) -> int | None:
        """The stable version of the route, else the one with label `STABLE`; None without either."""
        return self.labels.get(STABLE) if self.route is None else self.route.stable

    @property
    def default(self) -> Servable | None:
        """Version for an empty version without a request: `stable` if ready, else the highest ready one.

        None if no version is ready.
        """
        if self.labels or self.route is not None:
            stable = self.stable
            if stable is not None and stable in self.ready:
                return self.ready[stable]
        return self.ready[max(self.ready)] if self.ready else None

    @property
    def counts_as_ready(self) -> bool:
        """True if the model does not keep the server from being ready; one without a version to load does.

        Triton requires every version to be ready. Here one serving version is enough, and unloading models
        count as ready: otherwise a broken update would make all replicas of a storage not ready at once.
        """
        if self.lacking:
            return False
        return bool(self.ready) or all(_gone(state) for state in self.states.values())

    @property
    def checked(self) -> Sequence[Servable]:
        """Ready versions that have readiness checks, or may have some later, as those with workers."""
        return [model for model in self.ready.values() if model.workers or model.readiness]

    def labels_of(self, version: int) -> list[str]:
        """The labels of a version, sorted."""
        return sorted(label for label, number in self.labels.items() if number == version)


@mypyc_attr(allow_interpreted_subclasses=True)
class Registry:
    """The models of a server.

    `cold` finds what is asked before a model without a version that serves is refused; None if all are in
    memory. It is a function, as such models are loaded into this registry.

    Attributes:
        namespaces: The possible namespaces of models; empty if names are unique.
        draining: By identifier, versions that are being replaced or unloaded and may have live sequences,
            oldest first.
        route_counts: Requests that routes have divided, by identifier; replaced, never changed.
        unready: Identifiers of the models that keep the server from being ready; replaced, never changed.
        checked: By identifier, the versions whose readiness checks are part of the server's; replaced, never
            changed.
    """

    def __init__(self, cold: Callable[[], ColdModels | None] = lambda: None) -> None:
        self._lock = threading.RLock()
        self._labels: dict[str, _Labels] = {}
        self._routes: dict[str, Route] = {}
        self.route_counts: Mapping[str, RouteCounts] = {}
        self._cold = cold
        self.namespaces: tuple[str, ...] = ()
        self.draining: Mapping[str, tuple[Servable, ...]] = MappingProxyType({})
        self._entries: Mapping[str, Entry] = MappingProxyType({})
        self._defaults: dict[str, Servable] = {}
        self.unready: frozenset[str] = frozenset()
        self.checked: Mapping[str, Sequence[Servable]] = {}

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All entries by identifier, as an immutable mapping."""
        return self._entries

    @property
    def cold(self) -> ColdModels | None:
        """Models that may be out of memory; None if all are in it."""
        return self._cold()

    def add_namespaces(self, *namespaces: str) -> None:
        """Adds possible namespaces, before a model of theirs is published."""
        with self._lock:
            self.namespaces = (*self.namespaces, *namespaces)

    def remove_namespace(self, namespace: str) -> None:
        """Removes a namespace, if it is there."""
        with self._lock:
            self.namespaces = tuple(each for each in self.namespaces if each != namespace)

    def publish(self, name: str, entry: Entry) -> None:
        """Replaces the entry of an identifier, for all later requests; adds its labels and its route."""
        with self._lock:
            if name in self._labels or name in self._routes:
                before = self._entries.get(name, _NO_ENTRY).labels
                labels = self._labels.get(name, _NO_LABELS).named(entry.ready, before)
                route = self._routes.get(name) or _sequence_route(labels, entry.ready)
                entry = replace(entry, labels=labels, route=route)
            self._entries = MappingProxyType({**self._entries, name: entry})
            default = None if entry.route is not None else entry.default
            if default is None:
                self._defaults.pop(name, None)
            else:
                self._defaults[name] = default
            if self.namespaces:
                self._rename(name)
            self._note_readiness(name, entry)

    def set_labels(self, name: str, numbers: Mapping[str, int], source: LabelSource) -> None:
        """Replaces all labels of an identifier, which need not be published yet; none removes them.

        Raises:
            InvalidArgumentError: A label is malformed.
        """
        for label in numbers:
            check_label(label)
        with self._lock:
            self._set_labels(name, _Labels(MappingProxyType(dict(numbers)), source))

    def follow_labels(self, name: str, numbers: Mapping[str, int]) -> None:
        """Replaces the labels that the repository of an identifier gives it.

        Without any, and none before, labels of other sources stay.
        """
        with self._lock:
            known = self._labels.get(name, _NO_LABELS)
            wanted = _Labels(MappingProxyType(dict(numbers)), "repository")
            if known != wanted and (numbers or known.source == "repository"):
                self.set_labels(name, numbers, "repository")

    def refuse_label_change(self, name: str) -> None:
        """Raises FailedPreconditionError: a file or the repository declares an identifier's labels."""
        source = self._labels.get(name, _NO_LABELS).source
        if source in _DECLARED:
            raise FailedPreconditionError(f"the labels of '{self.name_of(name)}' {_DECLARED[source]}")

    def _set_labels(self, name: str, labels: _Labels) -> None:
        if labels.numbers:
            self._labels[name] = labels
        else:
            self._labels.pop(name, None)
        self._publish_again(name)

    def set_route(self, name: str, route: Route | None) -> None:
        """Divides the later requests of an identifier without a version by a route; None ends that.

        A version of the route that is not ready gets no requests; see `Route.choose`.
        """
        with self._lock:
            if route is None:
                self._routes.pop(name, None)
            else:
                counts = self.route_counts.get(name)
                if counts is None:
                    counts = RouteCounts()
                    self.route_counts = {**self.route_counts, name: counts}
                self._routes[name] = replace(route, counts=counts)
            self._publish_again(name)

    def _publish_again(self, name: str) -> None:
        entry = self._entries.get(name)
        if entry is not None:
            self.publish(name, replace(entry, labels={}, route=None))

    def forget(self, name: str) -> None:
        """Removes an identifier that no repository has any more, with its labels and its route."""
        with self._lock:
            self._labels.pop(name, None)
            self._routes.pop(name, None)
            self.route_counts = {key: each for key, each in self.route_counts.items() if key != name}
        self.remove(name)

    def remove(self, name: str) -> None:
        """Removes an identifier; its labels and its route stay for a later load."""
        with self._lock:
            self._defaults.pop(name, None)
            self._entries = MappingProxyType(
                {key: entry for key, entry in self._entries.items() if key != name}
            )
            self._rename(name)
            self._note_readiness(name, _NO_ENTRY)

    def _note_readiness(self, name: str, entry: Entry) -> None:
        """Keeps what checks of readiness look at; called with the lock held."""
        if entry.counts_as_ready is (name in self.unready):
            self.unready ^= {name}
        checked = entry.checked
        if checked or name in self.checked:
            others = {key: each for key, each in self.checked.items() if key != name}
            self.checked = {**others, name: checked} if checked else others

    def name_of(self, identifier: str) -> str:
        """The client-visible name of an identifier."""
        return self.name_and_namespace(identifier)[0]

    def name_and_namespace(self, identifier: str) -> tuple[str, str]:
        """The client-visible name of an identifier, and its namespace or an empty text."""
        for namespace in self.namespaces:
            if identifier.startswith(f"{namespace}::"):
                return identifier[len(namespace) + 2 :], namespace
        return identifier, ""

    def identifiers(self, name: str) -> list[str]:
        """The published identifiers of a name, which may be an identifier itself."""
        known = self._entries
        if name in known or not self.namespaces:
            return [name] if name in known else []
        found = (f"{namespace}::{name}" for namespace in self.namespaces)
        return [identifier for identifier in found if identifier in known]

    def find(self, name: str) -> tuple[str, Entry]:
        """The identifier and the entry of a client-visible name.

        Raises:
            InvalidArgumentError: Several models of that name are ready.
            NotFoundError: There is none, or none that is ready.
        """
        entry = self._entries.get(name)
        if entry is not None:
            return name, entry
        known = self.identifiers(name)
        if not known:
            self._miss(name)
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        ready = [identifier for identifier in known if self._entries[identifier].ready]
        if len(ready) > 1:
            raise InvalidArgumentError(
                f"There are {len(ready)} identifiers of model '{name}' in global map, model namespace must "
                f"be provided to resolve ambiguity."
            )
        if not ready:
            raise NotFoundError(f"Identifier of model '{name}' is not found in global map")
        return ready[0], self._entries[ready[0]]

    def _miss(self, name: str, entry: Entry | None = None) -> None:
        """Raises ColdModelError if a name without a version that serves is that of a model to be loaded."""
        cold = self.cold
        if cold is not None and (entry is None or not entry.ready):
            cold.missed(name)

    def loads_on_demand(self, name: str) -> bool:
        """True if a request has the model of a name loaded, of which no version serves.

        Raises:
            ConchError: Its load has failed a short time ago.
        """
        try:
            self._miss(name)
        except ColdModelError:
            return True
        return False

    def _rename(self, identifier: str) -> None:
        """Points the name of an identifier to its only ready model; called with the lock held."""
        name = self.name_of(identifier)
        if name != identifier:
            ready = [each for each in self.identifiers(name) if self._entries[each].ready]
            if len(ready) == 1 and ready[0] in self._defaults:  # not so with a route
                self._defaults[name] = self._defaults[ready[0]]
            else:
                self._defaults.pop(name, None)

    def begin_draining(self, name: str, model: Servable) -> None:
        """Keeps a version resolvable for its live sequences; called before its successor is published."""
        with self._lock:
            models = (*self.draining.get(name, ()), model)
            self.draining = MappingProxyType({**self.draining, name: models})

    def draining_of(self, name: str) -> tuple[Servable, ...]:
        """The draining versions of a name or identifier."""
        found = self.draining.get(name, ())
        if found or not self.namespaces:
            return found
        each = (self.draining.get(f"{namespace}::{name}", ()) for namespace in self.namespaces)
        return tuple(model for models in each for model in models)

    def end_draining(self, name: str, model: Servable) -> None:
        """Removes a draining version, if it is there."""
        with self._lock:
            draining = dict(self.draining)
            draining[name] = tuple(each for each in draining.get(name, ()) if each is not model)
            if not draining[name]:
                del draining[name]
            self.draining = MappingProxyType(draining)

    def resolve(self, name: str, version: str = "") -> Servable:
        """The version that serves a name and version text, which is empty for the default one.

        Where there is a request, `resolve_request` follows the model's route.

        Raises:
            InvalidArgumentError: The version is neither a number nor a label of the model.
            NotFoundError: The name, or that version of it, is unknown, or has no ready version.
            UnavailableError: The version is known but not ready.
            ColdModelError: The model is not in memory, and can be loaded.
        """
        if not version:
            model = self._defaults.get(name)
            if model is not None:
                return model
            return self._find_default(name)
        return self._find_version(name, version)

    def resolve_request(self, request: InferenceRequest) -> Servable:
        """The version that serves a request; raises as `resolve`."""
        if not request.model_version:
            model = self._defaults.get(request.model_name)
            if model is not None:
                return model
            entry = self._entries.get(request.model_name) or self.find(request.model_name)[1]
            if entry.route is None:
                return self._find_default(request.model_name)
            return self._routed(request, entry, entry.route)
        return self._find_version(request.model_name, request.model_version)

    def resolve_early(self, name: str, version: str) -> Servable | None:
        """As `resolve`, before there is a request; None if that depends on the request."""
        if not version:
            model = self._defaults.get(name)
            if model is not None:
                return model
            return None if self.find(name)[1].route is not None else self._find_default(name)
        return self._find_version(name, version)

    def _routed(self, request: InferenceRequest, entry: Entry, route: Route) -> Servable:
        try:
            number = route.choose(request, entry.ready, entry.labels)
        except InvalidArgumentError as error:
            raise type(error)(f"{OVERRIDE}: {error.message}{_listed(entry.labels)}") from None
        model = entry.ready.get(number)
        if model is None:
            self._miss(request.model_name, entry)
            raise self._not_ready(request.model_name, number, entry)
        if route.shadow is not None and number == route.stable:
            return route.shadow.before(model, entry.ready)
        return model

    def version_number(self, name: str, version: str) -> int:
        """The number of a version text, which may be a label of the model; -1 for an empty text.

        Raises:
            InvalidArgumentError: It is neither a number nor a label of the model.
        """
        try:
            return parse_version(version)
        except InvalidArgumentError as error:
            return self._labelled(name, version, error)

    def labels(self, name: str) -> Mapping[str, int]:
        """The labels of a name; none if it is unknown or ambiguous."""
        try:
            return self.find(name)[1].labels
        except ConchError:
            return {}

    def labelled_versions(self, name: str) -> frozenset[int]:
        """The versions that have labels of an identifier, published or not."""
        return frozenset(self._labels.get(name, _NO_LABELS).numbers.values())

    def _labelled(self, name: str, version: str, error: ConchError) -> int:
        """The number of a label; raises an error that names the labels there are."""
        labels = self.labels(name)
        if not labels:
            self._miss(name, self._entries.get(name))
        number = labels.get(version)
        if number is not None:
            return number
        raise type(error)(f"{error.message}{_listed(labels)}") from None

    def _find_version(self, name: str, version: str) -> Servable:
        try:
            number = parse_version(version)
        except InvalidArgumentError as error:
            number = self._labelled(name, version, error)
        entry = self._entries.get(name) or self.find(name)[1]
        model = entry.ready.get(number)
        if model is not None:
            return model
        self._miss(name, entry)
        raise self._not_ready(name, number, entry, version)

    def _find_default(self, name: str) -> Servable:
        _, entry = self.find(name)
        model = entry.default
        if model is not None:
            return model
        self._miss(name, entry)
        if entry.stable is not None:
            raise self._not_ready(name, entry.stable, entry, STABLE)
        raise NotFoundError(f"Request for unknown model: '{name}' has no available versions")

    def _not_ready(self, name: str, number: int, entry: Entry, text: str = "") -> ConchError:
        """The error of a version that does not serve, by its number and the text that a client gave."""
        label = f", which label '{text}' names," if text in entry.labels else ""
        if number in entry.states:
            return UnavailableError(
                f"Request for unknown model: '{name}' version {number}{label} is not at ready state"
            )
        return NotFoundError(f"Request for unknown model: '{name}' version {number}{label} is not found")


@dataclass(frozen=True, slots=True)
class _Labels:
    """The labels of one model, with their source."""

    numbers: Mapping[str, int]
    source: LabelSource

    def named(self, ready: Mapping[int, Servable], before: Mapping[str, int]) -> Mapping[str, int]:
        """The versions that the labels name now; `before` are those that they named so far."""
        if self.source != "repository":
            return self.numbers
        held = {
            label: before[label]
            for label, number in self.numbers.items()
            if number not in ready and before.get(label) in ready
        }
        return MappingProxyType({**self.numbers, **held}) if held else self.numbers


_NO_LABELS = _Labels(MappingProxyType({}), "api")
_NO_ENTRY = Entry()


def _sequence_route(labels: Mapping[str, int], ready: Mapping[int, Servable]) -> Route | None:
    """A route that leaves live sequences where they are when label `STABLE` moves."""
    if STABLE in labels and any(model.spec.sequence is not None for model in ready.values()):
        return Route(labels[STABLE], override=False)
    return None


def _gone(state: VersionState) -> bool:
    return state.state == "UNLOADING" or (state.state == "UNAVAILABLE" and state.reason == UNLOADED)


def _listed(labels: Mapping[str, int]) -> str:
    """The end of an error text; empty without labels."""
    shown = ", ".join(f"'{label}' ({version})" for label, version in sorted(labels.items()))
    return f"; the labels of the model are {shown}" if shown else ""

"""Metrics defined by models: families by name, metrics of a family by labels.

A family lives as long as a model references it or one of its metrics. Models that use the same name share
the family.

Locks: one each for the families, a family and a metric; any thread may call.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, get_args
from weakref import WeakValueDictionary

from conch.core.errors import InvalidArgumentError, ResourceExhaustedError, UnsupportedError

Kind = Literal["counter", "gauge", "histogram"]

Change = float | tuple[Sequence[int], float]
"""Increment of a counter, value of a gauge, or observations of a histogram: bucket counts and their sum."""

MOST_FAMILIES = 10_000
"""Families of a server or process at a time."""

MOST_METRICS = 100_000
"""Metrics of a family at a time."""

_MOST_TEXT = 4096  # of a family's name and description, and of a metric's labels
_MOST_BOUNDS = 1000
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_NOT_IN_A_LABEL = re.compile(r"[^a-zA-Z0-9_]")
_RESERVED = ("nv_", "conch_")


def label_name(key: str) -> str:
    """A key as a label name; invalid characters become underscores."""
    name = _NOT_IN_A_LABEL.sub("_", key)
    return f"_{name}" if name[:1].isdigit() or not name else name


def family_names(name: str, kind: str) -> set[str]:
    """Names of a family and its samples in any format; they must not overlap with another family's."""
    names = {name}
    if kind == "counter":
        names |= {name.removesuffix("_total"), name.removesuffix("_total") + "_total"}
    elif kind in ("histogram", "summary"):
        names |= {f"{name}_{suffix}" for suffix in ("bucket", "count", "sum")}
    return names


@dataclass(frozen=True, slots=True)
class Histogram:
    """Buckets and sum of a histogram.

    Attributes:
        bounds: Upper bounds of all buckets but the last.
        counts: Observations in each bucket.
        sum: Sum of all observations.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float

    def cumulative(self) -> list[int]:
        """Cumulative counts; the last is the total."""
        return list(accumulate(self.counts))


@dataclass(frozen=True, slots=True)
class MetricSnapshot:
    """Labels and value of a metric.

    Attributes:
        labels: Label values by name.
        value: A histogram, or the value of a counter or gauge.
    """

    labels: Mapping[str, str]
    value: float | Histogram


@dataclass(frozen=True, slots=True)
class FamilySnapshot:
    """Snapshots of a family and its metrics."""

    name: str
    kind: Kind
    description: str
    metrics: Sequence[MetricSnapshot]


class CustomMetric:
    """A counter, gauge or histogram. Error texts are Triton's."""

    def __init__(self, family: CustomFamily, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        self._family = family
        self._labels = dict(labels)
        self._lock = threading.Lock()
        self._value = 0.0
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)

    @property
    def value(self) -> float:
        """The value of a counter or a gauge. Raises UnsupportedError: the metric is a histogram."""
        self._check("Value", "counter", "gauge")
        return self._value

    def increment(self, by: float) -> None:
        """Adds to a counter or a gauge.

        Raises:
            UnsupportedError: The metric is a histogram.
            InvalidArgumentError: A counter would decrease.
        """
        self._check("Increment", "counter", "gauge")
        if self._family.kind == "counter" and not by >= 0:
            raise InvalidArgumentError(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative "
                "values."
            )
        with self._lock:
            self._value += by

    def set(self, value: float) -> None:
        """Sets a gauge. Raises UnsupportedError: the metric is of another kind."""
        self._check("Set", "gauge")
        with self._lock:
            self._value = value

    def observe(self, value: float) -> None:
        """Counts a value in a histogram. Raises UnsupportedError: the metric is of another kind."""
        self._check("Observe", "histogram")
        with self._lock:
            self._counts[bisect.bisect_left(self._bounds, value)] += 1
            self._value += value

    def merge(self, counts: Sequence[int], total: float) -> None:
        """Adds observations that were counted elsewhere: so many in each bucket, with this sum.

        Raises:
            UnsupportedError: The metric is of another kind.
            InvalidArgumentError: The counts do not fit the buckets.
        """
        self._check("Observe", "histogram")
        if len(counts) != len(self._counts) or any(count < 0 for count in counts):
            raise InvalidArgumentError(
                f"a histogram with {len(self._counts)} buckets needs as many counts, none below 0"
            )
        with self._lock:
            self._counts = [had + more for had, more in zip(self._counts, counts, strict=True)]
            self._value += total

    def apply(self, change: Change) -> None:
        """Applies a change, which must fit the kind."""
        if isinstance(change, tuple):
            self.merge(*change)
        elif self._family.kind == "gauge":
            self.set(change)
        else:
            self.increment(change)

    def snapshot(self) -> MetricSnapshot:
        """Copies the current state."""
        with self._lock:
            histogram = self._family.kind == "histogram"
            value = Histogram(self._bounds, tuple(self._counts), self._value) if histogram else self._value
            return MetricSnapshot(self._labels, value)

    def _check(self, what: str, *kinds: Kind) -> None:
        kind = self._family.kind
        if kind not in kinds:
            raise UnsupportedError(f"TRITONSERVER_METRIC_KIND_{kind.upper()} does not support {what}")


class CustomFamily:
    """Metrics with one name; created by `CustomFamilies`."""

    def __init__(self, name: str, kind: Kind, description: str) -> None:
        self.name = name
        self.kind = kind
        self.description = description
        self._lock = threading.Lock()
        self._metrics: WeakValueDictionary[tuple[tuple[str, str], ...], CustomMetric] = WeakValueDictionary()

    def metric(self, labels: Mapping[str, str], bounds: Sequence[float] | None = None) -> CustomMetric:
        """Returns the metric with these labels; creates it if needed.

        Args:
            labels: Label values; names are converted with `label_name`.
            bounds: Ascending upper bounds of a histogram's buckets; empty for one bucket. None for other
                kinds.

        Raises:
            InvalidArgumentError: Bounds are missing, unexpected or not ascending, or a histogram's label is
                ``le``; or the texts are too long.
            ResourceExhaustedError: There are too many.
        """
        if self.kind == "histogram" and bounds is None:
            raise InvalidArgumentError("Bucket boundaries not found in Metric args.")
        if self.kind != "histogram" and bounds is not None:
            raise InvalidArgumentError("Unexpected buckets found.")
        if sum(map(len, itertools.chain(labels.keys(), labels.values()))) > _MOST_TEXT:
            raise InvalidArgumentError(
                f"the labels of a metric of family '{self.name}' have more than {_MOST_TEXT} characters"
            )
        if len(bounds or ()) > _MOST_BOUNDS:
            raise InvalidArgumentError(
                f"a metric of family '{self.name}' has more than {_MOST_BOUNDS} buckets"
            )
        limits = tuple(float(bound) for bound in bounds or ())
        if any(not low < high for low, high in pairwise(limits)) or any(map(math.isnan, limits)):
            raise InvalidArgumentError("Bucket Boundaries must be strictly sorted")
        if limits and limits[-1] == math.inf:
            limits = limits[:-1]  # every histogram has that bucket
        named = {label_name(name): value for name, value in labels.items()}
        if self.kind == "histogram" and "le" in named:
            raise InvalidArgumentError("a histogram's label can't be named 'le': its buckets have one")
        key = tuple(sorted(named.items()))
        with self._lock:
            metric = self._metrics.get(key)
            if metric is None:
                if len(self._metrics) >= MOST_METRICS:
                    raise ResourceExhaustedError(
                        f"metric family '{self.name}' has {MOST_METRICS} metrics already: use fewer values "
                        f"of labels"
                    )
                metric = self._metrics[key] = CustomMetric(self, named, limits)
            return metric

    def snapshot(self) -> FamilySnapshot:
        """Copies the current state."""
        with self._lock:
            metrics = sorted(self._metrics.items())
        return FamilySnapshot(
            self.name, self.kind, self.description, [metric.snapshot() for _, metric in metrics]
        )


CatchUp = Callable[[float], None]
"""Applies the changes that a process has sent; waits for so many seconds at most."""


class CustomFamilies:
    """The metric families of a server or process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: WeakValueDictionary[str, CustomFamily] = WeakValueDictionary()
        self._by_sample: WeakValueDictionary[str, CustomFamily] = WeakValueDictionary()
        self._remote: list[CatchUp] = []

    def add_remote(self, catch_up: CatchUp) -> None:
        """Adds a process that changes metrics by messages."""
        with self._lock:
            self._remote.append(catch_up)

    def remove_remote(self, catch_up: CatchUp) -> None:
        """Removes one that was added."""
        with self._lock:
            self._remote.remove(catch_up)

    def catch_up(self, timeout_s: float) -> None:
        """Applies what other processes have sent by now, as far as that is possible in time."""
        with self._lock:
            remote = list(self._remote)
        end_s = time.monotonic() + timeout_s
        for catch_up in remote:
            catch_up(max(end_s - time.monotonic(), 0.0))

    def family(self, name: str, kind: Kind, description: str) -> CustomFamily:
        """Returns the family with this name; creates it if needed.

        Raises:
            InvalidArgumentError: The name is invalid, reserved, used by a family of another kind, or
                collides with sample names of another family; or the texts are too long.
            ResourceExhaustedError: There are too many.
        """
        if kind not in get_args(Kind):
            raise InvalidArgumentError(f"'{kind}' is no kind of metrics")
        if not _NAME.fullmatch(name) or name.startswith(_RESERVED):
            raise InvalidArgumentError(
                f"'{name}' can't be the name of a metric family: letters, digits, '_' and ':' can be in it, "
                f"no digit first, and those that begin with 'nv_' and 'conch_' are the server's"
            )
        if len(name) + len(description) > _MOST_TEXT:
            raise InvalidArgumentError(
                f"name and description of a metric family have more than {_MOST_TEXT} characters"
            )
        with self._lock:
            family = self._families.get(name)
            if family is None:
                names = self._names_apart(name, kind)
                if len(self._families) >= MOST_FAMILIES:
                    raise ResourceExhaustedError(f"the server has {MOST_FAMILIES} metric families already")
                family = self._families[name] = CustomFamily(name, kind, description)
                self._by_sample.update(dict.fromkeys(names, family))
        if family.kind != kind:
            raise InvalidArgumentError(f"metric family '{name}' is there already, as {family.kind}")
        return family

    def _names_apart(self, name: str, kind: Kind) -> set[str]:
        names = family_names(name, kind)
        for each in names:
            other = self._by_sample.get(each)
            if other is not None:
                raise InvalidArgumentError(
                    f"metric family '{name}' would have samples named as those of the {other.kind} "
                    f"'{other.name}', which is there already: give it another name"
                )
        return names

    def update(self, changes: Iterable[tuple[CustomMetric, Change]]) -> None:
        """Applies changes of several metrics."""
        for metric, change in changes:
            metric.apply(change)

    def snapshot(self) -> list[FamilySnapshot]:
        """Snapshots of all families, sorted by name."""
        with self._lock:
            families = sorted(self._families.items())
        return [family.snapshot() for _, family in families]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Makes these the families of models that this thread loads inside the context."""
        token = _used.set(self)
        try:
            yield
        finally:
            _used.reset(token)


FAMILIES = CustomFamilies()
"""The process-wide default, for models that run outside a server."""

_used: ContextVar[CustomFamilies] = ContextVar("conch_metric_families", default=FAMILIES)


def current_families() -> CustomFamilies:
    """Families of the server that loads a model on this thread, otherwise the process-wide ones."""
    return _used.get()

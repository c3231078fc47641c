"""Custom metrics of a model in a worker, registered in the server."""

from __future__ import annotations

import threading
from typing import Any

from conch.core.custom_metrics import CatchUp, Change, CustomFamilies, CustomFamily, CustomMetric
from conch.core.errors import ConchError, ResourceExhaustedError
from conch.ipc.channel import WireError

MOST_FAMILIES = 1_000
"""Families that a worker may hold at a time."""

MOST_METRICS = 10_000
"""Metrics that a worker may hold at a time."""


class WorkerMetrics:
    """References of one worker to the server's custom metrics; dropped with the worker."""

    def __init__(self, families: CustomFamilies, catch_up: CatchUp) -> None:
        self._families = families
        self._catch_up = catch_up
        self._lock = threading.Lock()
        self._held_families: dict[int, CustomFamily] = {}
        self._held_metrics: dict[int, CustomMetric] = {}
        self._known = False  # whether the families know of the worker

    def family(self, question: dict[str, Any]) -> dict[str, object]:
        """Creates a family or finds the existing one.

        Raises:
            ConchError: The registry refuses it.
            WireError: The message is malformed.
        """
        name, kind, description = question.get("name"), question.get("kind"), question.get("description")
        if not isinstance(name, str) or not isinstance(description, str):
            raise WireError("a family of metrics has a name and a description")
        if kind not in ("counter", "gauge", "histogram"):
            raise WireError("there is no such kind of metrics")
        number = _number(question)
        with self._lock:
            if len(self._held_families) >= MOST_FAMILIES:
                raise ResourceExhaustedError(
                    f"an instance of a model may hold {MOST_FAMILIES} metric families at a time"
                )
            self._held_families[number] = self._families.family(name, kind, description)
            known, self._known = self._known, True
        if not known:
            self._families.add_remote(self._catch_up)
        return {}

    def metric(self, question: dict[str, Any]) -> dict[str, object]:
        """Creates a metric or finds the existing one.

        Raises:
            ConchError: The registry refuses it.
            WireError: The message is malformed.
        """
        labels, bounds = question.get("labels"), question.get("bounds")
        if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
            raise WireError("labels are names and texts")
        if bounds is not None and not (
            isinstance(bounds, list) and all(isinstance(bound, float | int) for bound in bounds)
        ):
            raise WireError("bounds are numbers")
        family = self._held_families.get(_number(question, "family"))
        if family is None:
            raise WireError("there is no such family of metrics")
        number = _number(question)
        with self._lock:
            if len(self._held_metrics) >= MOST_METRICS:
                raise ResourceExhaustedError(
                    f"an instance of a model may hold {MOST_METRICS} metrics at a time: use fewer values of "
                    f"labels"
                )
            self._held_metrics[number] = family.metric(labels, bounds)
        return {}

    def value(self, question: dict[str, Any]) -> dict[str, object]:
        """Value of a metric.

        Raises:
            ConchError: It has none.
            WireError: There is no such metric.
        """
        return {"value": self._metric(_number(question)).value}

    def change(self, number: int, change: dict[str, Any]) -> None:
        """Changes a metric or several, or drops the reference.

        Raises:
            WireError: There is no such metric or change.
        """
        what, value = change.get("do"), change.get("value")
        if what == "update":
            self._update(change.get("changes"))
            return
        if what == "forget":
            self._held_families.pop(number, None)
            self._held_metrics.pop(number, None)
            return
        if not isinstance(value, float | int):
            raise WireError("the value of a metric is a number")
        metric = self._metric(number)
        try:
            if what == "increment":
                metric.increment(value)
            elif what == "set":
                metric.set(value)
            elif what == "observe":
                metric.observe(value)
            else:
                raise WireError("there is no such change of a metric")
        except ConchError as error:
            raise WireError(f"a metric can't be changed: {error}") from None

    def _update(self, changes: object) -> None:
        try:
            assert isinstance(changes, list)
            pairs = [(self._metric(number), _change(change)) for number, change in changes]
            self._families.update(pairs)
        except (AssertionError, TypeError, ValueError) as error:
            raise WireError("changes of metrics are pairs of numbers and changes") from error
        except ConchError as error:
            raise WireError(f"a metric can't be changed: {error}") from None

    def close(self) -> None:
        """Drops all references."""
        with self._lock:
            self._held_families.clear()
            self._held_metrics.clear()
            known, self._known = self._known, False
        if known:
            self._families.remove_remote(self._catch_up)

    def _metric(self, number: int) -> CustomMetric:
        metric = self._held_metrics.get(number)
        if metric is None:
            raise WireError("there is no such metric")
        return metric


def _change(change: object) -> Change:
    if isinstance(change, float | int):
        return change
    assert isinstance(change, list)
    counts, total = change
    assert isinstance(counts, list) and all(type(count) is int for count in counts)
    assert isinstance(total, float | int)
    return counts, total


def _number(question: dict[str, Any], key: str = "number") -> int:
    number = question.get(key)
    if not isinstance(number, int):
        raise WireError("a metric and its family have numbers")
    return number

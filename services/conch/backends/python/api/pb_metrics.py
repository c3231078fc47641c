"""Custom metrics of models, as ``pb_utils`` offers them.

Owns: the process-wide registry of families where it is not the core's default.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakSet

from conch.backends.python.api.pb_errors import TritonModelException
from conch.backends.python.api.pb_types import number_of, text_of
from conch.core.custom_metrics import Change, CustomFamilies, CustomMetric, Kind, current_families
from conch.core.errors import ConchError, InvalidArgumentError

_families: CustomFamilies | None = None


def use_metric_families(families: CustomFamilies) -> None:
    """Sets where the metrics of this process are kept, such as in the server that started it."""
    global _families
    _families = families


_DELETED = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' "
    "object should be deleted AFTER its corresponding 'Metric' objects have been deleted."
)
_KINDS: tuple[Kind, ...] = ("counter", "gauge", "histogram")


class Metric:
    """A metric of a family, exported while the model holds it and the family."""

    def __init__(self, metric: CustomMetric) -> None:
        self._live: CustomMetric | None = metric

    @property
    def _metric(self) -> CustomMetric:
        metric = self._live
        if metric is None:
            raise InvalidArgumentError(_DELETED)
        return metric

    def _invalidate(self) -> None:
        self._live = None

    def increment(self, value: float) -> None:
        """Adds to a counter or a gauge."""
        with _errors("Failed to increment metric value"):
            self._metric.increment(number_of(value, "the value of a metric"))

    def set(self, value: float) -> None:
        """Sets a gauge."""
        with _errors("Failed to set metric value"):
            self._metric.set(number_of(value, "the value of a metric"))

    def observe(self, value: float) -> None:
        """Counts a value in a histogram."""
        with _errors("Failed to observe metric value"):
            self._metric.observe(number_of(value, "the value of a metric"))

    def value(self) -> float:
        """The value of a counter or a gauge."""
        with _errors("Failed to get metric value"):
            return self._metric.value


class MetricFamily:
    """Metrics with one name, shared by all models that use the name; its metrics end with it.

    Args:
        name: The name.
        description: The help text.
        kind: ``COUNTER``, ``GAUGE`` or ``HISTOGRAM``.

    Raises:
        TritonModelException: The name is invalid, or in use by a family of another kind.
    """

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2

    def __init__(self, name: str, description: str, kind: int = COUNTER) -> None:
        self._metrics: WeakSet[Metric] = WeakSet()
        if kind not in range(len(_KINDS)):
            raise TritonModelException("Unknown metric kind")
        name = text_of(name, "name of a MetricFamily")
        description = text_of(description, "description of a MetricFamily")
        with _errors("Error when creating MetricFamily"):
            families = current_families() if _families is None else _families
            self._family = families.family(name, _KINDS[kind], description)

    def Metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Returns the metric with these labels; a histogram needs upper bounds of buckets, possibly none.

        Raises:
            TritonModelException: A label is not a string, or the buckets do not fit the kind.
        """
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if not all(isinstance(text, str) for item in (labels or {}).items() for text in item):
            raise TritonModelException("Failed to create metric. Names and values of labels must be strings.")
        if self._family.kind == "histogram" and buckets is None:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        if self._family.kind != "histogram" and buckets is not None:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        bounds = None if buckets is None else [number_of(each, "a bucket of a Metric") for each in buckets]
        with _errors("Error when creating Metric"):
            metric = Metric(self._family.metric(labels or {}, bounds))
        self._metrics.add(metric)
        return metric

    def __del__(self) -> None:
        for metric in getattr(self, "_metrics", ()):
            metric._invalidate()


def update_metrics(changes: Iterable[tuple[Metric, Change]]) -> None:
    """Changes many metrics at once, which a worker sends as one message; not in Triton.

    Args:
        changes: Metrics, each with what to add to a counter, the new value of a gauge, or for a histogram the
            further counts of its buckets (one more than it has bounds) and their sum.

    Raises:
        TritonModelException: A change does not fit its metric.
    """
    with _errors("Failed to update metrics"):
        families = current_families() if _families is None else _families
        families.update([(metric._metric, change) for metric, change in changes])


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except ConchError as error:
        raise TritonModelException(f"{what}: {error.message}") from None

"""Forwards the metrics of vLLM's registry to the server, with the labels of the model.

Counters and histograms are sent as what was added since the last time, so that they stay right beside those
of other instances. Triton's names are among vLLM's own, but for one (`_ALIASES`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

_PREFIX = "vllm:"
_ALIASES = {"vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds"}
_KINDS = {
    "counter": pb_utils.MetricFamily.COUNTER,
    "gauge": pb_utils.MetricFamily.GAUGE,
    "histogram": pb_utils.MetricFamily.HISTOGRAM,
}

Labels = tuple[tuple[str, str], ...]


class EngineMetrics:
    """Metrics of one engine in the server; used by one thread at a time.

    Args:
        registry: The registry of prometheus_client that vLLM writes to.
        labels: Labels of the model, instead of vLLM's ``model_name``.
    """

    def __init__(self, registry: Any, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = dict(labels)
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, Labels], Any] = {}
        self._values: dict[tuple[str, Labels], Any] = {}
        self._refused: set[str] = set()
        self._lock = threading.Lock()

    def forward(self) -> None:
        """Sends what has changed since the last time, as one message."""
        with self._lock:
            changes: list[tuple[Any, Any]] = []
            found = [each for each in self._registry.collect() if each.name.startswith(_PREFIX)]
            names = {each.name for each in found}
            for family in found:
                alias = _ALIASES.get(family.name)
                for name in (family.name, alias):
                    if name is not None and (name == family.name or name not in names):
                        changes += self._changes(name, family)
            if changes:
                pb_utils.update_metrics(changes)

    def _changes(self, name: str, family: Any) -> Iterator[tuple[Any, Any]]:
        if family.type not in _KINDS or name in self._refused:
            return
        read: Any = _histograms if family.type == "histogram" else _numbers
        for labels, bounds, value in read(family):
            try:
                metric = self._metric(name, family, labels, bounds)
            except pb_utils.TritonModelException as error:
                self._refused.add(name)
                pb_utils.Logger.log_warn(f"metric '{name}' of vLLM is left out: {error}")
                return
            key = name, labels
            before = self._values.get(key)
            if value == before:
                continue
            self._values[key] = value
            if family.type == "gauge":
                yield metric, value
            elif family.type == "counter":
                yield metric, value - (before or 0.0)
            else:
                counts, total = value
                had, had_total = before or ([0] * len(counts), 0.0)
                yield metric, ([now - was for now, was in zip(counts, had, strict=True)], total - had_total)

    def _metric(self, name: str, family: Any, labels: Labels, bounds: tuple[float, ...]) -> Any:
        metric = self._metrics.get((name, labels))
        if metric is None:
            held = self._families.get(name)
            if held is None:
                full = f"{name}_total" if family.type == "counter" else name
                held = pb_utils.MetricFamily(full, family.documentation, _KINDS[family.type])
                self._families[name] = held
            own = {key: value for key, value in labels if key != "model_name"} | self._labels
            more = {"buckets": bounds} if family.type == "histogram" else {}
            metric = self._metrics[name, labels] = held.Metric(labels=own, **more)
        return metric


def _numbers(family: Any) -> Iterator[tuple[Labels, tuple[float, ...], float]]:
    """Labels and value of each metric of a counter or gauge."""
    wanted = f"{family.name}_total" if family.type == "counter" else family.name
    for sample in family.samples:
        if sample.name == wanted:
            yield tuple(sorted(sample.labels.items())), (), sample.value


def _histograms(family: Any) -> Iterator[tuple[Labels, tuple[float, ...], tuple[list[int], float]]]:
    """Labels, bounds and counts by bucket with the sum of each metric of a histogram."""
    buckets: dict[Labels, list[tuple[float, float]]] = {}
    sums: dict[Labels, float] = {}
    for sample in family.samples:
        labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "le"))
        if sample.name == f"{family.name}_bucket":
            buckets.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name == f"{family.name}_sum":
            sums[labels] = sample.value
    for labels, found in buckets.items():
        found.sort()
        counts, before = [], 0
        for _, cumulative in found:
            counts.append(int(cumulative) - before)
            before = int(cumulative)
        yield labels, tuple(bound for bound, _ in found[:-1]), (counts, sums.get(labels, 0.0))

"""The metrics of model versions: those that serve, and nothing of those that do not any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from conch.core.loads import LoadCounts
from conch.core.registry import Registry
from conch.core.servable import Servable
from conch.core.spec import ModelSpec
from conch.core.stats import ModelStatistics
from conch.observe.metrics.families import (
    FIRST_RESPONSE,
    IN_MODEL,
    LOAD_SECONDS,
    OURS,
    PENDING,
    TRITON,
    WAITING,
    WORKER_RESTARTS,
    WORKER_STATES,
    WORKERS,
    Counted,
    first_responses,
)
from conch.observe.metrics.text import Family, ModelLabels

_COUNTED = (*TRITON, *OURS)
_FAMILIES = (*(family.template.family for family in _COUNTED), FIRST_RESPONSE)
_LIVE = (PENDING, WAITING, IN_MODEL, LOAD_SECONDS)
_WORKERS = (WORKERS, WORKER_RESTARTS)
_NOTHING = ModelStatistics().snapshot()


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The text of what is counted of one model version.

    Attributes:
        mark: That of the statistics that it says.
        labels: The labels.
        chunks: The samples of each family, that of first responses last; empty where the version has none.
    """

    mark: tuple[int, ...]
    labels: ModelLabels
    chunks: tuple[str, ...]


class ModelMetrics:
    """Renders the metrics of all model versions that serve; one thread at a time may.

    Args:
        registry: The models.
        loads: What is counted of loads.
        counters: Whether Triton's counters count; else they stay at 0.
    """

    def __init__(self, registry: Registry, loads: Callable[[], LoadCounts], counters: bool = True) -> None:
        self._registry = registry
        self._loads = loads
        self._counters = counters
        # Not by model: one that is unloaded must not stay until the next scrape, which may never come.
        self._rendered: Mapping[object, _Rendered] = {}

    def render(self, step: Callable[[], None]) -> list[tuple[Family, list[str]]]:
        """The families with their samples, as pieces of text.

        Args:
            step: Called after each model.
        """
        seconds = self._loads().seconds
        rendered: dict[object, _Rendered] = {}
        live: list[list[str]] = [[] for _ in (*_LIVE, *_WORKERS)]
        for model in self._models():
            text = rendered[model.statistics.identity] = self._counted(model)
            spec, statistics = model.spec, model.statistics
            pending = model.pending
            values = (pending, pending, statistics.gauges()[1], seconds.get((spec.identifier, spec.version)))
            for pieces, template, value in zip(live[: len(_LIVE)], _LIVE, values, strict=True):
                if value is not None:
                    pieces.append(template.render(text.labels, (value,)))
            workers = model.workers
            if workers:
                states = [worker.state for worker in workers]
                live[-2].append(WORKERS.render(text.labels, [states.count(state) for state in WORKER_STATES]))
                restarts = sum(worker.restarts for worker in workers)
                live[-1].append(WORKER_RESTARTS.render(text.labels, (restarts,)))
            step()
        self._rendered = rendered
        counted = zip(*(text.chunks for text in rendered.values()), strict=True)
        found = [
            (family, [chunk for chunk in chunks if chunk])
            for family, chunks in zip(_FAMILIES, counted, strict=False)
        ]
        templates = (*_LIVE, *_WORKERS)
        return [*found, *((each.family, pieces) for each, pieces in zip(templates, live, strict=True))]

    def _models(self) -> Iterator[Servable]:
        for _, entry in sorted(self._registry.entries.items()):
            for _, model in sorted(entry.ready.items()):
                yield model

    def _counted(self, model: Servable) -> _Rendered:
        statistics = model.statistics
        mark = statistics.mark  # before the snapshot: what comes in between is rendered again
        before = self._rendered.get(statistics.identity)
        if before is not None and before.mark == mark:
            return before
        spec = model.spec
        labels = _labels(spec) if before is None else before.labels
        snapshot = statistics.snapshot()

        def chunk(family: Counted) -> str:
            if (family.cached_only and not spec.cached) or (not family.triton and snapshot.latencies is None):
                return ""
            counts = snapshot if self._counters or not family.triton else _NOTHING
            return family.template.render(labels, family.values(counts))

        firsts = snapshot.first_responses
        first = "" if firsts is None else first_responses(labels, firsts)
        return _Rendered(mark, labels, (*map(chunk, _COUNTED), first))


def _labels(spec: ModelSpec) -> ModelLabels:
    tags = spec.config.get("metric_tags")
    return ModelLabels.of(spec.name, spec.version, tags if isinstance(tags, Mapping) else {}, spec.namespace)

"""Metrics of the model versions that serve.

Owns a cache of rendered text by model version, renewed when its statistics change. Threads: one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from conch.core.clock import Clock, monotonic_ns
from conch.core.load_statistics import LoadCounts
from conch.core.model_statistics import ModelStatistics
from conch.core.registry import Registry
from conch.core.servable import Servable
from conch.core.spec import InstanceGroup, ModelSpec
from conch.observability.metrics.exemplars import Exemplars, Version
from conch.observability.metrics.load_meter import LoadMeter
from conch.observability.metrics.metric_families import Family, ModelLabels
from conch.observability.metrics.model_families import (
    FIRST_RESPONSE,
    IN_MODEL,
    LOAD_SECONDS,
    OURS,
    PENDING,
    SATURATION,
    TRITON,
    WAITING,
    WORKER_RESTARTS,
    WORKER_STATES,
    WORKERS,
    Counted,
    first_responses,
)
from conch.observability.metrics.summary_metrics import SummaryMetrics

_COUNTED = (*TRITON, *OURS)
_FAMILIES = (*(family.template.family for family in _COUNTED), FIRST_RESPONSE)
_LIVE = (PENDING, WAITING, IN_MODEL, SATURATION, LOAD_SECONDS)
_WORKERS = (WORKERS, WORKER_RESTARTS)
_NOTHING = ModelStatistics().snapshot()


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The rendered counters of one model version.

    Attributes:
        mark: Mark of the rendered statistics.
        groups: The instance groups at that time; labels depend on their GPUs.
        chunks: The samples of each family, first responses last; empty for a family without samples.
    """

    mark: tuple[int, ...]
    groups: Sequence[InstanceGroup]
    labels: ModelLabels
    chunks: tuple[str, ...]


class ModelMetrics:
    """Renders the metrics of all model versions that serve; one thread at a time.

    Args:
        registry: The models.
        loads: Gives the counts of loads.
        meter: Measures the saturation.
        counters: True if Triton's counters count; else durations are left out and the others stay 0.
        quantiles: Quantiles of Triton's summaries; empty for no summaries.
        clock: Monotonic time in nanoseconds.
        gpu_uuids: UUIDs of GPUs by number; empty if unknown.
        exemplars: Traced requests by bucket; None for none.
    """

    def __init__(
        self,
        registry: Registry,
        loads: Callable[[], LoadCounts],
        meter: LoadMeter,
        counters: bool = True,
        quantiles: Sequence[float] = (),
        clock: Clock = monotonic_ns,
        gpu_uuids: Sequence[str] = (),
        exemplars: Exemplars | None = None,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._gpu_uuids = gpu_uuids
        self._summaries = SummaryMetrics(quantiles) if quantiles else None
        self._loads = loads
        self._meter = meter
        self._counters = counters
        self._exemplars = exemplars
        # Keyed by identity, not by model: must not keep an unloaded model alive until the next scrape.
        self._rendered: Mapping[object, _Rendered] = {}

    def render(
        self, step: Callable[[], None], with_exemplars: bool = False
    ) -> list[tuple[Family, list[str]]]:
        """The families with their samples as pieces of text; calls `step` after each model."""
        seconds = self._loads().seconds
        saturation = self._meter.read().saturation
        rendered: dict[object, _Rendered] = {}
        versions: list[Version] = []
        live: list[list[str]] = [[] for _ in (*_LIVE, *_WORKERS)]
        summed: list[list[str]] = []
        for model in self._models():
            text = rendered[model.statistics.identity] = self._counted(model)
            spec, statistics = model.spec, model.statistics
            versions.append((spec.name, spec.version))
            pending = model.pending
            gauges = statistics.gauges()
            values = (
                pending,
                pending,
                gauges.running,
                saturation.get(statistics.identity, 0.0) if gauges.instances else None,
                seconds.get((spec.identifier, spec.version)),
            )
            for pieces, template, value in zip(live[: len(_LIVE)], _LIVE, values, strict=True):
                if value is not None:
                    pieces.append(template.render(text.labels, (value,)))
            if self._summaries is not None:
                summed.append(self._summed(self._summaries, model, text.labels))
            workers = model.workers
            if workers:
                states = [worker.state for worker in workers]
                live[-2].append(WORKERS.render(text.labels, [states.count(state) for state in WORKER_STATES]))
                restarts = sum(worker.restarts for worker in workers)
                live[-1].append(WORKER_RESTARTS.render(text.labels, (restarts,)))
            step()
        self._rendered = rendered
        counted = zip(*self._chunks(versions, rendered.values(), with_exemplars), strict=True)
        found = [
            (family, [chunk for chunk in chunks if chunk])
            for family, chunks in zip(_FAMILIES, counted, strict=False)
        ]
        if self._summaries is not None:
            columns = zip(*summed, strict=True)
            found += [
                (family, [piece for piece in pieces if piece])
                for family, pieces in zip(self._summaries.families, columns, strict=False)
            ]
        templates = (*_LIVE, *_WORKERS)
        return [*found, *((each.family, pieces) for each, pieces in zip(templates, live, strict=True))]

    def _summed(self, summaries: SummaryMetrics, model: Servable, labels: ModelLabels) -> list[str]:
        """A model version's samples of the summaries, which change also without requests."""
        statistics = model.statistics
        quantiles = statistics.quantiles(self._clock(), summaries.quantiles)
        if quantiles is None:
            return [""] * len(summaries.families)
        return summaries.render(labels, statistics.snapshot(), quantiles, model.spec.cached)

    def _chunks(
        self, versions: Sequence[Version], rendered: Iterable[_Rendered], with_exemplars: bool
    ) -> Iterator[Sequence[str]]:
        """The counters of each version, by family."""
        exemplars = self._exemplars
        if exemplars is None or not with_exemplars:
            yield from (text.chunks for text in rendered)
            return
        exemplars.keep(versions)
        for version, text in zip(versions, rendered, strict=True):
            yield [
                exemplars.attach(version, family.name, chunk) if family.kind == "histogram" else chunk
                for family, chunk in zip(_FAMILIES, text.chunks, strict=True)
            ]

    def _models(self) -> Iterator[Servable]:
        for _, entry in sorted(self._registry.entries.items()):
            for _, model in sorted(entry.ready.items()):
                yield model

    def _counted(self, model: Servable) -> _Rendered:
        statistics = model.statistics
        mark = statistics.mark  # before the snapshot: changes in between are rendered again
        before = self._rendered.get(statistics.identity)
        spec = model.spec
        if before is not None and before.mark == mark and before.groups is spec.instance_groups:
            return before
        groups = spec.instance_groups
        known = before is not None and before.groups is groups
        labels = before.labels if known and before is not None else self._labels(spec)
        snapshot = statistics.snapshot()

        def chunk(family: Counted) -> str:
            if (family.cached_only and not spec.cached) or (not family.triton and snapshot.latencies is None):
                return ""
            if family.latency and not self._counters:
                return ""
            counts = snapshot if self._counters or not family.triton else _NOTHING
            return family.template.render(labels, family.values(counts))

        firsts = snapshot.first_responses
        first = "" if firsts is None else first_responses(labels, firsts)
        return _Rendered(mark, groups, labels, (*map(chunk, _COUNTED), first))

    def _labels(self, spec: ModelSpec) -> ModelLabels:
        tags = spec.config.get("metric_tags")
        gpus = {gpu for group in spec.instance_groups for gpu in (group.gpus or (-1,))}
        number = gpus.pop() if len(gpus) == 1 else -1
        # Counts are those of all instances together, so only a single GPU can be a label.
        gpu = self._gpu_uuids[number] if 0 <= number < len(self._gpu_uuids) else ""
        tagged = tags if isinstance(tags, Mapping) else {}
        return ModelLabels.of(spec.name, spec.version, tagged, spec.namespace, gpu)

"""Metrics of the server as a whole, and the metrics that Python models define.

The server's: model states, loads, response cache, shared-memory regions, traces and exports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from conch.core.custom_metrics import FAMILIES, CustomFamilies, FamilySnapshot, Histogram, MetricSnapshot
from conch.core.load_statistics import LoadCounts, Spread
from conch.core.registry import Registry
from conch.core.response_cache.local_cache import LocalCacheStatistics
from conch.observability.exporters import DropCounter, Exporter
from conch.observability.metrics.metric_families import (
    LONG_EXPONENTS,
    Family,
    bounds,
    counted,
    in_seconds,
    labels,
    model_labels,
    sample,
    times,
)
from conch.observability.metrics.model_families import histogram_samples, seconds

Found = list[tuple[Family, list[str]]]

_BOUNDS = bounds(in_seconds(LONG_EXPONENTS))
_STATES = ("LOADING", "READY", "UNLOADING", "UNAVAILABLE")
_MODELS = Family(
    "conch_model_versions", "gauge", "Model versions, by the state that the repository index shows"
)
_LOADS = Family(
    "conch_model_load_duration_seconds",
    "histogram",
    "Time to make a model version ready: its backend, instances and warm-up",
)
_SWAPS = Family(
    "conch_model_swap_duration_seconds",
    "histogram",
    "Time of loads that replaced versions which served, from their turn to the swap",
)
_FAILED_LOADS = Family("conch_model_load_failures_total", "counter", "Loads of a model that have failed")
_FAILED = Family("conch_model_load_failed", "gauge", "1 if the newest load of a model has failed, else 0")
_REPOSITORY_ERRORS = Family(
    "conch_repository_errors_total", "counter", "Listings of a model repository that have failed"
)
_CLOSED = Family(
    "conch_grpc_connections_closed_total",
    "counter",
    "gRPC connections that were closed for what their clients did, by reason",
)
_ENDED = Family(
    "conch_grpc_calls_ended_total",
    "counter",
    "gRPC calls that were ended for what their clients did, by reason",
)
_RECEIVED = Family(
    "conch_grpc_received_bytes", "gauge", "Bytes of requests that the server holds until they are answered"
)
_FRONT_UP = Family("conch_front_up", "gauge", "1 if the front process serves, else 0")
_FRONT_CONNECTIONS = Family("conch_front_connections", "gauge", "Connections of each front process")
_FRONT_CPU = Family(
    "conch_front_cpu_seconds_total", "counter", "Processor time of each front process, in seconds"
)
_FRONT_RESTARTS = Family("conch_front_restarts_total", "counter", "Restarts of each front process")
_READY = Family("conch_ready", "gauge", "1 if the server is ready for requests, else 0")
_POOLS = (
    Family("nv_pinned_memory_pool_total_bytes", "gauge", "Pinned memory pool total memory size, in bytes"),
    Family("nv_pinned_memory_pool_used_bytes", "gauge", "Pinned memory pool used memory size, in bytes"),
)
_CACHE: tuple[tuple[Family, Callable[[LocalCacheStatistics], float]], ...] = (
    (Family("nv_cache_util", "gauge", "Cache utilization [0.0 - 1.0]"), lambda c: c.utilization),
    (
        Family("nv_cache_num_entries", "gauge", "Number of responses stored in response cache"),
        lambda c: c.entries,
    ),
    (Family("nv_cache_num_hits", "gauge", "Number of cache hits in response cache"), lambda c: c.hits),
    (
        Family("nv_cache_num_misses", "gauge", "Number of cache misses in response cache"),
        lambda c: c.lookups - c.hits,
    ),
    (
        Family("nv_cache_num_lookups", "gauge", "Number of cache lookups in response cache"),
        lambda c: c.lookups,
    ),
    (
        Family("nv_cache_num_evictions", "gauge", "Number of cache evictions in response cache"),
        lambda c: c.evictions,
    ),
    (
        Family(
            "nv_cache_lookup_duration", "gauge", "Total cache lookup duration (hit and miss), in microseconds"
        ),
        lambda c: c.lookup_ns // 1000,
    ),
    (
        Family("nv_cache_insertion_duration", "gauge", "Total cache insertion duration, in microseconds"),
        lambda c: c.insertion_ns // 1000,
    ),
    (
        Family("conch_cache_capacity_bytes", "gauge", "Bytes that the response cache may use"),
        lambda c: c.capacity,
    ),
    (Family("conch_cache_used_bytes", "gauge", "Bytes that the response cache uses"), lambda c: c.size),
    (
        Family("conch_cache_expirations_total", "counter", "Responses dropped because they were too old"),
        lambda c: c.expirations,
    ),
    (
        Family(
            "conch_cache_rejections_total",
            "counter",
            "Responses not kept because they are larger than the cache",
        ),
        lambda c: c.rejections,
    ),
)
_REGION_BYTES = Family(
    "conch_shared_memory_region_bytes",
    "gauge",
    "Bytes of the shared-memory regions that clients have registered",
)
_REGIONS = Family(
    "conch_shared_memory_regions", "gauge", "Shared-memory regions that clients have registered"
)
_TRACE_DROPS = Family(
    "conch_trace_dropped_total", "counter", "Traces and spans that were lost, by the reason of the loss"
)
_SPANS = Family("conch_trace_spans_total", "counter", "Spans that a collector has taken")
_TRACE_EXPORTS = Family("conch_trace_exports_total", "counter", "Requests to the collector by their result")
_TRACES_WAITING = Family("conch_trace_queue_spans", "gauge", "Spans that wait for their export")
_EXPORTS = Family(
    "conch_otlp_exports_total", "counter", "Requests with metrics or logs to a collector, by their result"
)
_EXPORT_DROPS = Family(
    "conch_otlp_dropped_total", "counter", "Data points of metrics and log records that were lost"
)

RegionSizes = Callable[[], Mapping[str, Sequence[int]]]
"""Gives the sizes of clients' regions by kind: ``system`` and ``cuda``."""


class StateMetrics:
    """Reads the state of the server; `cache` and `regions` are None if the server has none."""

    def __init__(
        self,
        registry: Registry,
        loads: Callable[[], LoadCounts],
        cache: Callable[[], LocalCacheStatistics] | None = None,
        regions: RegionSizes | None = None,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._ready = ready
        self._registry = registry
        self._loads = loads
        self._cache = cache
        self._regions = regions

    def __call__(self) -> Found:
        """The families with their samples."""
        found = [(family, [sample(family.name, 0)]) for family in _POOLS]  # conch has no such pool
        found.append((_READY, [sample(_READY.name, int(self._ready()))]))
        found += [*self._models(), *self._load_families()]
        if self._cache is not None:
            counts = self._cache()
            found += [(family, [sample(family.name, value(counts))]) for family, value in _CACHE]
        if self._regions is not None:
            found += _region_families(self._regions())
        return found

    def _models(self) -> Found:
        states = Counter(
            state.state for entry in self._registry.entries.values() for state in entry.states.values()
        )
        known = [*_STATES, *sorted(states.keys() - {*_STATES})]
        return [(_MODELS, [sample(_MODELS.name, states[state], {"state": state}) for state in known])]

    def _load_families(self) -> Found:
        counts = self._loads()
        failures, failed = [], []
        for identifier, count in sorted(counts.failures.items()):
            labelled = model_labels(*self._registry.name_and_namespace(identifier))
            failures.append(sample(_FAILED_LOADS.name, count, labelled))
            failed.append(sample(_FAILED.name, int(identifier in counts.failed), labelled))
        return [
            (_LOADS, [spread_histogram(_LOADS.name, counts.loads)]),
            (_SWAPS, [spread_histogram(_SWAPS.name, counts.swaps)]),
            (_FAILED_LOADS, failures),
            (_FAILED, failed),
            (_REPOSITORY_ERRORS, counted(_REPOSITORY_ERRORS, "repository", counts.repository_errors)),
        ]


def spread_histogram(name: str, spread: Spread) -> str:
    """The samples of a histogram of times."""
    counts = times(spread.places, LONG_EXPONENTS)
    values = (*counts, seconds(spread.ns), counts[-1])
    lines = []
    for (suffix, label, bound), value in zip(histogram_samples(_BOUNDS), values, strict=True):
        own = f"{{{labels({label: bound})}}}" if label else ""
        lines.append(f"{name}{suffix}{own} {value}\n")
    return "".join(lines)


def _region_families(sizes: Mapping[str, Sequence[int]]) -> Found:
    return [
        (
            _REGION_BYTES,
            [sample(_REGION_BYTES.name, sum(each), {"kind": kind}) for kind, each in sizes.items()],
        ),
        (_REGIONS, [sample(_REGIONS.name, len(each), {"kind": kind}) for kind, each in sizes.items()]),
    ]


def trace_families(drops: DropCounter, exporter: Exporter[Any] | None) -> Found:
    """The families of traces: lost ones and, in mode ``opentelemetry``, those of the exporter."""
    found = [(_TRACE_DROPS, counted(_TRACE_DROPS, "reason", drops.counts()))]
    if exporter is not None:
        counts = exporter.counts()
        found += [
            (_SPANS, [sample(_SPANS.name, counts.taken)]),
            (_TRACE_EXPORTS, counted(_TRACE_EXPORTS, "result", counts.exports)),
            (_TRACES_WAITING, [sample(_TRACES_WAITING.name, counts.queued)]),
        ]
    return found


def client_families(closed: Mapping[str, int], ended: Mapping[str, int], received_bytes: int) -> Found:
    """The families of what gRPC clients have caused."""
    return [
        (_CLOSED, counted(_CLOSED, "reason", closed)),
        (_ENDED, counted(_ENDED, "reason", ended)),
        (_RECEIVED, [sample(_RECEIVED.name, received_bytes)]),
    ]


class FrontProcess(NamedTuple):
    """A front process, as metrics show it."""

    name: str
    serves: bool
    connections: int
    cpu_s: float
    restarts: int


def front_families(fronts: Iterable[FrontProcess]) -> Found:
    """The families of front processes."""
    up: list[str] = []
    connections: list[str] = []
    cpu: list[str] = []
    restarts: list[str] = []
    for front in fronts:
        labels = {"front": front.name}
        up.append(sample(_FRONT_UP.name, int(front.serves), labels))
        connections.append(sample(_FRONT_CONNECTIONS.name, front.connections, labels))
        cpu.append(sample(_FRONT_CPU.name, front.cpu_s, labels))
        restarts.append(sample(_FRONT_RESTARTS.name, front.restarts, labels))
    return [
        (_FRONT_UP, up),
        (_FRONT_CONNECTIONS, connections),
        (_FRONT_CPU, cpu),
        (_FRONT_RESTARTS, restarts),
    ]


def export_families(exporters: Mapping[str, Exporter[Any]]) -> Found:
    """The families of the exporters of metrics and log, by signal."""
    exports: list[str] = []
    dropped: list[str] = []
    for signal, exporter in exporters.items():
        own = {"signal": signal}
        exports += counted(_EXPORTS, "result", exporter.counts().exports, own)
        dropped += counted(_EXPORT_DROPS, "reason", exporter.drops.counts(), own)
    return [(_EXPORTS, exports), (_EXPORT_DROPS, dropped)]


_CATCH_UP_S = 0.25
"""Longest wait of a scrape for worker processes whose messages another thread is reading."""


class CustomMetrics:
    """The families of a server's models, from ``MetricFamily``.

    Families that models make after their load belong to the process; each of its servers shows them.
    """

    def __init__(self, families: CustomFamilies = FAMILIES) -> None:
        self._families = families

    def __call__(self) -> list[tuple[Family, list[str]]]:
        """The families, by name, with all that models had changed before."""
        self._families.catch_up(_CATCH_UP_S)
        return [
            (
                Family(family.name, family.kind, family.description),
                [_samples(family.name, metric) for metric in family.metrics],
            )
            for family in self.snapshot()
        ]

    def snapshot(self) -> list[FamilySnapshot]:
        """The families with their metrics, by name."""
        own = self._families.snapshot()
        if self._families is FAMILIES:
            return own
        found = {family.name: family for family in own}
        for family in FAMILIES.snapshot():
            known = found.get(family.name)
            if known is None:
                found[family.name] = family
            elif known.kind == family.kind:
                labels = {frozenset(metric.labels.items()) for metric in known.metrics}
                others = [
                    metric for metric in family.metrics if frozenset(metric.labels.items()) not in labels
                ]
                found[family.name] = replace(known, metrics=(*known.metrics, *others))
        return [found[name] for name in sorted(found)]


def _samples(name: str, metric: MetricSnapshot) -> str:
    own = metric.labels
    value = metric.value
    if not isinstance(value, Histogram):
        return sample(name, value, own)
    counts = value.cumulative()
    lines = [
        f"{name}_bucket{{{labels({**own, 'le': bound})}}} {count}\n"
        for bound, count in zip(bounds(value.bounds), counts, strict=True)
    ]
    return "".join((*lines, sample(f"{name}_sum", value.sum, own), sample(f"{name}_count", counts[-1], own)))

"""Metrics of residency on demand."""

from __future__ import annotations

from collections.abc import Callable

from conch.core.registry import Registry
from conch.observability.metrics.metric_families import Family, model_labels, sample
from conch.observability.metrics.server_metrics import Found, spread_histogram
from conch_residency.residency_counts import ResidencyCounts

_RESIDENCY: tuple[tuple[Family, Callable[[ResidencyCounts], float]], ...] = (
    (
        Family("conch_resident_models", "gauge", "Models in memory, in on-demand mode"),
        lambda c: len(c.models),
    ),
    (
        Family("conch_catalogue_models", "gauge", "Models of the repositories, in memory or not"),
        lambda c: c.catalogue,
    ),
    (
        Family("conch_cold_requests", "gauge", "Requests that wait for their model to be loaded"),
        lambda c: c.waiting,
    ),
    (
        Family(
            "conch_residency_thrash", "gauge", "Pairs of models that have evicted each other again and again"
        ),
        lambda c: c.thrash,
    ),
)
_RESIDENT_BYTES = Family(
    "conch_resident_bytes", "gauge", "Memory of the models in memory by device, measured or estimated"
)
_RESIDENT_LIMITS = Family(
    "conch_resident_limit_bytes", "gauge", "Memory that all models in memory together may take, by device"
)
_MODEL_BYTES = Family(
    "conch_resident_model_bytes", "gauge", "Memory of each model in memory by device, measured or estimated"
)
_MODEL_COLD_STARTS = Family(
    "conch_model_cold_starts_total",
    "counter",
    "Requests that have waited for loads of a model, of the models in memory",
)
_COLD_STARTS = Family(
    "conch_cold_starts_total", "counter", "Requests for models that were not in memory, by result"
)
_RESULTS = ("loaded", "failed", "timeout", "rejected")
_EVICTIONS = Family("conch_evictions_total", "counter", "Models that have left memory, by reason")
_REASONS = ("room", "idle", "memory", "unload")
_COLD_TIMES = Family(
    "conch_cold_start_seconds", "histogram", "Time from the first request for a model to the end of its load"
)
_LOAD_QUEUE = Family(
    "conch_load_queue_seconds",
    "histogram",
    "Time from the first request for a model to the beginning of its load",
)
_AGES = Family("conch_eviction_age_seconds", "histogram", "Time from the load of a model to its eviction")


def residency_families(registry: Registry, counts: ResidencyCounts) -> Found:
    """The families with their samples."""
    found = [(family, [sample(family.name, value(counts))]) for family, value in _RESIDENCY]
    sums, limits, sizes, starts = [], [], [], []
    for device, limit in counts.limits.items():
        total = sum(model.bytes[device] for model in counts.models.values())
        sums.append(sample(_RESIDENT_BYTES.name, total, {"device": device}))
        limits.append(sample(_RESIDENT_LIMITS.name, limit, {"device": device}))
    for identifier, model in sorted(counts.models.items()):
        own = model_labels(*registry.name_and_namespace(identifier))
        starts.append(sample(_MODEL_COLD_STARTS.name, model.cold_starts, own))
        sizes += [
            sample(_MODEL_BYTES.name, size, {"device": device, **own}) for device, size in model.bytes.items()
        ]
    found += [(_RESIDENT_BYTES, sums), (_RESIDENT_LIMITS, limits)]
    found += [(_MODEL_BYTES, sizes), (_MODEL_COLD_STARTS, starts)]
    for family, by_label, label, known in (
        (_COLD_STARTS, counts.cold_starts, "result", _RESULTS),
        (_EVICTIONS, counts.evictions, "reason", _REASONS),
    ):
        samples = [sample(family.name, by_label.get(each, 0), {label: each}) for each in known]
        found.append((family, samples))
    spreads = ((_COLD_TIMES, counts.start_times), (_LOAD_QUEUE, counts.queue_times), (_AGES, counts.ages))
    return [*found, *((family, [spread_histogram(family.name, spread)]) for family, spread in spreads)]

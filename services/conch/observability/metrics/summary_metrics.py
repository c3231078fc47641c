"""Triton's summaries of model versions: quantiles of recent times, with total sum and count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conch.core import summaries as stages
from conch.core.model_statistics import StatisticsSnapshot
from conch.core.statistics_snapshot import Duration
from conch.observability.metrics.metric_families import Family, ModelLabels, Template, number


@dataclass(frozen=True, slots=True)
class _Summary:
    """One family.

    Attributes:
        stage: The stage whose times it summarises.
        total: Gives their number and sum.
        cached: True for models with a response cache only, False for models without, None for both.
    """

    template: Template
    stage: int
    total: Callable[[StatisticsSnapshot], Duration]
    cached: bool | None


# Triton has no summary of whole requests for models with a response cache.
_CACHED: dict[int, bool] = {stages.REQUEST: False, stages.CACHE_HIT: True, stages.CACHE_MISS: True}
_TOTALS: Sequence[tuple[str, str, int, Callable[[StatisticsSnapshot], Duration]]] = (
    (
        "nv_inference_request_summary_us",
        "Summary of inference request duration in microseconds (includes cached requests)",
        stages.REQUEST,
        lambda s: s.success,
    ),
    (
        "nv_inference_queue_summary_us",
        "Summary of inference queuing duration in microseconds (includes cached requests)",
        stages.QUEUE,
        lambda s: s.queue,
    ),
    (
        "nv_inference_compute_input_summary_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        stages.COMPUTE_INPUT,
        lambda s: s.compute_input,
    ),
    (
        "nv_inference_compute_infer_summary_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        stages.COMPUTE_INFER,
        lambda s: s.compute_infer,
    ),
    (
        "nv_inference_compute_output_summary_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        stages.COMPUTE_OUTPUT,
        lambda s: s.compute_output,
    ),
    (
        "nv_cache_hit_summary_per_model",
        "Summary of cache hit counts/durations per model, in microseconds.",
        stages.CACHE_HIT,
        lambda s: s.cache_hit,
    ),
    (
        "nv_cache_miss_summary_per_model",
        "Summary of cache miss counts/durations per model, in microseconds.",
        stages.CACHE_MISS,
        lambda s: s.cache_miss,
    ),
)


class SummaryMetrics:
    """Renders the summaries with the given quantiles, from 0 to 1."""

    def __init__(self, quantiles: Sequence[float]) -> None:
        self.quantiles = tuple(quantiles)
        samples = [
            ("_count", "", ""),
            ("_sum", "", ""),
            *(("", "quantile", repr(quantile)) for quantile in quantiles),
        ]
        self._families = [
            _Summary(Template(Family(name, "summary", text), samples), stage, total, _CACHED.get(stage))
            for name, text, stage, total in _TOTALS
        ]

    @property
    def families(self) -> list[Family]:
        """The families."""
        return [summary.template.family for summary in self._families]

    def render(
        self,
        labels: ModelLabels,
        counted: StatisticsSnapshot,
        quantiles: Sequence[Sequence[float]],
        cached: bool,
    ) -> list[str]:
        """The samples of a model version by family, empty for a family without samples.

        `quantiles` has the quantiles of each stage in nanoseconds; `cached` tells if it has a response cache.
        """
        pieces: list[str] = []
        for summary in self._families:
            if summary.cached not in (None, cached):
                pieces.append("")
                continue
            total = summary.total(counted)
            found = [number(ns / 1000) for ns in quantiles[summary.stage]]
            pieces.append(summary.template.render(labels, (total.count, total.ns // 1000, *found)))
        return pieces

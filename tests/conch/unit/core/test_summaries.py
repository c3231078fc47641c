"""Quantiles of the times of late."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.core import make_request

from conch.core.model_statistics import ModelStatistics, RequestEnd
from conch.core.scheduling.scheduler import Batch
from conch.core.summaries import (
    CACHE_HIT,
    CACHE_MISS,
    COMPUTE_INFER,
    QUEUE,
    REQUEST,
    SLICE_NS,
    SLICES,
    Summaries,
    bucket_middle,
    bucket_of,
)
from conch.observability.metrics.metric_families import ModelLabels
from conch.observability.metrics.summary_metrics import SummaryMetrics

WANTED = (0.0, 0.5, 0.99, 1.0)


@given(st.integers(0, 2**64))
def test_a_step_holds_times_that_are_about_the_same(ns: int) -> None:
    step = bucket_of(ns)
    assert bucket_of(ns + 1) in (step, step + 1)
    assert abs(bucket_middle(step) - ns) <= ns / 64


@given(st.lists(st.integers(0, 10**12), min_size=1), st.floats(0, 1))
def test_quantiles_are_near_those_of_all_times(times: list[int], quantile: float) -> None:
    summaries = Summaries()
    for ns in times:
        summaries.add(1_000, REQUEST, ns)
    ((found,), *others) = summaries.quantiles(1_000, [quantile])
    exact = sorted(times)[max(math.ceil(quantile * len(times)), 1) - 1]
    assert found == pytest.approx(exact, rel=1 / 63)
    assert all(math.isnan(other[0]) for other in others)


@given(st.lists(st.integers(0, 10 * SLICE_NS), min_size=1).map(sorted))
def test_what_is_long_ago_is_forgotten(moments: list[int]) -> None:
    """Times of the last minute are left, give or take a slice."""
    summaries = Summaries()
    for moment in moments:
        summaries.add(moment, QUEUE, moment)
    now = moments[-1]
    least = summaries.quantiles(now, [0.0])[QUEUE][0]
    late = [moment for moment in moments if moment > now - (SLICES - 1) * SLICE_NS]
    assert least <= late[0] * 65 / 64
    assert least >= (now - SLICES * SLICE_NS) * 63 / 64 - 1
    assert all(math.isnan(each[0]) for each in summaries.quantiles(now + SLICES * SLICE_NS, [0.5]))
    summaries.add(now + 100 * SLICE_NS, QUEUE, 7)
    assert summaries.quantiles(now + 100 * SLICE_NS, [0.0, 1.0])[QUEUE] == [7, 7]


def test_what_counts() -> None:
    statistics = ModelStatistics()
    assert statistics.quantiles(0, WANTED) is None
    statistics.keep_summaries()
    batch = Batch([make_request(received_ns=0, queued_ns=10), make_request(received_ns=20, queued_ns=30)], 2)
    batch.compute_start_ns, batch.compute_input_end_ns = 40, 45
    batch.compute_output_start_ns, batch.compute_end_ns = 60, 63
    statistics.record_batch(batch, [RequestEnd.SUCCEEDED] * 2)
    found = statistics.quantiles(100, (0.0, 1.0))
    assert found is not None
    assert found[REQUEST : COMPUTE_INFER + 1] == [[43, 63], [10, 30], [5, 5], [15, 15]]
    statistics.record_hit(5, 6, 50)
    statistics.record_miss(9)
    statistics.record_miss(1, 0)


def test_how_they_read() -> None:
    metrics = SummaryMetrics((0.5, 0.999))
    statistics = ModelStatistics()
    statistics.record_hit(5_000, 6_000, 50_000)
    labels = ModelLabels.of("m", 1, {})
    quantiles = [[1_500.0, math.nan]] * (CACHE_MISS + 1)
    assert metrics.render(labels, statistics.snapshot(), quantiles, False)[0] == (
        'nv_inference_request_summary_us_count{model="m",version="1"} 1\n'
        'nv_inference_request_summary_us_sum{model="m",version="1"} 50\n'
        'nv_inference_request_summary_us{model="m",version="1",quantile="0.5"} 1.5\n'
        'nv_inference_request_summary_us{model="m",version="1",quantile="0.999"} NaN\n'
    )
    pieces = metrics.render(labels, statistics.snapshot(), quantiles, True)
    assert pieces[REQUEST] == ""  # Triton has none of models with a response cache
    assert pieces[CACHE_HIT].startswith('nv_cache_hit_summary_per_model_count{model="m",version="1"} 1\n')
    assert metrics.render(labels, statistics.snapshot(), quantiles, False)[CACHE_HIT:] == ["", ""]
    assert [family.kind for family in metrics.families] == ["summary"] * 7

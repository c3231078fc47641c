"""Results of the load generator: totals over slices and the JSON file."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from conch_tools.perf.measure.histogram import Histogram
from conch_tools.perf.measure.json_fields import ResultsFormatError
from conch_tools.perf.measure.results import (
    Generator,
    Load,
    PerfResult,
    Point,
    ServerStatistics,
)
from conch_tools.perf.measure.slices import Slice

MS = 1_000_000


def _result() -> PerfResult:
    slices = tuple(
        Slice(
            second,
            sent=12,
            answered=10,
            responses=20,
            errors=Counter({"UNAVAILABLE": 2}),
            late=1,
            shed=3,
            latency=Histogram.of([second * MS + MS] * 10),
            service=Histogram.of([MS] * 10),
            first=Histogram.of([MS // 2] * 10),
            between=Histogram.of([MS // 4] * 10),
        )
        for second in range(4)
    )
    point = Point(
        Load("rate", 15, "poisson"),
        slices,
        length_s=4.0,
        connections=2,
        generator=Generator(2, 1.0, 4.0),
        server=ServerStatistics(inferences=40, executions=20, requests=40, queue_ns=MS),
        composing={"part:1": ServerStatistics(inferences=40)},
        metrics={"gpu_utilization": 0.5},
    )
    return PerfResult(
        model="m",
        version="1",
        endpoint="grpc",
        protocol="grpc/h2",
        batch=1,
        request_bytes=200,
        argv=("conch", "perf", "m"),
        machine={"cpus": "2"},
        started="2026-11-27T00:00:00+00:00",
        points=(point,),
    )


def test_totals_are_sums_over_slices() -> None:
    (point,) = _result().points
    assert (point.sent, point.answered, point.failed, point.shed, point.late) == (48, 40, 8, 12, 4)
    assert point.offered_rate == 15
    assert point.achieved_rate == 10
    assert point.error_share == 8 / 48
    assert point.generator.cpu_share == 0.125
    assert point.latency.count == 40


def test_file_round_trip() -> None:
    text = _result().to_json()
    again = PerfResult.from_json(text)
    assert again.to_json() == text
    assert again.points[0].latency.quantile_ns(0.5) == _result().points[0].latency.quantile_ns(0.5)


def test_reads_files_of_earlier_versions() -> None:
    found = json.loads(_result().to_json())
    for one in found["points"][0]["slices"]:
        del one["next_one"], one["token"]
    assert PerfResult.from_json(json.dumps(found)).to_json() == _result().to_json()


def test_refuses_another_format_and_names_a_wrong_field() -> None:
    found = json.loads(_result().to_json())
    with pytest.raises(ResultsFormatError, match="this version of conch reads format 1"):
        PerfResult.from_json(json.dumps({**found, "format": 2}))
    found["points"][0]["slices"][1]["sent"] = -1
    with pytest.raises(ResultsFormatError, match=r"points\[0\]\.slices\[1\]\.sent must be an integer"):
        PerfResult.from_json(json.dumps(found))
    with pytest.raises(ResultsFormatError, match="not a JSON file"):
        PerfResult.from_json("<html>")


def test_a_percentile_is_a_time_that_was_measured() -> None:
    times = Histogram.of(range(1, 101))
    assert [times.quantile_ns(share) for share in (0, 0.5, 1)] == [1, 51, 100]

"""Reports of a run: a page that stands alone, tables and files."""

from __future__ import annotations

import csv
import math
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from conch_tools.perf.measure.comparison import compare
from conch_tools.perf.measure.histogram import Histogram
from conch_tools.perf.measure.results import Generator, Load, PerfResult, Point, ServerStatistics
from conch_tools.perf.measure.slices import Slice
from conch_tools.perf.measure.slo_search import Limit, judge_points
from conch_tools.perf.reports.figures import knee, stage_times_ms
from conch_tools.perf.reports.html_report import as_html
from conch_tools.perf.reports.tables import as_csv, as_markdown, as_terminal, token_table
from conch_tools.reports.svg_chart import Axis, Chart

MS = 1_000_000
HOSTILE = "<img src=x onerror=alert(1)>|\"'&"


def _point(load: float, rate: int, latency_ms: float) -> Point:
    random = np.random.default_rng(1)
    slices = []
    for second in range(6):
        times = Histogram.of(random.lognormal(np.log(latency_ms * MS), 0.3, rate))
        errors = Counter({HOSTILE: 1}) if second == 3 else Counter[str]()
        slices.append(
            Slice(
                second,
                rate,
                rate,
                rate * 5,
                errors,
                latency=times,
                service=times,
                first=times,
                between=times,
                next_one=times,
                token=times,
            )
        )
    count = rate * 6
    server = ServerStatistics(
        count, count, count, count * MS, *(count * part * MS // 10 for part in (1, 2, 3, 1))
    )
    return Point(Load("concurrency", load), tuple(slices), 6.0, 1, Generator(1, 1, 6), server)


RESULT = PerfResult(
    model=HOSTILE,
    version="1",
    endpoint="grpc",
    protocol="grpc/h2",
    batch=1,
    request_bytes=200,
    argv=("conch", "perf", HOSTILE),
    machine={HOSTILE: HOSTILE},
    started="2026-11-27",
    points=(_point(1, 100, 2), _point(2, 190, 2.1), _point(4, 200, 4)),
)


def test_page_stands_alone_and_escapes() -> None:
    text = as_html(RESULT, compare(RESULT, replace(RESULT, machine={})))
    page = ET.fromstring(
        text.replace("<!DOCTYPE html>", "").replace('xmlns="http://www.w3.org/2000/svg" ', "")
    )
    assert not {"img", "script", "link", "iframe"} & {node.tag for node in page.iter()}
    assert not any(name in node.attrib for node in page.iter() for name in ("src", "href", "onerror"))
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in text
    figures = page.findall(".//figure")
    titles = [node.text or "" for node in page.iter("h2")]
    assert len(titles) == len(figures)
    for start in (
        "Throughput",
        "Latency by",
        "Latency over",
        "Where",
        "Errors",
        "Time to first",
        "Inter-r",
        "Inter-t",
    ):
        assert any(title.startswith(start) for title in titles), start
    for figure in figures:
        assert figure.find("svg") is not None
        assert figure.findall(".//tbody/tr"), ET.tostring(figure)[:200]


@pytest.mark.parametrize(
    "points",
    [
        (),
        (Point(Load("rate", 5), (), 0.0, 0, Generator(1, 0, 0)),),
        (
            Point(
                Load("rate", 5),
                (Slice(0, 5, errors=Counter({"UNAVAILABLE": 5})),),
                1.0,
                1,
                Generator(1, 1, 1),
            ),
        ),
        (replace(_point(1, 1, 1), slices=_point(1, 1, 1).slices[:1], length_s=1.0),),
    ],
)
def test_every_report_has_each_point(points: tuple[Point, ...]) -> None:
    result = replace(RESULT, points=points)
    ET.fromstring(as_html(result).replace("<!DOCTYPE html>", ""))
    assert as_markdown(result)
    assert len(list(csv.DictReader(as_csv(result).splitlines()))) == len(points)
    assert sum(str(point.load) in as_terminal(result) for point in points) == len(points)


def test_csv_has_the_numbers_of_the_points() -> None:
    rows = list(csv.DictReader(as_csv(RESULT).splitlines()))
    for row, point in zip(rows, RESULT.points, strict=True):
        assert float(row["achieved/s"]) == pytest.approx(point.achieved_rate, abs=1e-3)
        assert float(row["latency p99 us"]) == pytest.approx(point.latency.quantile_ns(0.99) / 1e3, abs=0.1)
        assert float(row["p99 low us"]) <= float(row["latency p99 us"]) <= float(row["p99 high us"])
        assert row["verdict"]


def test_every_report_has_the_outcome_of_the_limits() -> None:
    limits = [Limit.parse("p99=2.5s"), Limit.parse("p50=3ms")]
    outcome = judge_points(limits, RESULT.points)
    result = replace(RESULT, limits=outcome)
    assert "concurrency 4: " in outcome.reason and "times p50=3ms" in outcome.reason
    for text in (as_terminal(result), as_markdown(result), as_html(result), result.to_json()):
        assert outcome.reason in text
    assert [row["within limits"] for row in csv.DictReader(as_csv(result).splitlines())] == [
        "yes",
        "yes",
        "no",
    ]
    assert {row["within limits"] for row in csv.DictReader(as_csv(RESULT).splitlines())} == {""}
    assert PerfResult.from_json(result.to_json()).limits == outcome


def test_token_table_has_the_rate_of_all_and_of_one_user() -> None:
    for row, point in zip(token_table(RESULT).rows, RESULT.points, strict=True):
        found = dict(zip(token_table(RESULT).columns, row, strict=True))
        assert found["output tokens/s"] == pytest.approx(5 * point.achieved_rate)
        assert found["tokens/request"] == 5
        itl, of_a_user = found["ITL p50 ms"], found["tokens/s of a user"]
        assert isinstance(itl, float)
        assert of_a_user == pytest.approx(1000 / itl)
    assert "TTFT p99 ms" in as_terminal(RESULT)
    single = replace(
        RESULT, points=(Point(Load("rate", 5), (Slice(0, 5, 5, 5),), 1.0, 1, Generator(1, 1, 1)),)
    )
    assert "TTFT" not in as_terminal(single) + as_markdown(single)


def test_markdown_rows_have_as_many_cells_as_their_head() -> None:
    for block in as_markdown(RESULT).split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
        assert len(cells) <= 1, block
    assert "<img" not in as_markdown(RESULT)


def test_knee_and_stages() -> None:
    assert knee(RESULT.points).load.value == 2
    point = RESULT.points[0]
    assert point.server is not None
    times = stage_times_ms(point, point.server)
    assert times[1:] == pytest.approx((0.1, 0.2, 0.3, 0.1, 0.3))
    assert sum(times) == pytest.approx(point.service.mean_ns / MS)


@pytest.mark.parametrize("values", [(0.001, 0.5), (3, 3), (1, 9e6), (0, 0), (7, 4000)])
@pytest.mark.parametrize("scale", ["linear", "log", "percentile"])
def test_axes_place_their_values_and_ticks_in_order(values: tuple[float, float], scale: str) -> None:
    axis = Axis.over("x", values, scale)  # type: ignore[arg-type]
    places = [axis.place(value) for value, _ in axis.marks()]
    assert places == sorted(set(places))
    assert all(0 <= place <= 1 for place in places)
    assert len(places) <= 14
    low, high = sorted(values)
    assert axis.place(low) <= axis.place(high)
    chart = Chart(HOSTILE, axis, axis)
    chart.points([values], 0, [HOSTILE])
    chart.line([values], 7, HOSTILE)
    ET.fromstring(chart.svg())


def _spans(chart: Chart) -> tuple[ET.Element, list[tuple[float, float, float]]]:
    """The picture, and baseline, left and right of each text that is not turned, at 7 units a letter."""
    picture = ET.fromstring(chart.svg().replace('xmlns="http://www.w3.org/2000/svg" ', ""))
    found = []
    for group in (picture, *picture.iter("g")):
        down = float(re.findall(r"[\d.]+", group.get("transform", "0 0"))[-1])
        for text in group.findall("text"):
            if text.get("transform") is None:
                x, length = float(text.get("x", "")), 7 * len(text.text or "")
                left = x - length * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor", "")]
                found.append((float(text.get("y", "")) + down, left, left + length))
    return picture, sorted(found)


@pytest.mark.parametrize("count", [1, 3, 11, 40])
@pytest.mark.parametrize("name", ["rate 1487.5/s", "c 8", "x" * 200])
def test_texts_of_a_chart_are_inside_and_apart(count: int, name: str) -> None:
    names = [f"{name} {number}" for number in range(count)]
    chart = Chart("loads", Axis.of_names("load", names), Axis.over("ms", [2.0]))
    for index, each in enumerate(names):
        chart.bar(index, 0, 2, index, each)
    picture, spans = _spans(chart)
    _, _, width, height = map(float, picture.get("viewBox", "").split())
    assert all(left >= 0 and right <= width and 0 <= y <= height for y, left, right in spans)
    for (y, _, right), (other, left, _) in pairwise(spans):
        assert y != other or right <= left
    turned = [text for text in picture.iter("text") if "rotate(-45" in text.get("transform", "")]
    places = [(float(text.get("x", "")), float(text.get("y", ""))) for text in turned]
    assert all(right - left >= 12 * math.sqrt(2) for (left, _), (right, _) in pairwise(places))
    for (x, y), text in zip(places, turned, strict=True):
        reach = 7 * len(text.text or "") / math.sqrt(2)
        assert reach <= x and y + reach <= height
    legends = [text for text in picture.iter("text") if text.get("text-anchor") == "start"]
    assert len(legends) == count

"""The text of metrics, read by prometheus_client's own parsers and compared with what it makes itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector
from tests.support.metrics import families, samples

from conch.core.custom_metrics import label_name
from conch.observability.metrics.metric_families import (
    EXPONENTS,
    SIZES,
    Family,
    ModelLabels,
    Template,
    bounds,
    in_seconds,
    labels,
    number,
    sample,
    sizes,
    times,
)
from conch.observability.metrics.model_families import histogram_samples, seconds

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0\1\2"), max_size=20)


class Holding(Collector):
    """A collector of given families."""

    def __init__(self, *found: Metric) -> None:
        self._found = found

    def collect(self) -> tuple[Metric, ...]:
        return self._found


def theirs(metric: Metric) -> tuple[str, str]:
    """Text of prometheus_client for a family, in both formats."""
    registry = CollectorRegistry()
    registry.register(Holding(metric))
    openmetrics: Any = generate_openmetrics
    return generate_latest(registry).decode(), openmetrics(registry).decode()


@given(ANY_TEXT, ANY_TEXT, ANY_TEXT, st.floats(allow_nan=False))
def test_odd_names_and_values_come_through(model: str, tag: str, told: str, value: float) -> None:
    pairs = {"model": model, "_team": tag}
    help_text = told.strip() or "x"
    metric = GaugeMetricFamily("g", help_text, labels=list(pairs))
    metric.add_metric(list(pairs.values()), value)
    family = Family("g", "gauge", help_text)
    for openmetrics, their_text in enumerate(theirs(metric)):
        end = "# EOF\n" if openmetrics else ""
        text = family.header(bool(openmetrics)) + sample("g", value, pairs) + end
        assert samples(text, bool(openmetrics)) == samples(their_text, bool(openmetrics))
        assert text.splitlines()[0].split(" ", 3)[:3] == their_text.splitlines()[0].split(" ", 3)[:3]


@given(ANY_TEXT, st.lists(st.integers(0, 10**6), min_size=65, max_size=65))
def test_a_histogram_is_what_prometheus_client_makes_of_it(model: str, places: list[int]) -> None:
    counts = times(places)
    labels = ModelLabels.of(model, 3, {"team": "100%s"})
    upper = bounds(in_seconds(EXPONENTS))
    template = Template(Family("h", "histogram", "told"), histogram_samples(upper))
    text = template.family.header(False) + template.render(
        labels, (*counts, seconds(1_500_000_000), counts[-1])
    )
    metric = HistogramMetricFamily("h", "told", labels=["model", "_team", "version"])
    metric.add_metric([model, "100%s", "3"], list(zip(upper, counts, strict=True)), sum_value=1.5)
    their_text, their_openmetrics = theirs(metric)
    assert samples(text) == samples(their_text)
    assert samples(text + "# EOF\n", True) == samples(their_openmetrics, True)


def test_labels_stand_where_triton_has_them() -> None:
    family = Family("nv_inference_request_failure", "counter", "told")
    template = Template(family, [("", "reason", "REJECTED")])
    assert template.render(ModelLabels.of("m", 1, {"team": "x"}), (1,)) == (
        'nv_inference_request_failure{_team="x",model="m",reason="REJECTED",version="1"} 1\n'
    )


def test_counters_have_the_same_names_in_both_formats() -> None:
    """A Prometheus asks for OpenMetrics where it can, and a dashboard of Triton's must go on working."""
    for name, kind in (("nv_inference_count", "unknown"), ("conch_copied_bytes_total", "counter")):
        family = Family(name, "counter", "told")
        text = family.header(False) + sample(name, 3)
        openmetrics = family.header(True) + sample(name, 3) + "# EOF\n"
        assert list(samples(text)) == list(samples(openmetrics, True)) == [(name, frozenset())]
        (found,) = families(openmetrics, True).values()
        assert found.type == kind
        assert f"# TYPE {name} counter\n" in text


def test_bounds_are_written_as_triton_writes_them() -> None:
    upper = (0.1, 1.0, 2.5, 100.0, 123456.789, 1e6, 1e15, 1e16, 12345678901234567890, 1e22)
    assert bounds(upper) == (
        *("0.1", "1", "2.5", "100", "123456.789", "1000000", "1000000000000000", "1e+16"),
        *("1.234567890123457e+19", "1e+22", "+Inf"),
    )


@given(st.lists(st.integers(0, 2**63), max_size=30))
def test_times_are_counted_up_to_each_bound(given_times: list[int]) -> None:
    places = [0] * 65
    for ns in given_times:
        places[ns.bit_length()] += 1
    expected = [sum(ns < 2**exponent for ns in given_times) for exponent in EXPONENTS]
    assert times(places) == [*expected, len(given_times)]


@given(st.dictionaries(st.integers(1, 500), st.integers(1, 50), max_size=6))
def test_batch_sizes_are_counted_up_to_each_bound(executions: dict[int, int]) -> None:
    expected = [sum(count for size, count in executions.items() if size <= bound) for bound in SIZES]
    assert sizes(executions) == [*expected, sum(executions.values())]


@given(st.floats())
def test_numbers_read_as_they_were(value: float) -> None:
    read = float(number(value))
    assert read == value or (math.isnan(read) and math.isnan(value))


@given(st.integers(0, 10**18))
def test_seconds_are_exact(ns: int) -> None:
    whole, _, rest = seconds(ns).partition(".")
    assert int(whole) * 10**9 + int(rest) == ns and len(rest) == 9


@pytest.mark.parametrize(("key", "name"), [("team", "team"), ("a-b c", "a_b_c"), ("1x", "_1x"), ("ü", "_")])
def test_what_cannot_name_a_label_is_replaced(key: str, name: str) -> None:
    assert label_name(key) == name


def test_labels_are_escaped() -> None:
    assert labels({"b": 'a "\\\n', "a": ""}) == 'a="",b="a \\"\\\\\\n"'

"""Metrics that models make with ``pb_utils.MetricFamily``; the texts of errors are Triton's."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import triton_python_backend_utils as pb_utils
from hypothesis import given
from hypothesis import strategies as st
from tests.support.metrics import samples, value

from conch.core import custom_metrics
from conch.core.custom_metrics import family_names
from conch.observability.metrics.server_metrics import CustomMetrics

Family: Any = pb_utils.MetricFamily
COUNTER, GAUGE, HISTOGRAM = Family.COUNTER, Family.GAUGE, Family.HISTOGRAM


def told() -> dict[Any, float]:
    return samples("".join(family.header(False) + "".join(each) for family, each in CustomMetrics()()))


def test_a_counter_a_gauge_and_a_histogram() -> None:
    counts, levels = Family(name="c", description="what", kind=COUNTER), Family("g", "what", GAUGE)
    spreads = Family("h", "what", HISTOGRAM)
    count, level = counts.Metric(labels={"model": "m"}), levels.Metric()
    spread = spreads.Metric(labels={"a-b": "1"}, buckets=[0.5, 1, 10])
    count.increment(2.5)
    count.increment(0)
    level.set(7)
    level.increment(-9)
    for number in (0.5, 0.75, 11):
        spread.observe(number)
    assert (count.value(), level.value()) == (2.5, -2)
    found = told()
    assert value(found, "c", model="m") == 2.5
    assert value(found, "g") == -2
    buckets = [value(found, "h_bucket", a_b="1", le=bound) for bound in ("0.5", "1", "10", "+Inf")]
    assert buckets == [1, 2, 2, 3]
    assert (value(found, "h_sum", a_b="1"), value(found, "h_count", a_b="1")) == (12.25, 3)


def test_many_changes_at_once() -> None:
    families = (
        Family("some_c", "what", COUNTER),
        Family("some_g", "what", GAUGE),
        Family("some_h", "what", HISTOGRAM),
    )
    count, level = families[0].Metric(), families[1].Metric()
    spread = families[2].Metric(buckets=[1, 10, math.inf])
    for _ in range(2):
        pb_utils.update_metrics([(count, 2), (level, 5), (spread, ([1, 0, 2], 30.5))])
    found = told()
    assert (value(found, "some_c"), value(found, "some_g")) == (4, 5)
    assert [value(found, "some_h_bucket", le=bound) for bound in ("1", "10", "+Inf")] == [2, 2, 6]
    assert value(found, "some_h_sum") == 61
    wrong: tuple[Any, ...] = (
        (count, -1),
        (count, ([1], 1.0)),
        (spread, ([1, 2], 3.0)),
        (spread, ([1, -1, 0], 0.0)),
    )
    for change in wrong:
        with pytest.raises(pb_utils.TritonModelException, match="Failed to update metrics"):
            pb_utils.update_metrics([change])


def test_what_a_model_no_longer_holds_is_gone() -> None:
    family = Family("gone", "what", GAUGE)
    metric = family.Metric()
    metric.set(1)
    assert value(told(), "gone") == 1
    del metric
    gc.collect()
    assert value(told(), "gone") is None


@pytest.mark.parametrize(
    ("kind", "buckets", "what", "use"),
    [
        (COUNTER, None, "increment", lambda metric: metric.increment(1)),
        (COUNTER, None, "get", lambda metric: metric.value()),
        (GAUGE, None, "set", lambda metric: metric.set(1)),
        (HISTOGRAM, [], "observe", lambda metric: metric.observe(1)),
    ],
)
def test_a_metric_ends_with_its_family(
    kind: int, buckets: Any, what: str, use: Callable[[Any], None]
) -> None:
    family = Family("deleted", "what", kind)
    metric = family.Metric(buckets=buckets)
    use(metric)
    del family
    gc.collect()
    with pytest.raises(
        pb_utils.TritonModelException,
        match=f"^Failed to {what} metric value: Invalid metric operation as the corresponding 'MetricFamily' "
        "has been deleted",
    ):
        use(metric)
    assert not any(name.startswith("deleted") for name, _ in told())


def test_models_share_a_family_and_its_metrics() -> None:
    one, other = Family("shared", "what", COUNTER), Family("shared", "what else", COUNTER)
    first, same, apart = one.Metric({"a": "1"}), other.Metric({"a": "1"}), other.Metric({"a": "2"})
    first.increment(1)
    same.increment(1)
    apart.increment(5)
    found = told()
    assert (value(found, "shared", a="1"), value(found, "shared", a="2")) == (2, 5)


def test_metrics_whose_labels_are_told_alike_are_the_same() -> None:
    family = Family("alike", "what", COUNTER)
    one, other = family.Metric({"a-b": "1", "": "2"}), family.Metric({"a_b": "1", "_": "2"})
    one.increment(1)
    other.increment(1)
    assert value(told(), "alike", a_b="1", _="2") == 2


def test_families_and_metrics_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [Family("limited", "")]
    monkeypatch.setattr(custom_metrics, "MOST_FAMILIES", len(custom_metrics.FAMILIES.snapshot()))
    monkeypatch.setattr(custom_metrics, "MOST_METRICS", 1)
    held.append(held[0].Metric({"a": "1"}))
    held += [Family("limited", ""), held[0].Metric({"a": "1"})]  # those are there already
    with pytest.raises(pb_utils.TritonModelException, match=r"the server has \d+ metric families"):
        Family("one_more", "")
    with pytest.raises(
        pb_utils.TritonModelException, match="'limited' has 1 metrics already: use fewer values"
    ):
        held[0].Metric({"a": "2"})


def test_many_families_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(name: str, kind: str) -> set[str]:
        asked.append(name)
        return family_names(name, kind)

    monkeypatch.setattr(custom_metrics, "family_names", counted)
    held = [Family(f"many_{number}", "", number % 3) for number in range(300)]
    assert len(asked) == len(held)


def test_the_last_bucket_can_be_named() -> None:
    family, bare = Family("unbounded", "what", HISTOGRAM), Family("bare", "what", HISTOGRAM)
    spread, single = family.Metric(buckets=[1, math.inf]), bare.Metric(buckets=[])
    spread.observe(2)
    single.observe(3)
    found = told()
    assert value(found, "bare_bucket", le="+Inf") == value(found, "bare_count") == 1
    assert [value(found, "unbounded_bucket", le=bound) for bound in ("1", "+Inf")] == [0, 1]


FAMILIES = [Family(name, "what", kind) for kind, name in enumerate(("count", "level", "spread"))]
COUNT, LEVEL, SPREAD = FAMILIES[0].Metric(), FAMILIES[1].Metric(), FAMILIES[2].Metric(buckets=[1])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: COUNT.set(1), "TRITONSERVER_METRIC_KIND_COUNTER does not support Set"),
        (lambda: COUNT.observe(1), "TRITONSERVER_METRIC_KIND_COUNTER does not support Observe"),
        (lambda: LEVEL.observe(1), "TRITONSERVER_METRIC_KIND_GAUGE does not support Observe"),
        (lambda: SPREAD.set(1), "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Set"),
        (lambda: SPREAD.increment(1), "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Increment"),
        (SPREAD.value, "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value"),
        (
            lambda: COUNT.increment(-1),
            "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values.",
        ),
        (
            lambda: COUNT.increment(float("nan")),
            "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values.",
        ),
        (lambda: Family("x0", "", HISTOGRAM).Metric(), "Failed to create metric. Missing required buckets."),
        (
            lambda: Family("x1", "", HISTOGRAM).Metric(buckets=[2, 1]),
            "Bucket Boundaries must be strictly sorted",
        ),
        (
            lambda: Family("x6", "", HISTOGRAM).Metric(buckets=[math.nan]),
            "Bucket Boundaries must be strictly sorted",
        ),
        (
            lambda: Family("x2", "", COUNTER).Metric(buckets=[1]),
            "Failed to create metric. Unexpected buckets found.",
        ),
        (
            lambda: Family("x7", "", GAUGE).Metric(buckets=[]),
            "Failed to create metric. Unexpected buckets found.",
        ),
        (
            lambda: Family("x5", "", HISTOGRAM).Metric(labels={"le": "1"}, buckets=[1]),
            "a histogram's label can't be named 'le'",
        ),
        (lambda: Family("x3", "", COUNTER).Metric(labels=["a"]), "Labels must be a dictionary."),
        (lambda: Family("x4", "", COUNTER).Metric(labels={"a": 1}), "labels must be strings."),
        (lambda: Family("level", "", COUNTER), "metric family 'level' is there already, as gauge"),
        (lambda: Family("a b", "", COUNTER), "'a b' can't be the name of a metric family: "),
        (lambda: Family("nv_inference_count", "", COUNTER), "begin with 'nv_' and 'conch_' are the server's"),
        (lambda: Family("x", "", 3), "Unknown metric kind"),
        (lambda: Family("x8", "d" * 4096), "of a metric family have more than 4096 characters"),
        (
            lambda: Family("x9", "").Metric({"a": "b" * 4096}),
            "the labels of a metric of family 'x9' have more than 4096 characters",
        ),
        (
            lambda: Family("x10", "", HISTOGRAM).Metric(buckets=range(1001)),
            "a metric of family 'x10' has more than 1000 buckets",
        ),
    ],
)
def test_what_cannot_be(call: Callable[[], object], text: str) -> None:
    with pytest.raises(pb_utils.TritonModelException) as caught:
        call()
    assert text in str(caught.value)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_any_labels_can_be_told(labels: dict[str, str]) -> None:
    family = Family("any", "what", GAUGE)
    metric = family.Metric(labels)
    metric.set(1)
    text = "".join("".join(each) for family, each in CustomMetrics()() if family.name == "any")
    assert text.count("\n") >= 1 and text.endswith(" 1\n")

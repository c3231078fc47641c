"""conch top without a server: rates between two samples, and tables that fit."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conch_tools.top.samples import Sample, parse_sample
from conch_tools.top.table import SORTS, sorted_models, table_lines
from conch_tools.top.views import ModelView, model_views, server_view

VALUES = [each.name for each in fields(ModelView) if each.name not in ("model", "version")]
BOUNDS = [2.0**exponent for exponent in range(-10, 3)]


def sample(at_s: float, models: Mapping[str, Mapping[str, float]], more: str = "") -> Sample:
    """A sample with the metrics of models, each in version 1."""
    labelled = [
        f'{name}{{model="{model}",version="1"}} {value}'
        for model, values in models.items()
        for name, value in values.items()
    ]
    return parse_sample("\n".join([*labelled, more]), at_s)


def counted(
    requests: float, us: float = 0.0, queue_us: float = 0.0, executions: float = 0.0
) -> dict[str, float]:
    """Triton's counters of a model."""
    return {
        "nv_inference_request_success": requests,
        "nv_inference_request_duration_us": us,
        "nv_inference_queue_duration_us": queue_us,
        "nv_inference_count": requests,
        "nv_inference_exec_count": executions,
    }


def test_rates_between_two_samples() -> None:
    before = sample(10.0, {"a": counted(100, 5e5, 1e5, 100), "idle": counted(7)})
    failures = "\n".join(
        f'nv_inference_request_failure{{model="a",version="1",reason="{reason}"}} {count}'
        for reason, count in (("REJECTED", 3), ("BACKEND", 1))
    )
    now = sample(12.0, {"a": counted(140, 9e5, 1.4e5, 110), "idle": counted(7), "new": counted(5)}, failures)
    first, idle, new = model_views(before, now)
    assert first == ModelView(
        "a", "1", requests_s=20.0, failures_s=2.0, mean_ms=10.0, queue_ms=1.0, batch=4.0
    )
    assert idle == ModelView("idle", "1", requests_s=0.0)
    assert new.requests_s == 2.5


def test_a_first_sample_has_no_rates() -> None:
    gauges = {"nv_inference_pending_request_count": 4, "conch_running_requests": 2, "conch_saturation": 0.5}
    (found,) = model_views(None, sample(10.0, {"a": {**counted(100), **gauges}}))
    assert found == ModelView("a", "1", pending=4, running=2, busy=0.5)


def test_a_reload_begins_at_zero() -> None:
    def at(count: float) -> dict[str, float]:
        return {**counted(count, us=1e3 * count)}

    buckets = 'conch_request_duration_seconds_bucket{{model="a",version="1",le="{}"}} {}'
    early = "\n".join(buckets.format(bound, 100) for bound in ("0.25", "+Inf"))
    late = "\n".join([buckets.format("0.25", 0), buckets.format("0.5", 4), buckets.format("+Inf", 4)])
    (found,) = model_views(sample(1.0, {"a": at(100)}, early), sample(2.0, {"a": at(4)}, late))
    assert (found.requests_s, found.mean_ms, found.p50_ms) == (4.0, 1.0, 375.0)


def test_models_of_namespaces_and_workers() -> None:
    text = """
        nv_inference_request_success{model="m",version="1",namespace="/a"} 1
        nv_inference_request_success{model="m",version="1",namespace="/b"} 1
        conch_workers{model="m",version="1",namespace="/b",state="serving"} 1
        conch_workers{model="m",version="1",namespace="/b",state="waiting"} 2
    """
    lines = "\n".join(line.strip() for line in text.splitlines())
    first, second = model_views(None, parse_sample(lines, 0.0))
    assert (first.model, first.workers) == ("/a/m", None)
    assert (second.model, second.workers, second.workers_all) == ("/b/m", 1, 3)


def test_the_server() -> None:
    text = "\n".join(
        [
            "conch_ready 0",
            'conch_model_load_failed{model="bad"} 1',
            'conch_model_load_failed{model="good"} 0',
            'conch_model_versions{state="READY"} 3',
            'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5',
            'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 1024',
        ]
    )
    before = parse_sample(f"{text}\nprocess_cpu_seconds_total 3", 10.0)
    found = server_view(before, parse_sample(f"{text}\nprocess_cpu_seconds_total 6", 12.0))
    assert (found.ready, found.cores, found.failed_loads) == (False, 1.5, ["bad"])
    assert found.versions == {"READY": 3}
    (gpu,) = found.gpus
    assert (gpu.uuid, gpu.utilization, gpu.memory_bytes, gpu.memory_total_bytes) == ("GPU-1", 0.5, 1024, None)


@given(st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=50), st.integers(0, 5))
def test_percentiles_are_in_the_bucket_of_the_true_ones(latencies_s: list[float], earlier: int) -> None:
    def text(values: list[float]) -> str:
        return "\n".join(
            f'conch_request_duration_seconds_bucket{{model="a",version="1",le="{bound}"}} '
            f"{sum(value <= float(bound) for value in values)}"
            for bound in [*map(str, BOUNDS), "+Inf"]
        )

    old = [0.01] * earlier
    (found,) = model_views(
        sample(1.0, {"a": counted(0)}, text(old)), sample(2.0, {"a": counted(0)}, text(old + latencies_s))
    )
    for quantile, value in ((0.5, found.p50_ms), (0.99, found.p99_ms)):
        true = sorted(latencies_s)[int(-(-quantile * len(latencies_s) // 1)) - 1]
        low = max((bound for bound in BOUNDS if bound < true), default=0.0)
        high = min((bound for bound in BOUNDS if bound >= true), default=low)
        assert value is not None
        assert 1e3 * low - 1e-9 <= value <= 1e3 * high + 1e-9


def cells(line: str) -> int:
    """Cells of a terminal that a line takes."""
    assert all(each.isprintable() for each in line)
    return sum(
        (unicodedata.east_asian_width(each) in "FW") + (not unicodedata.combining(each)) for each in line
    )


MODELS = st.lists(
    st.builds(
        ModelView,
        st.text(max_size=40),
        st.text(max_size=5),
        requests_s=st.none() | st.floats(0, 1e7),
        p99_ms=st.none() | st.floats(0, 1e6),
        pending=st.none() | st.integers(0, 10**6),
    ),
    max_size=8,
)


@given(MODELS, st.integers(1, 200), st.integers(0, 10), st.sampled_from(SORTS))
@example([ModelView("模型" * 20, "1")], 30, 5, "model")
@example([ModelView("\x1b[2J\n", "1")], 80, 5, "req/s")
def test_tables_fit(models: list[ModelView], width: int, rows: int, sort: str) -> None:
    lines = table_lines(models, sort, width, rows)
    assert len(lines) <= 1 + rows
    assert max(map(cells, lines)) <= width


def test_narrow_tables_lack_the_less_important_columns() -> None:
    models = [ModelView("a-model", "1")]
    headings = [table_lines(models, "model", width)[0].replace(" ms", "").split() for width in range(40, 130)]
    for narrow, wide in pairwise(headings):
        assert set(narrow) <= set(wide)
    assert headings[0] == ["model*", "ver", "req/s", "p99"]
    assert headings[-1][2:] == [sort for sort in SORTS if sort != "model"]


@pytest.mark.parametrize("sort", SORTS)
def test_the_largest_value_is_first_and_unknown_ones_are_last(sort: str) -> None:
    def model(name: str, value: int) -> ModelView:
        return ModelView(name, "1", **dict.fromkeys(VALUES, value))

    models = [ModelView("unknown", "1"), model("a", 1), model("c", 3), model("b", 2), model("zero", 0)]
    found = [each.model for each in sorted_models(models, sort)]
    assert found == (
        ["a", "b", "c", "unknown", "zero"] if sort == "model" else ["c", "b", "a", "zero", "unknown"]
    )

"""Alerts and the queries of autoscalers, over series in Prometheus' own `promtool`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.charts import CHART, VARIANTS, of_kind, promtool, render

ADAPTER = CHART / "files" / "prometheus" / "adapter.yml"
QUEUE, SATURATION = "conch_queue_seconds_per_request", "conch_pod_saturation"
TRITON = (
    "avg(delta(conch_queue_duration_seconds_sum[2m]) / (1 + delta(conch_queue_duration_seconds_count[2m])))"
)
"""The formula in charts for Triton, with the names here."""
AT = "10m"
POD, OTHER_POD = "r-conch-5d4f8b-abcde", "r-conch-5d4f8b-fghij"


def check(tests: Path) -> None:
    """Runs a file of tests; fails with what promtool says."""
    ended = subprocess.run(
        [promtool(), "test", "rules", tests], capture_output=True, text=True, check=False, cwd=tests.parent
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_alerts_fire_when_they_should() -> None:
    check(CHART / "files" / "prometheus" / "alerts_test.yml")


def by_adapter(metric: str) -> str:
    """The query that prometheus-adapter makes of its rule, for an HPA that asks for these pods."""
    (rule,) = [
        each
        for each in yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
        if each["name"]["as"] == metric
    ]
    pods = f'namespace="prod",pod=~"{POD}|{OTHER_POD}"'
    return str(rule["metricsQuery"]).replace("<<.LabelMatchers>>", pods).replace("<<.GroupBy>>", "pod")


def by_keda(metric: str) -> str:
    """The query of the rendered ScaledObject."""
    triggers = of_kind(render(VARIANTS["keda"]), "ScaledObject")["spec"]["triggers"]
    (found,) = [each["metadata"]["query"] for each in triggers if each["name"] == metric.replace("_", "-")]
    return str(found)


def series(pod: str, model: str, seconds: str, requests: str, saturation: str = "0x60") -> dict[str, str]:
    """Samples of a pod for a model, in promtool's notation of values; one each 15 s."""
    labels = f'namespace="prod", pod="{pod}", model="{model}", version="1"'
    return {
        f"conch_queue_duration_seconds_sum{{{labels}}}": seconds,
        f"conch_queue_duration_seconds_count{{{labels}}}": requests,
        f"conch_saturation{{{labels}}}": saturation,
        f'conch_ready{{namespace="prod", pod="{pod}"}}': "1x60" if "stale" not in seconds else "1x30 stale",
    }


STEADY = ("0+1.5x60", "0+150x60", "0.5x60")
"""Ten requests a second that wait for 10 ms."""
IDLE = ("500x60", "7x60")
"""Requests of long ago that waited for very long."""

QUEUES: dict[str, tuple[dict[str, str], dict[str, float]]] = {
    "steady": (series(POD, "m", *STEADY), {POD: 0.01}),
    "a model without requests changes nothing": (
        series(POD, "m", *STEADY) | series(POD, "idle", *IDLE),
        {POD: 0.01},
    ),
    "a pod without requests has 0": (
        series(POD, "m", *STEADY) | series(OTHER_POD, "m", *IDLE),
        {POD: 0.01, OTHER_POD: 0},
    ),
    "few requests, each as long as it is": (series(POD, "m", "0x37 0.4x22", "0x37 1x22"), {POD: 0.4}),
    "overload": (series(POD, "m", "0+75x60", "0+150x60", "1x60"), {POD: 0.5}),
    "a restart": (series(POD, "m", "0+1.5x36 0+1.5x23", "0+150x36 0+150x23"), {POD: 0.01}),
    "an ensemble, which has no queue of its own": (
        series(POD, "m", "0+15x60", "0+150x60") | series(POD, "ensemble", "0x60", "0+150x60"),
        {POD: 0.1},
    ),
    "a model that keeps its requests waiting beside a busy one": (
        series(POD, "m", "0x60", "0+15000x60") | series(POD, "slow", "0+15x60", "0+15x60"),
        {POD: 1},
    ),
    "a model that hangs has no times, only saturation": (
        series(POD, "m", "500x60", "7x60", "1x60"),
        {POD: 0},
    ),
}


def expression(query: str, samples: dict[str, float]) -> dict[str, Any]:
    """A test of a query: the samples by pod, rounded, as rates are computed in floats."""
    named = [
        {"labels": f'{{pod="{pod}"}}' if pod else "{}", "value": value} for pod, value in samples.items()
    ]
    return {"expr": f"round({query}, 0.0001)", "eval_time": AT, "exp_samples": named}


def evaluate(directory: Path, given: dict[str, str], *expected: dict[str, Any]) -> None:
    """Has promtool compare queries over series with what is expected of them."""
    inputs = [{"series": name, "values": values} for name, values in given.items()]
    test = {"interval": "15s", "input_series": inputs, "promql_expr_test": list(expected)}
    file = directory / "test.yml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "15s", "tests": [test]}))
    check(file)


@pytest.mark.parametrize("case", QUEUES)
def test_the_time_in_the_queue(case: str, tmp_path: Path) -> None:
    given, by_pod = QUEUES[case]
    total = {"": sum(by_pod.values())}
    evaluate(tmp_path, given, expression(by_adapter(QUEUE), by_pod), expression(by_keda(QUEUE), total))


def test_what_is_wrong_with_the_formula_for_triton(tmp_path: Path) -> None:
    given, _ = QUEUES["few requests, each as long as it is"]
    evaluate(tmp_path, given, expression(f"({TRITON} < bool 0.25)", {"": 1}))


def test_saturation_is_that_of_the_busiest_model(tmp_path: Path) -> None:
    given = (
        series(POD, "m", *IDLE, "0.9x60")
        | series(POD, "idle", *IDLE, "0x60")
        | series(OTHER_POD, "m", *IDLE, "0.4x60")
    )
    samples = {POD: 0.9, OTHER_POD: 0.4}
    evaluate(
        tmp_path,
        given,
        expression(by_adapter(SATURATION), samples),
        expression(by_keda(SATURATION), {"": 1.3}),
    )


def test_keda_counts_the_pods_there_are(tmp_path: Path) -> None:
    """A pod that ended within the range of the query, and pods of other releases, do not count."""
    gone = series(OTHER_POD, "m", "0+75x36 stale", "0+150x36 stale", "1x36 stale")
    others = series("r-conch-2-5d4f8b-abcde", "m", "0+75x60", "0+150x60", "1x60")
    elsewhere = {name.replace('"prod"', '"test"'): values for name, values in QUEUES["overload"][0].items()}
    given = series(POD, "m", *STEADY) | gone | others | elsewhere
    evaluate(
        tmp_path, given, expression(by_keda(QUEUE), {"": 0.01}), expression(by_keda(SATURATION), {"": 0.5})
    )

"""Metrics and the log at an OpenTelemetry collector: the same as a scrape and the lines have."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1 import metrics_pb2 as otlp
from prometheus_client.parser import text_string_to_metric_families
from tests.support.metrics import get
from tests.support.otlp_collector import Collector, grpc_collector, http_collector
from tests.support.servers import (
    client_of,
    eventually,
    probe,
    serving,
    serving_process,
    write_model,
    write_probe,
)

from conch.settings.option import FlagError
from conch_otlp.metric_encoder import otlp_metrics

Values = dict[tuple[str, frozenset[tuple[str, str]]], Any]


def points(metric: otlp.Metric) -> Any:
    return getattr(metric, metric.WhichOneof("data") or "gauge").data_points


def values(metrics: list[otlp.Metric]) -> Values:
    """Values of metrics, by name and labels."""
    found: Values = {}
    for metric in metrics:
        for point in points(metric):
            labels = frozenset((each.key, each.value.string_value) for each in point.attributes)
            if metric.HasField("histogram"):
                below = [sum(point.bucket_counts[: place + 1]) for place in range(len(point.bucket_counts))]
                value: Any = (*below, point.count, round(point.sum, 9), *point.explicit_bounds)
            elif metric.HasField("summary"):
                value = tuple((each.quantile, each.value) for each in point.quantile_values)
            else:
                value = point.as_double
            assert (metric.name, labels) not in found
            found[metric.name, labels] = value
    return found


def exported(collector: Collector) -> Values:
    """The last value of everything."""
    found: Values = {}
    for request in list(collector.metrics):
        for scope in request.resource_metrics[0].scope_metrics:
            found |= values(list(scope.metrics))
    return found


def scraped(text: str) -> Values:
    """The same from a scrape."""
    declared = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    found: Values = {}
    grouped: dict[Any, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        name = family.name if family.name in declared else f"{family.name}_total"
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("le", "quantile")}
            key = name, frozenset(labels.items())
            if family.type in ("histogram", "summary"):
                grouped.setdefault((family.type, *key), []).append(sample)
            else:
                found[key] = sample.value
    for (kind, name, labels), samples in grouped.items():
        by_end: Mapping[str, Any] = {sample.name.removeprefix(name): sample.value for sample in samples}
        if kind == "summary":
            found[name, labels] = tuple(
                (float(each.labels["quantile"]), each.value) for each in samples if "quantile" in each.labels
            )
            continue
        below = sorted((float(each.labels["le"]), each.value) for each in samples if "le" in each.labels)
        bounds = [bound for bound, _ in below if bound < math.inf]
        counts = [count for _, count in below]
        found[name, labels] = (*counts, by_end["_count"], round(by_end["_sum"], 9), *bounds)
    return found


@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json", "grpc"])
def test_collectors_get_what_a_scrape_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=vision")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "3600000")  # at the end only
    write_probe(tmp_path / "models")
    flags = ["--metrics-config=summary_latencies=true", "--allow-cpu-metrics=false"]
    with (grpc_collector if protocol == "grpc" else http_collector)() as collector:
        flags.append(f"--otlp-metrics-url={collector.address('')[:-4]}")  # without a path
        with serving(tmp_path / "models", flags=flags) as server:
            with client_of(server) as client:
                for _ in range(3):
                    probe(client)

            def at_rest() -> Values | None:
                found = scraped(get(server.metrics_url)[2].decode())
                running = {value for (name, _), value in found.items() if name == "conch_running_requests"}
                return found if running == {0} else None

            shown: Values = eventually(at_rest, "all requests have ended")
        found = exported(collector)
    ours = {key for key in shown if key[0].startswith(("nv_", "conch_"))}
    assert len({name for name, _ in ours}) > 30
    moving = {"conch_ready", "conch_model_versions", "conch_saturation"}
    assert {key: found[key] for key in ours if key[0] not in moving} == {
        key: shown[key] for key in ours if key[0] not in moving
    }
    assert found["nv_inference_request_success", frozenset({("model", "probe"), ("version", "1")})] == 3
    metrics = collector.metrics[-1].resource_metrics[0]
    assert "vision" in {each.value.string_value for each in metrics.resource.attributes}
    by_name = {metric.name: metric for metric in metrics.scope_metrics[0].metrics}
    success = by_name["nv_inference_request_success"].sum
    assert success.is_monotonic
    assert success.aggregation_temporality == otlp.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert 0 < success.data_points[0].start_time_unix_nano < success.data_points[0].time_unix_nano


def test_large_families_are_in_parts() -> None:
    lines = "".join(f'some_total{{model="{number}"}} {number}\n' for number in range(12_001))
    found = list(otlp_metrics(f"# HELP some_total x\n# TYPE some_total counter\n{lines}", 1, 2))
    assert [(metric.name, count) for metric, count in found] == [
        ("some_total", 5000),
        ("some_total", 5000),
        ("some_total", 2001),
    ]
    assert sum(point.as_double for metric, _ in found for point in points(metric)) == sum(range(12_001))


def test_exports_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    write_probe(tmp_path / "models")
    with http_collector() as collector:
        collector.answers.append((400, {}))
        flags = [f"--otlp-metrics-url={collector.address('metrics')}"]
        with serving(tmp_path / "models", flags=flags) as server:

            def counted() -> bool:
                text = get(server.metrics_url)[2].decode()
                ok = re.search(r'conch_otlp_exports_total{result="ok",signal="metrics"} ([1-9])', text)
                failed = 'conch_otlp_exports_total{result="failed",signal="metrics"} 1' in text
                lost = re.search(r'conch_otlp_dropped_total{reason="rejected",signal="metrics"} [1-9]', text)
                return bool(ok and failed and lost)

            eventually(counted, "a refused and a taken export are counted")


_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }
"""
_MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        pb_utils.Logger.log_warn("beware \\u00e4")
        raise ValueError("no")
"""


@pytest.mark.process
@pytest.mark.parametrize("placement", ["in_process", "worker"])
def test_collectors_get_the_log(tmp_path: Path, placement: str) -> None:
    write_model(tmp_path / "models", "m", _CONFIG, {"model.py": _MODEL})
    trace = f"{7:032x}"
    with http_collector() as collector:
        settings = ("mode=opentelemetry", "level=TIMESTAMPS", f"opentelemetry,url={collector.url}")
        flags = [f"--trace-config={setting}" for setting in settings]
        flags += [f"--backend-config=python,placement={placement}"]
        flags += [f"--otlp-logs-url={collector.address('logs')}"]
        with serving_process(tmp_path / "models", flags=flags) as server:
            import httpx

            body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]}
            url = f"http://{server.http_address}/v2/models/m/infer"
            answer = httpx.post(url, json=body, headers={"traceparent": f"00-{trace}-{8:016x}-01"})
            assert answer.status_code == 500
            eventually(lambda: "ValueError: no" in server.errors, "the failure is logged")
            lines = [json.loads(line) for line in server.errors.splitlines() if line.startswith("{")]
    records = [
        (scope.scope.name, record)
        for request in collector.logs
        for scope in request.resource_logs[0].scope_logs
        for record in scope.log_records
    ]
    told = {(line["logger"], line["message"]) for line in lines if line["logger"] != "conch.announcements"}
    assert told <= {(name, record.body.string_value) for name, record in records}
    (warned,) = (record for _, record in records if record.body.string_value == "beware \u00e4")
    assert (warned.severity_text, warned.severity_number) == ("WARNING", 13)
    assert warned.trace_id.hex() == trace and len(warned.span_id) == 8
    assert "ValueError: no" in "".join(
        each.value.string_value
        for _, record in records
        for each in record.attributes
        if each.key == "exception.stacktrace"
    )


def test_settings_that_can_not_work(tmp_path: Path) -> None:
    write_probe(tmp_path / "models")
    for flags, text in (
        (["--otlp-metrics-url=nowhere:x"], 'Bad option: "--otlp-metrics-url"'),
        (
            ["--otlp-metrics-url=a", "--allow-metrics=false"],
            "--otlp-metrics-url exports what",
        ),
    ):
        with pytest.raises(FlagError, match=re.escape(text)), serving(tmp_path / "models", flags=flags):
            pass

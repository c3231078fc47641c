"""ORCA load reports, as proxies and clients get them over both protocols."""

from __future__ import annotations

import base64
import http.client
import json
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest
from tests.support.grpc_transports import each_transport
from tests.support.metrics import of_model, scrape
from tests.support.servers import (
    NUMBER_CONFIG,
    WAIT_S,
    AnyServer,
    eventually,
    serving,
    simple_request,
    write_model,
)
from tritonclient.grpc import service_pb2

from conch.protocol.orca_load_report_pb2 import OrcaLoadReport

MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        gauge = pb_utils.MetricFamily.GAUGE
        self.families = {name: pb_utils.MetricFamily(name, name, gauge) for name in
                         ("kv_cache_utilization", "max_token_capacity", "vllm:kv_cache_usage_perc", "other")}
        self.metrics = []
        for name, values in {"kv_cache_utilization": (0.25, 0.5), "max_token_capacity": (100, 50),
                             "vllm:kv_cache_usage_perc": (0.625,), "other": (1,)}.items():
            for number, value in enumerate(values):
                self.metrics.append(self.families[name].Metric(labels={"number": str(number)}))
                self.metrics[-1].set(value)

    def execute(self, requests):
        if requests[0].inputs()[0].as_numpy()[0] < 0:
            raise ValueError("negative")
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""
FIELDS = {"application_utilization": 9, "rps_fractional": 6, "eps": 7, "named_metrics": 8}
"""Fields of the standard, by number."""

grpc_transport = each_transport()


@pytest.fixture(scope="module")
def reporting(tmp_path_factory: pytest.TempPathFactory, grpc_transport: str) -> Iterator[AnyServer]:
    """A server that reports over gRPC too, with a model that exports what Triton's reports have."""
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "m", NUMBER_CONFIG, {"model.py": MODEL})
    with serving(repository, flags=["--grpc-orca-load-reports"]) as server:
        yield server


def over_http(server: AnyServer, wanted: str, value: float = 1.0, route: str = "infer") -> str | None:
    """The report with a response."""
    body: Mapping[str, Any] = {"IN": value}
    if route == "infer":
        body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [value]}]}
    with closing(http.client.HTTPConnection(server.http_address, timeout=WAIT_S)) as connection:
        headers = {"Endpoint-Load-Metrics-Format": wanted} if wanted else {}
        connection.request("POST", f"/v2/models/m/{route}", json.dumps(body), headers)
        response = connection.getresponse()
        response.read()
        assert response.status == (200 if value >= 0 else 500)
        return response.headers["endpoint-load-metrics"]


def parsed(text: str) -> dict[str, float]:
    """The flat names and values of a report in either format."""
    kind, _, rest = text.partition(" ")
    if kind == "TEXT":
        return {name: float(value) for name, _, value in (each.partition("=") for each in rest.split(", "))}
    assert kind == "JSON"
    fields: dict[str, Any] = json.loads(rest)
    named = fields.pop("named_metrics")
    return {**fields, **{f"named_metrics.{name}": value for name, value in named.items()}}


@pytest.mark.parametrize("route", ["infer", "generate", "generate_stream"])
@pytest.mark.parametrize("wanted", ["text", "JSON"])
def test_http_requests_that_ask_get_a_report(reporting: AnyServer, wanted: str, route: str) -> None:
    assert over_http(reporting, "", route=route) is None
    assert over_http(reporting, "xml", route=route) is None

    def measured() -> dict[str, float]:
        found = parsed(over_http(reporting, wanted, route=route) or "")
        return found if found["rps_fractional"] > 0 else {}

    found = eventually(measured, "requests are counted")
    assert found.keys() == {
        *FIELDS.keys() - {"named_metrics"},
        *(f"named_metrics.{name}" for name in ("pending_requests", "running_requests")),
        *(f"named_metrics.{name}" for name in ("kv_cache_utilization", "max_token_capacity")),
    }
    assert found["named_metrics.kv_cache_utilization"] == 0.625, "of the fullest, by either name"
    assert found["named_metrics.max_token_capacity"] == 150, "of all together"
    assert 0 <= found["application_utilization"] <= 1


def test_errors_have_a_report_too(reporting: AnyServer) -> None:
    def measured() -> bool:
        found = parsed(over_http(reporting, "json", -1.0) or "")
        return 0 < found["eps"] <= found["rps_fractional"]

    eventually(measured, "errors are counted")


def request(value: float) -> Any:
    message = service_pb2.ModelInferRequest(model_name="m")
    message.inputs.add(name="IN", datatype="FP32", shape=[1]).contents.fp32_contents.append(value)
    return message


def over_grpc(server: AnyServer, method: str, message: Any) -> tuple[str, Any]:
    """The status of a call and its report, None without one; with curl, as gRPC's client hides reports."""
    data = message.SerializeToString()
    command = ["curl", "-sS", "-m", str(WAIT_S), "-D", "-", "-o", "/dev/null", "--http2-prior-knowledge"]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers", "--data-binary", "@-"]
    command.append(f"http://{server.address}/inference.GRPCInferenceService/{method}")
    body = b"\0" + struct.pack(">I", len(data)) + data
    lines = subprocess.run(command, input=body, capture_output=True, check=True).stdout.decode().splitlines()
    found = dict(line.split(": ", 1) for line in lines if ": " in line)
    report = found.get("endpoint-load-metrics-bin")
    # As strict as Envoy: only with a length that needs no padding, or with padding.
    return found["grpc-status"], None if report is None else OrcaLoadReport.FromString(
        base64.b64decode(report, validate=True)
    )


@pytest.mark.process
def test_grpc_calls_end_with_a_report_where_it_is_on(reporting: AnyServer, server: AnyServer) -> None:
    def measured(method: str, value: float, status: str) -> Any:
        found, report = over_grpc(reporting, method, request(value))
        assert found == status
        return report if report.rps_fractional > 0 and (report.eps > 0 or value > 0) else None

    for method, value, status in (
        ("ModelInfer", 1.0, "0"),
        ("ModelInfer", -1.0, "13"),
        ("ModelStreamInfer", 1.0, "0"),
    ):
        report = eventually(lambda: measured(method, value, status), "it is counted")  # noqa: B023
        assert report.named_metrics["kv_cache_utilization"] == 0.625
    assert {name: report.DESCRIPTOR.fields_by_name[name].number for name in FIELDS} == FIELDS
    unknown = service_pb2.ModelInferRequest(model_name="none")
    assert over_grpc(reporting, "ModelInfer", unknown)[1] is not None
    assert over_grpc(reporting, "ServerReady", service_pb2.ServerReadyRequest()) == ("0", None)
    for method in ("ModelInfer", "ModelStreamInfer"):
        assert over_grpc(server, method, simple_request()) == ("0", None), "it is off"


def test_saturation_is_exported_of_versions_with_instances(server: AnyServer) -> None:
    found = scrape(server.metrics_url)
    share = of_model(found, "simple", "conch_saturation")
    assert share is not None and 0 <= share <= 1
    assert of_model(found, "digit_reader", "conch_saturation") is None, "an ensemble has no instances"

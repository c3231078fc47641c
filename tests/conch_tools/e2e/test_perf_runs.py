"""conch perf against conch: what it counts is what the server counts."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from tests.support.servers import copy_example, serving, write_model

from conch_tools import perf_command
from conch_tools.perf.measure.results import PerfResult

_ENSEMBLE = """
    platform: "ensemble"
    max_batch_size: 8
    input { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] }
    input { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] }
    output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] }
    ensemble_scheduling { step {
        model_name: "simple"
        model_version: -1
        input_map { key: "INPUT0" value: "INPUT0" }
        input_map { key: "INPUT1" value: "INPUT1" }
        output_map { key: "OUTPUT0" value: "OUTPUT0" }
    } }
"""

_LLM = """
    backend: "python"
    model_transaction_policy { decoupled: true }
    input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
_TOKENS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(3):
                tensor = pb_utils.Tensor("OUT", np.array([number], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.mark.parametrize(
    ("scheme", "flags"),
    [
        ("http", ["-c", "8"]),
        ("http", ["-c", "8", "--tensors", "json"]),
        ("grpc", ["-c", "8"]),
        ("grpc", ["-c", "4", "--stream"]),
        ("grpc", ["--rate", "50", "--distribution", "poisson"]),
        ("http", ["--rate", "50"]),
    ],
    ids=["http", "json", "grpc", "stream", "poisson", "http-rate"],
)
def test_counts_what_the_server_counts(
    scheme: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_example(tmp_path, "simple")
    with serving(tmp_path, flags=["--http-port=0"]) as server:
        address = server.http_address if scheme == "http" else server.address
        arguments = ["simple", "-u", f"{scheme}://{address}", "--duration", "2", "--warmup", "0", "--json"]
        assert perf_command.run([*arguments, "--processes", "2", *flags]) == perf_command.DONE
    (point,) = json.loads(capsys.readouterr().out)["points"]
    slices = point["slices"]
    answered, sent = (sum(one[name] for one in slices) for name in ("answered", "sent"))
    assert not any(one["errors"] for one in slices)
    # At the end of the load each slot has a request without an answer; one sent after it is not counted.
    in_flight = 8 if "-c" in flags else 0
    requests = point["server"]["requests"]
    assert 0 < answered <= requests <= sent + in_flight
    assert answered <= sent <= answered + (in_flight or sent)
    assert point["generator"]["cpu_s"] > 0
    if "--rate" in flags:
        # A busy machine leaves some unsent at the end; a random schedule has more or fewer.
        assert sent == pytest.approx(100, abs=60)


@pytest.mark.parametrize("by", ["stream", "generate_stream"])
def test_measures_tokens_of_streams(by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, "llm", _LLM, {"model.py": _TOKENS})
    data = tmp_path / "data.json"
    body = {"IN": [1]} if by == "stream" else {"payload": [{"IN": 1}]}
    data.write_text(json.dumps({"data": [body]}))
    with serving(tmp_path, flags=["--http-port=0"]) as server:
        arguments = ["llm", "--data", str(data), "-c", "2", "--duration", "2", "--warmup", "0", "--json"]
        if by == "stream":
            arguments += ["-u", f"grpc://{server.address}", "--stream"]
        else:
            path = "v2/models/llm/generate_stream"
            arguments += ["-u", f"http://{server.http_address}", "--endpoint", path]
        assert perf_command.run(arguments) == perf_command.DONE
    text = capsys.readouterr().out
    (point,) = PerfResult.from_json(text).points
    assert point.answered
    assert not point.failed
    assert point.responses == 3 * point.answered
    assert point.token.count == point.answered
    assert point.answered <= point.first.count <= point.answered + 2


def test_refuses_flags_without_effect_on_payloads(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["m", "-u", "http://localhost:1", "--endpoint", "v2/models/m/generate", "-b", "2"]
    assert perf_command.run(arguments) == perf_command.USAGE
    assert "-b has no effect with --endpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--concurrency-range", "4"],
        ["--request-rate-range", "200"],
        ["--concurrency-range", "4", "--streaming"],
    ],
    ids=["concurrency", "rate", "streaming"],
)
def test_as_perf_analyzer_sends_the_requests_that_are_asked_for(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_example(tmp_path, "simple")
    with serving(tmp_path) as server:
        arguments = ["-m", "simple", "-i", "grpc", "-u", server.address, "--request-count", "37", *flags]
        assert perf_command.run(["--as", "perf_analyzer", *arguments]) == perf_command.DONE
    text = capsys.readouterr().out
    assert "    Request count: 37\n" in text
    throughput = re.search(r"Throughput: (\S+) infer/sec", text)
    assert throughput and float(throughput[1]) > 0
    assert "    Successful request count: 37\n" in text


@pytest.mark.parametrize(
    "flags",
    [
        ["-i", "grpc"],
        ["-i", "grpc", "--streaming"],
        ["-i", "http"],
        ["-i", "http", "--input-tensor-format", "json", "--output-tensor-format", "json"],
    ],
    ids=["grpc", "streaming", "http", "json"],
)
def test_as_perf_analyzer_exports_each_request(flags: list[str], tmp_path: Path) -> None:
    copy_example(tmp_path, "simple")
    file, data = tmp_path / "profile.json", tmp_path / "data.json"
    rows = [{"INPUT0": [row] * 16, "INPUT1": list(range(16)), "other": [1]} for row in range(3)]
    data.write_text(json.dumps({"data": rows}))
    with serving(tmp_path, flags=["--http-port=0"]) as server:
        url = server.http_address if "http" in flags else server.address
        arguments = ["-m", "simple", "-u", url, "--request-count", "9", "--warmup-request-count", "2"]
        arguments += ["--input-data", str(data), "--profile-export-file", str(file), *flags]
        assert perf_command.run(["--as", "perf_analyzer", *arguments]) == perf_command.DONE
    (experiment,) = json.loads(file.read_text())["experiments"]
    begin, end = experiment["window_boundaries"]
    requests = experiment["requests"]
    assert len(requests) == 9
    for each in requests:
        first, second = each["request_inputs"]["INPUT0"], each["request_inputs"]["INPUT1"]
        (outputs,) = each["response_outputs"]
        assert outputs["OUTPUT0"] == [a + b for a, b in zip(first, second, strict=True)]
        (answered,) = each["response_timestamps"]
        assert begin <= each["timestamp"] < answered <= end
    assert {each["request_inputs"]["INPUT0"][0] for each in requests} == {0, 1, 2}


def test_as_perf_analyzer_exports_the_windows_that_count(tmp_path: Path) -> None:
    copy_example(tmp_path, "simple")
    file = tmp_path / "profile.json"
    with serving(tmp_path) as server:
        arguments = ["-m", "simple", "-i", "grpc", "-u", server.address, "--profile-export-file", str(file)]
        windows = ["-p", "800", "-s", "10000"]
        assert perf_command.run(["--as", "perf_analyzer", *arguments, *windows]) == perf_command.DONE
    (experiment,) = json.loads(file.read_text())["experiments"]
    bounds = experiment["window_boundaries"]
    assert [after - before for before, after in itertools.pairwise(bounds)] == [1_000_000_000] * 3
    ends = [each["response_timestamps"][-1] for each in experiment["requests"]]
    assert ends
    assert bounds[0] <= min(ends) <= max(ends) <= bounds[-1]


def test_as_perf_analyzer_ends_the_walk_at_the_latency_threshold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_example(tmp_path, "simple")
    with serving(tmp_path) as server:
        arguments = ["-m", "simple", "-i", "grpc", "-u", server.address, "--concurrency-range", "1:3"]
        windows = ["-p", "800", "-s", "10000", "-l", "0.001"]
        assert perf_command.run(["--as", "perf_analyzer", *arguments, *windows]) == perf_command.DONE
    text = capsys.readouterr().out
    assert "Request concurrency: 1" in text
    assert "Request concurrency: 2" not in text


@pytest.mark.parametrize("model", ["sums", "simple"])
def test_as_perf_analyzer_reports_composing_models(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_example(tmp_path, "simple")
    copy_example(tmp_path, "simple", "other")
    write_model(tmp_path, "sums", _ENSEMBLE)
    report = tmp_path / "out.csv"
    with serving(tmp_path) as server:
        arguments = [
            "-m",
            model,
            "-i",
            "grpc",
            "-u",
            server.address,
            "--request-count",
            "20",
            "-f",
            str(report),
        ]
        arguments += ["--bls-composing-models", "other:1"]
        assert perf_command.run(["--as", "perf_analyzer", *arguments]) == perf_command.DONE
    text = capsys.readouterr().out
    assert text.count("Successful request count: 20") == (2 if model == "sums" else 1)
    assert "    other, version: 1\n        Inference count: 0\n" in text
    files = {each.name for each in tmp_path.glob("*.csv")}
    assert files == {"out.csv", "other_v1.out.csv"} | ({"simple_v1.out.csv"} if model == "sums" else set())

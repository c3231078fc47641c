"""conch perf against conch: what it counts is what the server counts."""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.certificates import Authority
from tests.support.sequence_models import write_sums
from tests.support.servers import (
    NUMBER_CONFIG,
    WAIT_S,
    client_of,
    copy_example,
    serving,
    tensor,
    write_model,
    write_steps,
)

from conch_tools import perf_command
from conch_tools.perf.load.validation import DIFFERS, SIZE_DIFFERS
from conch_tools.perf.measure.results import PerfResult

_REFUSES = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        if value[0] < 0:
            return pb_utils.InferenceResponse([], pb_utils.TritonError("below 0"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value / 2)])
"""
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


def _errors(point: dict[str, Any]) -> int:
    return sum(sum(one["errors"].values()) for one in point["slices"])


@contextmanager
def polling(look: Callable[[], set[str]]) -> Iterator[list[set[str]]]:
    """Results of looking again and again on another thread, until the end of the block."""
    found: list[set[str]] = []
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.05):
            found.append(look())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


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
        assert 0 < sent <= 160


@pytest.mark.parametrize("by", ["perf", "perf_analyzer"])
def test_statistics_of_the_server_are_those_of_the_seconds_that_count(
    by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_example(tmp_path, "simple")
    with serving(tmp_path) as server:
        if by == "perf":
            load = ["--rate", "50", "--warmup", "4", "--duration", "4", "--json"]
            perf_command.run(["simple", "-u", f"grpc://{server.address}", *load])
        else:
            # Six windows of a second, after a warm-up; the last three count.
            windows = ["--request-rate-range", "50", "-p", "800", "-r", "6", "-s", "1e-9"]
            arguments = ["-m", "simple", "-i", "grpc", "-u", server.address, *windows]
            perf_command.run(["--as", "perf_analyzer", *arguments])
    text = capsys.readouterr().out
    if by == "perf":
        (point,) = PerfResult.from_json(text).points
        assert point.server is not None
        counted, of_server = point.answered, point.server.requests
    else:
        counted, of_server = map(int, re.findall(r"(?:Request|Successful request) count: (\d+)", text))
    # The server is asked a little after each end; a busy machine answers late.
    assert abs(of_server - counted) < counted / 2


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


def test_a_limit_that_is_missed_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy_example(tmp_path, "simple")
    with serving(tmp_path) as server:
        arguments = [
            "simple",
            "-u",
            f"grpc://{server.address}",
            "-c",
            "1",
            "--duration",
            "1",
            "--warmup",
            "0",
        ]
        assert perf_command.run([*arguments, "--slo", "p50=1000s"]) == perf_command.DONE
        assert "All loads meet the limits." in capsys.readouterr().out
        assert (
            perf_command.run([*arguments, "--slo", "p50=1ns", "--slo", "p99=1000s"]) == perf_command.REFUSED
        )
        assert "times p50=1ns." in capsys.readouterr().out


def test_a_port_of_the_other_protocol_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy_example(tmp_path, "simple")
    with serving(tmp_path) as server:
        http, grpc = server.http_address, server.address
        assert perf_command.run(["simple", "-u", f"grpc://{http}"]) == perf_command.UNREACHED
        assert perf_command.run(["simple", "-u", f"http://{grpc}"]) == perf_command.UNREACHED
        perf_command.run(["--as", "perf_analyzer", "-m", "simple", "-i", "grpc", "-u", http])
    of_http, of_grpc, of_analyzer = capsys.readouterr().err.splitlines()
    told = f"grpc://{http} is an HTTP port: use http://{http} (-i http of perf_analyzer), or the gRPC port"
    assert of_http == f"conch perf: {told}"
    assert of_analyzer == f"perf_analyzer: {told}"
    assert of_grpc == (
        f"conch perf: http://{grpc} is no HTTP port: use the HTTP port, or grpc://{grpc} "
        "(-i grpc of perf_analyzer) if it speaks gRPC"
    )


def test_refuses_flags_without_effect_on_payloads(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["m", "-u", "http://localhost:1", "--endpoint", "v2/models/m/generate", "-b", "2"]
    assert perf_command.run(arguments) == perf_command.USAGE
    assert "-b has no effect with --endpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scheme", "model", "flags"),
    [
        ("http", "sums", ["-c", "3"]),
        ("grpc", "texts", ["-c", "3"]),
        ("grpc", "sums", ["-c", "3", "--stream"]),
        ("grpc", "sums", ["--rate", "60", "--sequences", "3", "--sequence-length", "5"]),
    ],
    ids=["http", "grpc", "stream", "rate"],
)
def test_sequences_are_whole_and_left_to_no_server(
    scheme: str, model: str, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sums(tmp_path, "sums", "direct")
    write_sums(tmp_path, "texts", "oldest", "TYPE_STRING")
    with serving(tmp_path) as server:
        address = server.http_address if scheme == "http" else server.address
        arguments = [model, "-u", f"{scheme}://{address}", "--duration", "2", "--warmup", "0", "--json"]
        assert perf_command.run([*arguments, "--processes", "2", *flags]) == perf_command.DONE
        result = capsys.readouterr().out
        # Four sequences have slots of the server at a time: those of the load have left theirs.
        with client_of(server) as client:
            for starts in (True, False):
                for number in range(4):
                    client.infer(
                        model,
                        [tensor("IN", np.ones((1, 1), np.float32))],
                        sequence_id=f"own{number}" if model == "texts" else 1 + number,
                        sequence_start=starts,
                        sequence_end=not starts,
                        client_timeout=WAIT_S,
                    )
    (point,) = json.loads(result)["points"]
    answered, ended, sent = (
        sum(one[name] for one in point["slices"]) for name in ("answered", "sequences", "sent")
    )
    assert not any(one["errors"] for one in point["slices"])
    length = 5 if "--sequence-length" in flags else 20
    # Three sequences have not ended; lengths vary by a fifth.
    assert 0.75 * length * ended <= answered <= 1.25 * length * (ended + 3)
    assert ended > 0
    # The server has the last requests of these, too, which count for nothing.
    assert answered <= point["server"]["requests"] <= sent + 6


@pytest.mark.parametrize("scheme", ["grpcs", "https", "unix"])
def test_measures_over_tls_and_a_unix_socket(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_example(tmp_path / "models", "simple")
    authority = Authority(tmp_path / "trusted")
    key, certificate = authority.issue("server")
    port = {"grpcs": "grpc", "https": "http"}.get(scheme)
    flags = [f"--{port}-use-ssl", f"--{port}-server-cert={certificate}", f"--{port}-server-key={key}"]
    if port is None:
        flags = [f"--grpc-address=unix:{tmp_path}/socket"]
    with serving(tmp_path / "models", flags=flags) as server:
        url = {
            "grpcs": lambda: f"grpcs://{server.address}",
            "https": lambda: f"https://{server.http_address}",
            "unix": lambda: f"unix:{tmp_path}/socket",
        }[scheme]()
        arguments = ["simple", "-u", url, "--duration", "1", "--warmup", "0", "--json", "-c", "4"]
        trusting = [] if scheme == "unix" else ["--root-cert", str(authority.root)]
        assert perf_command.run([*arguments, *trusting]) == perf_command.DONE
        (point,) = json.loads(capsys.readouterr().out)["points"]
        assert not _errors(point)
        assert sum(one["answered"] for one in point["slices"]) > 0
        if trusting:
            assert perf_command.run(arguments) == perf_command.UNREACHED
            assert "certificate verify failed" in capsys.readouterr().err
        if scheme == "https":
            grpcs = f"grpcs://{server.http_address}"
            assert perf_command.run(["simple", "-u", grpcs, *trusting]) == perf_command.UNREACHED
            assert f"{grpcs} is an HTTP port: use {url}" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["http", "grpc", "stream"])
def test_outputs_are_compared_with_those_that_are_expected(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_example(tmp_path, "simple")
    numbers = list(range(16))
    doubled = [2 * number for number in numbers]
    data = tmp_path / "data.json"
    expected = {
        "": {"OUTPUT0": doubled, "OUTPUT1": [0] * 16},
        DIFFERS: {"OUTPUT1": numbers},
        SIZE_DIFFERS: {"OUTPUT0": doubled * 2},
    }
    with serving(tmp_path) as server:
        address = server.http_address if scheme == "http" else server.address
        protocol = "http" if scheme == "http" else "grpc"
        arguments = ["-m", "simple", "-i", protocol, "-u", address, "--request-count", "20", "-b", "3"]
        arguments += ["--input-data", str(data), *(["--streaming"] if scheme == "stream" else [])]
        for error, outputs in expected.items():
            entry = {"INPUT0": numbers, "INPUT1": numbers}
            data.write_text(json.dumps({"data": [entry] * 2, "validation_data": [outputs] * 2}))
            code = perf_command.run(["--as", "perf_analyzer", *arguments])
            assert code == (99 if error else perf_command.DONE)
            assert error in capsys.readouterr().err


@pytest.mark.parametrize("load", [["-c", "3"], ["--rate", "50"]], ids=["closed", "open"])
def test_responses_of_a_decoupled_model_are_counted_one_by_one(
    load: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_steps(tmp_path)
    with serving(tmp_path) as server:
        arguments = ["steps", "-u", f"grpc://{server.address}", "--shape", "IN:1", *load, "--json"]
        assert perf_command.run([*arguments]) == perf_command.USAGE
        assert "is decoupled: measure it with --stream" in capsys.readouterr().err
        arguments += ["--stream", "--duration", "1", "--warmup", "0", "--parameter", "steps=ok ok ok final"]
        assert perf_command.run(arguments) == perf_command.DONE
    (point,) = json.loads(capsys.readouterr().out)["points"]
    answered, responses = (sum(one[name] for one in point["slices"]) for name in ("answered", "responses"))
    assert not _errors(point)
    assert answered > 0
    assert responses == 3 * answered


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_shared_memory_has_the_tensors_and_is_given_back(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path, "halves", NUMBER_CONFIG, {"model.py": _REFUSES})
    names = set(os.listdir("/dev/shm"))
    data = tmp_path / "data.json"
    with serving(tmp_path) as server, client_of(server) as client:
        address = server.http_address if scheme == "http" else server.address
        arguments = ["halves", "-u", f"{scheme}://{address}", "--duration", "1", "--warmup", "0", "--json"]
        arguments += ["--data", str(data), "--shm", "system", "--rate", "20"]
        shares = []
        notes: list[str] = []
        regions: list[set[str]] = []

        def run(value: int) -> None:
            # The model refuses -1, which it gets only from the region.
            data.write_text(json.dumps({"data": [{"IN": [value]}]}))
            with polling(lambda: set(client.get_system_shared_memory_status().regions)) as seen:
                perf_command.run(arguments)
            regions.append(set().union(*seen))
            point = json.loads(capsys.readouterr().out)["points"][0]
            shares.append([bool(sum(one["answered"] for one in point["slices"])), _errors(point)])
            notes.append("".join(point["notes"]))
            assert not client.get_system_shared_memory_status().regions

        run(1)
        run(-1)
    good, refused = shares
    assert good == [True, 0]
    assert not refused[0] and refused[1]
    assert not notes[0] and notes[1].endswith(": below 0")
    assert all(len(each) == 2 for each in regions)
    assert set(os.listdir("/dev/shm")) <= names


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


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_as_perf_analyzer_exports_sequences_and_outputs_in_shared_memory(
    protocol: str, tmp_path: Path
) -> None:
    write_sums(tmp_path, "sums", "direct")
    file = tmp_path / "profile.json"
    with serving(tmp_path, flags=["--http-port=0"]) as server:
        url = server.http_address if protocol == "http" else server.address
        arguments = ["-m", "sums", "-i", protocol, "-u", url, "--concurrency-range", "2"]
        arguments += ["--sequence-id-range", "5:90", "--sequence-length", "3", "--shared-memory", "system"]
        arguments += ["--request-count", "30", "--profile-export-file", str(file)]
        assert perf_command.run(["--as", "perf_analyzer", *arguments]) == perf_command.DONE
    (experiment,) = json.loads(file.read_text())["experiments"]
    counts = Counter(each["sequence_id"] for each in experiment["requests"])
    assert counts.total() == 30
    assert 5 <= min(counts) <= max(counts) <= 90
    assert max(counts.values()) <= 4  # lengths vary by a fifth
    assert all(each["request_inputs"] for each in experiment["requests"])
    assert [each["response_outputs"] for each in experiment["requests"]] == [[{}]] * 30


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

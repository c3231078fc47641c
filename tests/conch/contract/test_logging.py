"""Logs of a running server: settings over the protocol, the access log, files that are rotated."""

from __future__ import annotations

import json
import queue
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.support.calling import run, write_callers
from tests.support.ensembles import request as ensemble_request
from tests.support.ensembles import write_ensembles
from tests.support.log_defaults import LOG_SETTINGS
from tests.support.server_fixtures import server_fixture
from tests.support.servers import (
    NUMBERS_CONFIG,
    WAIT_S,
    AnyServer,
    RawClient,
    ServerProcess,
    client_of,
    eventually,
    probe,
    probe_inputs,
    serving,
    serving_process,
    started,
    tensor,
    write_model,
    write_probe,
    write_steps,
)
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

SPEAKER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        pb_utils.Logger.log_info("said for information")
        pb_utils.Logger.log_verbose("said in confidence")
        pb_utils.Logger.log_error("the end")
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]) for value in inputs]
"""


def values(message: Any) -> dict[str, Any]:
    """Log settings as plain values."""
    return {
        name: getattr(setting, setting.WhichOneof("parameter_choice"))
        for name, setting in message.settings.items()
    }


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "speaker", NUMBERS_CONFIG, {"model.py": SPEAKER})
    return repository


talking = server_fixture(flags=["--log-json=false"], process=True)
"""A server whose model logs."""


@pytest.mark.process
def test_log_settings_at_run_time(talking: ServerProcess) -> None:
    def logged() -> str:
        before = len(talking.errors)
        client.infer("speaker", [tensor("IN", np.zeros(1, np.float32))], client_timeout=WAIT_S)
        eventually(lambda: '"the end"\n' in talking.errors[before:], "all is logged")
        return talking.errors[before:]

    with client_of(talking) as client:
        assert values(client.get_log_settings()) == LOG_SETTINGS
        text = logged()
        assert re.search(r'I\d{4} [\d:.]+ \d+ model\.py:\d+\] "said for information"', text)
        assert "said in confidence" not in text
        changed = {"log_verbose_level": 1, "log_format": "ISO8601"}
        assert values(client.update_log_settings(changed)) == {**LOG_SETTINGS, **changed}
        assert values(client.get_log_settings()) == {**LOG_SETTINGS, **changed}
        text = logged()
        assert re.search(r'\d{4}-\d\d-\d\dT[\d:]+Z I \d+ model\.py:\d+\] "said in confidence"', text)
        client.update_log_settings({"log_info": False, "log_verbose_level": 0})
        assert "said" not in logged()
        client.update_log_settings({"log_info": True, "log_format": "default"})
        assert values(client.get_log_settings()) == LOG_SETTINGS


@pytest.mark.process
@pytest.mark.parametrize(
    ("settings", "code", "text"),
    [
        (
            {"log_file": "/tmp/x"},
            "UNIMPLEMENTED",
            "log file location can not be updated through network protocol",
        ),
        ({"log_format": "x"}, "INVALID_ARGUMENT", "invalid argument for log_format, got: x"),
    ],
)
def test_log_settings_that_can_not_be(
    talking: ServerProcess, settings: dict[str, Any], code: str, text: str
) -> None:
    with client_of(talking) as client:
        with pytest.raises(InferenceServerException) as raised:
            client.update_log_settings(settings)
        assert (raised.value.status(), raised.value.message()) == (f"StatusCode.{code}", text)
        assert values(client.get_log_settings()) == LOG_SETTINGS


@pytest.mark.process
def test_verbose_lines_of_requests(tmp_path: Path) -> None:
    write_probe(tmp_path)
    with serving_process(tmp_path) as server, client_of(server) as client:
        probe(client, request_id="quiet")
        client.update_log_settings({"log_verbose_level": 1})
        probe(client, request_id="r1", parameters={"own": 1})
        with pytest.raises(InferenceServerException):
            client.infer("probe", probe_inputs(), parameters={"do": "raise"}, request_id="r2")
        eventually(lambda: "[request id: r2] released" in server.errors, "the second one is logged")
        client.update_log_settings({"log_verbose_level": 0})
        probe(client, request_id="quiet")
        lines = [line["message"] for line in server.logs() if line["logger"] == "conch.core.request_log"]
    prepared = (
        "prepared: model: probe, requested version: -1, actual version: 1, correlation id: 0, batch size: 1, "
        "priority: 0, timeout (us): 0, inputs: IN, type: FP32, shape: [1, 4], requested outputs: all"
    )
    assert lines[:2] == [
        f"[request id: r1] {prepared}",
        "model probe, version 1, executing 1 requests, batch size: 1",
    ]
    assert re.fullmatch(
        r"\[request id: r1\] add response, model: probe, outputs: .*OUT, type: FP32, shape: \[1, 4\].*",
        lines[2],
    )
    assert lines[3:6] == [
        "[request id: r1] released, model: probe",
        f"[request id: r2] {prepared}",
        "model probe, version 1, executing 1 requests, batch size: 1",
    ]
    assert lines[6].startswith("[request id: r2] add response, model: probe, error: ")
    assert lines[7:] == ["[request id: r2] released, model: probe"]


@pytest.mark.process
def test_trace_settings(talking: ServerProcess) -> None:
    def settings(message: Any) -> dict[str, list[str]]:
        return {name: list(setting.value) for name, setting in message.settings.items()}

    with client_of(talking) as client:
        defaults = settings(client.get_trace_settings())
        assert defaults == {
            "trace_mode": ["triton"],
            "trace_file": [""],
            "trace_level": ["OFF"],
            "trace_rate": ["1000"],
            "trace_count": ["-1"],
            "log_frequency": ["0"],
        }
        of_model = settings(client.update_trace_settings("speaker", {"trace_rate": "5"}))
        assert of_model == {**defaults, "trace_rate": ["5"]} == settings(client.get_trace_settings("speaker"))
        assert settings(client.get_trace_settings()) == defaults
        with pytest.raises(InferenceServerException, match="Request for unknown model : nobody"):
            client.get_trace_settings("nobody")
        with pytest.raises(InferenceServerException, match="trace file name is not given"):
            client.update_trace_settings(settings={"trace_level": "TIMESTAMPS"})


def access_lines(path: Path, count: int) -> list[Any]:
    """The lines of an access log, which must be so many, when there are so many."""
    eventually(lambda: path.read_text().count("\n") >= count, f"{count} lines")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == count, found
    return found


@contextmanager
def recorded(
    tmp_path: Path, *flags: str, start: Callable[..., AbstractContextManager[AnyServer]] = serving
) -> Iterator[tuple[AnyServer, Callable[[int], list[Any]]]]:
    """A server with an access log, and a function that gives so many of its lines, when there are so many."""
    path = tmp_path / "access.log"

    def lines(count: int) -> list[Any]:
        return access_lines(path, count)

    with start(tmp_path / "models", flags=[f"--access-log={path}", *flags]) as server:
        yield server, lines


def test_each_request_has_a_line(tmp_path: Path) -> None:
    write_probe(tmp_path / "models")
    with recorded(tmp_path) as (server, lines), client_of(server) as client:
        probe(client, request_id="good")
        with pytest.raises(InferenceServerException):
            client.infer("probe", probe_inputs(), parameters={"do": "raise"}, request_id="broken")
        with pytest.raises(InferenceServerException):
            client.infer("probe", probe_inputs(shape=(9, 4)), request_id="large")
        with pytest.raises(InferenceServerException):
            client.infer("nobody", probe_inputs(), "7", request_id="lost")
        found = {line["id"]: line for line in lines(4)}
    fields = [
        "ts", "protocol", "client", "id", "model", "version", "code", "rows", "batch_size", "responses",
        "bytes_in", "bytes_out", "queue_us", "compute_input_us", "compute_infer_us", "compute_output_us",
        "total_us",
    ]  # fmt: skip
    good = found["good"]
    assert list(good) == fields
    assert (good["protocol"], good["model"], good["version"], good["code"]) == ("grpc", "probe", "1", "OK")
    assert good["client"].startswith("ipv4:127.0.0.1:")
    assert (good["rows"], good["batch_size"], good["responses"]) == (1, 1, 1)
    assert good["bytes_in"] > 16
    assert good["bytes_out"] > 16
    stages = [good[name] for name in fields if name.endswith("_us") and name != "total_us"]
    assert all(stage >= 0 for stage in stages)
    assert 0 < sum(stages) <= good["total_us"]
    assert (found["broken"]["code"], found["broken"]["batch_size"]) == ("INTERNAL", 1)
    assert "told to" in found["broken"]["error"]
    assert (found["large"]["code"], found["large"]["batch_size"]) == ("INVALID_ARG", 0)
    lost = found["lost"]
    assert (lost["code"], lost["model"], lost["version"]) == ("NOT_FOUND", "nobody", "7")


def test_what_the_cache_answers_has_a_line(tmp_path: Path) -> None:
    write_probe(tmp_path / "models", extra="response_cache { enable: true }")
    with (
        recorded(tmp_path, "--cache-config=local,size=1000000") as (server, lines),
        client_of(server) as client,
    ):
        for _ in range(2):
            probe(client)
        found = lines(
            2
        )  # in either order: a line comes after its response, and another request may overtake it
    assert sorted((line["code"], line["version"], line["batch_size"]) for line in found) == [
        ("OK", "1", 0),
        ("OK", "1", 1),
    ]


def test_malformed_requests_have_a_line_too(tmp_path: Path) -> None:
    write_probe(tmp_path / "models")
    with recorded(tmp_path) as (server, lines):
        raw = RawClient(server.address)
        with pytest.raises(grpc.RpcError):
            raw.infer(b"\xff\xff")
        raw.close()
        (line,) = lines(1)
    assert (line["code"], line["model"], line["bytes_in"]) == ("INVALID_ARG", "", 2)


def test_cancelled_requests_have_a_line(tmp_path: Path) -> None:
    write_probe(tmp_path / "models")
    running, cancelled = tmp_path / "running", tmp_path / "cancelled"
    with recorded(tmp_path) as (server, lines), client_of(server) as client:
        orders = {"started": str(running), "until_cancelled": str(cancelled)}
        call = client.async_infer(
            "probe", probe_inputs(), lambda result, error: None, request_id="running", parameters=orders
        )
        eventually(running.exists, "it runs")
        call.cancel()
        (line,) = lines(1)
        assert cancelled.exists()
    assert (line["id"], line["code"], line["batch_size"]) == ("running", "CANCELLED", 1)


def test_a_decoupled_request_has_one_line(tmp_path: Path) -> None:
    write_steps(tmp_path / "models")
    answers: queue.Queue[Any] = queue.Queue()
    with recorded(tmp_path) as (server, lines), client_of(server) as client:
        client.start_stream(lambda result, error: answers.put(error))
        inputs = [tensor("IN", np.zeros(1, np.int32), "INT32")]
        for name, steps in (("three", "ok later ok ok final"), ("error", "ok err final")):
            client.async_stream_infer("steps", inputs, request_id=name, parameters={"steps": steps})
        three, error = sorted(lines(2), key=lambda line: line["id"], reverse=True)
        client.stop_stream()
    assert (three["protocol"], three["code"], three["responses"]) == ("grpc-stream", "OK", 3)
    assert three["bytes_out"] > 0
    assert error["responses"] == 2


@pytest.mark.process
def test_ensembles_have_a_line_and_their_steps_if_asked(tmp_path: Path) -> None:
    write_ensembles(tmp_path / "models")
    with recorded(tmp_path, start=serving_process) as (server, lines), client_of(server) as client:
        raw = RawClient(server.address)
        raw.infer(ensemble_request("chain", [[1.0]]))
        (line,) = lines(1)
        assert (line["model"], line["code"], line["protocol"]) == ("chain", "OK", "grpc")
        assert 0 < line["compute_infer_us"] <= line["total_us"]
        client.update_log_settings({"log_verbose_level": 1})
        raw.infer(ensemble_request("chain", [[1.0]]))
        raw.close()
        told = lines(4)[1:]
    steps = [line for line in told if line["protocol"] == "ensemble-step"]
    assert [line["model"] for line in told if line not in steps] == ["chain"]
    assert len(steps) == 2
    assert {(step["id"], step["model"]) for step in steps} == {("an id", "spy"), ("an id", "spy2")}
    assert all(step["batch_size"] for step in steps)


@pytest.mark.process
def test_calls_of_models_have_lines_if_asked(tmp_path: Path) -> None:
    write_callers(tmp_path / "models")
    code = "result = [call(name, 1, request_id=name).exec().has_error() for name in ('echo', 'fails')]"
    with (
        recorded(tmp_path, "--log-verbose=1", start=serving_process) as (server, lines),
        client_of(server) as client,
    ):
        assert run(client, code) == "[False, True]"
        code = "result = call('echo', 1, outputs=['X'], request_id='wrong').exec().has_error()"
        assert run(client, code) == "True"
        told = [(line["protocol"], line["id"], line["model"], line["code"]) for line in lines(5)]
    # A call's line is written once its response is delivered, which may be after the caller's own.
    assert sorted(told) == [
        ("grpc", "", "script", "OK"),
        ("grpc", "", "script", "OK"),
        ("model-call", "echo", "echo", "OK"),
        ("model-call", "fails", "fails", "NOT_FOUND"),
        ("model-call", "wrong", "echo", "INVALID_ARG"),
    ]


@pytest.mark.process
def test_text_on_standard_output(tmp_path: Path) -> None:
    write_probe(tmp_path)
    with serving_process(tmp_path, flags=["--access-log=-", "--access-log-format=text"]) as server:
        with client_of(server) as client:
            probe(client, request_id="one")
        eventually(lambda: re.search(r" grpc ipv4:\S+ probe/1 OK id=one rows=1 ", server.output), "a line")


@pytest.mark.process
def test_log_files_are_opened_anew_at_hangup(tmp_path: Path) -> None:
    write_probe(tmp_path / "models")
    log, access = tmp_path / "server.log", tmp_path / "access.log"
    with (
        serving_process(
            tmp_path / "models", flags=[f"--access-log={access}", f"--log-file={log}", "--log-json"]
        ) as server,
        client_of(server) as client,
    ):
        probe(client, request_id="before")
        assert access_lines(access, 1)[0]["id"] == "before"
        for path in (log, access):
            path.rename(path.with_suffix(".old"))
        server.signal(signal.SIGHUP)
        eventually(lambda: log.exists() and access.exists(), "both are there again")
        probe(client, request_id="after")
        assert access_lines(access, 1)[0]["id"] == "after"
    assert "Waiting for in-flight" in log.read_text()
    assert "Waiting for in-flight" not in log.with_suffix(".old").read_text()
    assert all(json.loads(line) for line in log.read_text().splitlines())


@pytest.mark.process
@pytest.mark.parametrize("flag", ["--log-file", "--access-log"])
def test_files_that_can_not_be_opened(tmp_path: Path, flag: str) -> None:
    write_probe(tmp_path)
    with started(f"--model-repository={tmp_path}", "--grpc-port=0", f"{flag}={tmp_path}/no/log") as server:
        assert server.wait() == 1
        assert f"conch serve: {flag} can't be opened: " in server.errors


@pytest.mark.process
def test_settings_without_a_value(talking: ServerProcess) -> None:
    raw = RawClient(talking.address)
    message = pb.LogSettingsRequest()
    message.settings["log_error"].SetInParent()
    with pytest.raises(grpc.RpcError) as raised:
        raw("LogSettings", message)
    raw.close()
    assert raised.value.details() == "expect boolean for 'log_error'"

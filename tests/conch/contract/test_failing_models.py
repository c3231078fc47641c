"""Models that fail, at loading or executing: the errors of clients, and that others go on."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.raw_http import infer_body, raw_http, request
from tests.support.servers import (
    NUMBER_CONFIG,
    WAIT_S,
    AnyServer,
    check_simple,
    client_of,
    copy_example,
    probe,
    probe_inputs,
    serving,
    simple_inputs,
    write_model,
    write_probe,
)
from tritonclient.grpc import InferenceServerClient as Client
from tritonclient.utils import InferenceServerException

WARMUP = """
    model_warmup { name: "w" batch_size: 1 inputs { key: "IN" value {
        data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } }
"""
LOUD = """
import triton_python_backend_utils as pb_utils

TEXT = "x" * 4_000_000


class TritonPythonModel:
    def execute(self, requests):
        order = requests[0].inputs()[0].as_numpy().flat[0]
        if order == 0:
            raise ValueError(TEXT)
        error = pb_utils.TritonError(TEXT)
        if order == 2:
            inner = pb_utils.InferenceRequest(
                model_name="loud",
                requested_output_names=["OUT"],
                inputs=[pb_utils.Tensor("IN", requests[0].inputs()[0].as_numpy() - 1)],
            )
            error = inner.exec().error()
        if order == 3:
            requests[0].get_response_sender().send(pb_utils.InferenceResponse(error=error), 1)
            return [None]
        return [pb_utils.InferenceResponse(error=error)]
"""
HELPS = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"


@pytest.fixture(scope="module", params=["in_process", "worker"])
def broken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyServer]:
    """A server most of whose models do not load."""
    repository = tmp_path_factory.mktemp("broken")
    copy_example(repository, "simple")
    write_model(copy_example(repository, "simple", "not_onnx").parent, "not_onnx", None, {"model.onnx": "no"})
    write_model(repository, "malformed", "name: [ }", {"model.py": HELPS})
    write_model(repository, "unknown_field", NUMBER_CONFIG + "nonsense: 1", {"model.py": HELPS})
    write_model(repository, "unknown_backend", NUMBER_CONFIG.replace("python", "nope"), {"model.py": HELPS})
    write_model(repository, "no_file", NUMBER_CONFIG, {})
    (repository / "no_version").mkdir()
    write_model(repository, "no_version", NUMBER_CONFIG, versions=())
    write_model(repository, "no_class", NUMBER_CONFIG, {"model.py": "x = 1\n"})
    write_model(repository, "no_execute", NUMBER_CONFIG, {"model.py": "class TritonPythonModel: pass\n"})
    write_model(repository, "bad_syntax", NUMBER_CONFIG, {"model.py": "def (:\n"})
    write_model(repository, "bad_import", NUMBER_CONFIG, {"model.py": "import there_is_no_such_module\n"})
    write_model(repository, "exits_at_import", NUMBER_CONFIG, {"model.py": "raise SystemExit(3)\n"})
    write_probe(
        repository, "bad_initialize", 'parameters { key: "fail" value { string_value: "no weights" } }'
    )
    fails = 'class TritonPythonModel:\n    def execute(self, requests):\n        raise ValueError("cold")\n'
    write_model(repository, "bad_warmup", NUMBER_CONFIG + WARMUP, {"model.py": fails})
    write_model(
        repository,
        "loud",
        NUMBER_CONFIG + "max_batch_size: 1 instance_group { count: 2 }",
        {"model.py": LOUD},
    )
    write_model(repository, "loud_load", NUMBER_CONFIG, {"model.py": 'raise ValueError("x" * 4_000_000)\n'})
    flags = ["--exit-on-error=false", f"--backend-config=python,placement={request.param}"]
    with serving(repository, flags=flags) as server:
        yield server


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("not_onnx", "not_onnx/1/model.onnx': onnx runtime error 7: Failed to load model because protobuf"),
        ("malformed", "config.pbtxt:1:7: 'name: [ }': Expected string but found: '['"),
        ("unknown_field", "nonsense"),
        ("unknown_backend", "nope"),
        ("no_file", "no_file/1/model.py' for model 'no_file'"),
        ("no_version", "version"),
        ("no_class", "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"),
        ("no_execute", "does not implement `execute` method."),
        ("bad_syntax", "SyntaxError: invalid syntax"),
        ("bad_import", "ModuleNotFoundError: No module named 'there_is_no_such_module'"),
        ("exits_at_import", "SystemExit: 3"),
        ("bad_initialize", "ValueError: no weights"),
        ("bad_warmup", "failed to run warmup sample 'w': Failed to process the request(s) for model"),
    ],
)  # fmt: skip
def test_what_does_not_load(broken: AnyServer, name: str, reason: str) -> None:
    with client_of(broken) as client:
        lines = [line for line in client.get_model_repository_index().models if line.name == name]
        assert [line.state for line in lines] == ["UNAVAILABLE"]
        assert reason in lines[0].reason
        assert client.is_model_ready(name) is False
        with pytest.raises(InferenceServerException) as raised:
            client.infer(name, probe_inputs())
        assert raised.value.status() == "StatusCode.NOT_FOUND"
        unread = name in ("malformed", "unknown_field")  # whether there are versions is not known then
        said = "is not found" if unread else "has no available versions"
        assert raised.value.message() == f"Request for unknown model: '{name}' {said}"
        check_simple(client.infer("simple", simple_inputs()))


@pytest.mark.parametrize("order", [0, 1, 2, 3], ids=["exception", "error", "bls", "sender"])
def test_texts_of_any_size_are_cut(broken: AnyServer, order: int) -> None:
    body = infer_body("IN", "FP32", [order])
    with raw_http(broken.http_address) as connection:
        connection.send(request("POST", "/v2/models/loud/infer", body))
        response = connection.response()
    assert response is not None and response.status == 500
    text = response.json()["error"]
    assert len(text) < 40_000
    assert re.search(r"x{16000}x* \.\.\. \(39\d{5} more characters\)", text), text[-1000:]


def test_texts_of_failed_loads_are_cut(broken: AnyServer) -> None:
    with client_of(broken) as client:
        (reason,) = [
            each.reason for each in client.get_model_repository_index().models if each.name == "loud_load"
        ]
        assert "ValueError: xxx" in reason and len(reason) < 40_000


def test_a_server_with_failed_models_is_live_and_not_ready(broken: AnyServer) -> None:
    with client_of(broken) as client:
        assert client.is_server_live() is True
        assert client.is_server_ready() is False
        assert client.is_model_ready("simple") is True


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ("raise", "ValueError: told to"),
        ("exit", "SystemExit: told to"),
        (
            "too few",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0\n",
        ),
        ("no list", "Expected a list in the execute return, found type '<class 'NoneType'>'."),
        (
            "no response",
            "Expected an 'InferenceResponse' object in the execute function return list, found type "
            "'<class 'str'>'.",
        ),
    ],
)
def test_execute_fails(client: Client, order: str, text: str) -> None:
    for _ in range(2):  # the instance lives on
        with pytest.raises(InferenceServerException) as raised:
            client.infer("probe", probe_inputs(), parameters={"do": order})
        assert raised.value.status() == "StatusCode.INTERNAL"
        start = "Failed to process the request(s) for model 'probe_0', message: "
        assert raised.value.message().startswith(start + text)
        probe(client)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("UNKNOWN", "UNKNOWN"),
        ("INTERNAL", "INTERNAL"),
        ("NOT_FOUND", "NOT_FOUND"),
        ("INVALID_ARG", "INVALID_ARGUMENT"),
        ("UNAVAILABLE", "UNAVAILABLE"),
        ("UNSUPPORTED", "UNIMPLEMENTED"),
        ("ALREADY_EXISTS", "ALREADY_EXISTS"),
        ("CANCELLED", "CANCELLED"),
    ],
)
def test_error_codes_of_models(client: Client, code: str, status: str) -> None:
    with pytest.raises(InferenceServerException) as raised:
        client.infer("probe", probe_inputs(), parameters={"error": code})
    assert (raised.value.status(), raised.value.message()) == (f"StatusCode.{status}", "told to")


def ask_four(server: AnyServer, orders: dict[int, dict[str, str]]) -> dict[int, Any]:
    """Four requests, which run as one batch; for each what SEEN says, or its error."""
    said: dict[int, Any] = {}

    def ask(number: int) -> None:
        with client_of(server) as client:
            try:
                said[number] = probe(
                    client, float(number), "four", request_id=str(number), parameters=orders.get(number)
                )
            except InferenceServerException as error:
                said[number] = error

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return said


def executions(server: AnyServer) -> tuple[int, int, int]:
    """Executions, successes and failures of the model that batches four."""
    with client_of(server) as client:
        (stats,) = client.get_inference_statistics("four").model_stats
        return (
            stats.execution_count,
            stats.inference_stats.success.count,
            stats.inference_stats.fail.count,
        )


def test_an_error_for_one_request_of_a_batch(server: AnyServer) -> None:
    before = executions(server)
    said = ask_four(server, {2: {"error": "INVALID_ARG"}})
    failed = said.pop(2)
    assert isinstance(failed, InferenceServerException)
    assert (failed.status(), failed.message()) == ("StatusCode.INVALID_ARGUMENT", "told to")
    assert [sorted(answer["ids"]) for answer in said.values()] == [["0", "1", "2", "3"]] * 3
    after = executions(server)
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 3, 1]


@pytest.mark.parametrize("order", ["raise", "exit", "too few"])
def test_a_failed_batch_fails_all_its_requests(server: AnyServer, order: str) -> None:
    before = executions(server)
    said = ask_four(server, {1: {"do": order}})
    assert len({str(error.message()) for error in said.values()}) == 1
    assert {error.status() for error in said.values()} == {"StatusCode.INTERNAL"}
    after = executions(server)
    assert [new - old for new, old in zip(after, before, strict=True)][1:] == [0, 4]
    assert [sorted(answer["ids"]) for answer in ask_four(server, {}).values()] == [["0", "1", "2", "3"]] * 4


def test_a_model_that_failed_can_be_repaired(tmp_path: Path) -> None:
    directory = write_probe(tmp_path, extra='parameters { key: "fail" value { string_value: "no weights" } }')
    with (
        serving(tmp_path, flags=["--model-control-mode=explicit"]) as server,
        client_of(server) as client,
    ):
        with pytest.raises(InferenceServerException) as raised:
            client.load_model("probe")
        assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert str(raised.value.message()).startswith(
            "load failed for model 'probe': version 1 is at UNAVAILABLE state: Internal: ValueError: no "
            "weights"
        )
        config = (directory / "config.pbtxt").read_text()
        (directory / "config.pbtxt").write_text(config.partition("parameters")[0])
        client.load_model("probe")
        probe(client)

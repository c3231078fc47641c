"""conch infer against conch: what it sends, what it shows, and how it fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.certificates import Authority
from tests.support.servers import (
    LocalServer,
    copy_example,
    free_port,
    serving,
    write_model,
    write_probe,
    write_steps,
)

from conch_tools import infer_command
from conch_tools.api import InputError, RemoteModel, infer

NUMBERS = json.dumps(list(range(16)))
SIMPLE = ["simple", "-i", f"INPUT0={NUMBERS}", "-i", f"INPUT1={NUMBERS}"]
LABELS = """
    backend: "identity"
    max_batch_size: 4
    input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 3 ] }
    output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels.txt" }
"""
BUSY = """
    backend: "python"
    input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
BUSY_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self._calls = 0

    def execute(self, requests):
        return [self._response(request) for request in requests]

    def _response(self, request):
        # Each second call is answered.
        self._calls += 1
        if self._calls % 2:
            error = pb_utils.TritonError("busy", pb_utils.TritonError.UNAVAILABLE)
            return pb_utils.InferenceResponse(error=error)
        tensor = pb_utils.get_input_tensor_by_name(request, "IN")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor.as_numpy())])
"""

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server with the models of these tests."""
    repository = tmp_path_factory.mktemp("repository")
    for name in ("simple", "strings"):
        copy_example(repository, name)
    write_probe(repository)
    write_steps(repository)
    directory = write_model(repository, "labelled", LABELS)
    (directory / "labels.txt").write_text("cat\ndog\nfish\n")
    write_model(repository, "busy", BUSY, {"model.py": BUSY_MODEL})
    with serving(repository) as local:
        yield local


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, server: LocalServer) -> str:
    """The server's URL, for each protocol."""
    return f"grpc://{server.address}" if request.param == "grpc" else f"http://{server.http_address}"


def run(capsys: pytest.CaptureFixture[str], url: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command."""
    code = infer_command.run([*arguments, "-u", url])
    out, errors = capsys.readouterr()
    return code, out, errors


def answers(capsys: pytest.CaptureFixture[str], url: str, *arguments: str) -> list[dict[str, Any]]:
    """The responses that the command prints as JSON."""
    code, out, errors = run(capsys, url, *arguments, "--json")
    assert (code, errors) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def test_one_request(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = answers(capsys, url, *SIMPLE, "--id", "seven", "--output", "OUTPUT0")
    sums = {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16], "data": list(range(0, 32, 2))}
    assert found == {"model_name": "simple", "model_version": "1", "id": "seven", "outputs": [sums]}
    code, out, _ = run(capsys, url, "strings", "-i", 'text=["a", "ü"]')
    head, *lines = out.splitlines()
    assert code == 0
    assert head.startswith("model strings, version 1, ")
    assert lines == ['upper BYTES [1, 2]: [["A", "Ü"]]', "length INT32 [1, 2]: [[1, 1]]"]


def test_parameters_and_headers_reach_the_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-i", "IN=[1, 2]", "--parameter", "sequence_id=7", "--parameter", "priority=1"]
    (found,) = answers(capsys, url, "probe", *flags, "--parameter", "own=text", "--timeout", "60")
    (seen,) = (each for each in found["outputs"] if each["name"] == "SEEN")
    assert json.loads(seen["data"][0])["parameters"]["own"] == "text"


def test_classes_have_labels(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, url, "labelled", "-i", "INPUT0=[0.25, 4, 2]", "--top", "2")
    assert code == 0
    assert [line.split() for line in out.splitlines()[2:4]] == [
        ["4.000000", "1", "dog"],
        ["2.000000", "2", "fish"],
    ]


def test_files_in_and_out(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "in.npy", np.arange(32, dtype=np.int32).reshape(2, 16))
    flags = [f"--input={name}=@{tmp_path / 'in.npy'}" for name in ("INPUT0", "INPUT1")]
    assert run(capsys, url, "simple", *flags, "--save", str(tmp_path / "out"))[0] == 0
    saved = np.load(tmp_path / "out" / "OUTPUT0.npy")
    assert np.array_equal(saved, 2 * np.arange(32).reshape(2, 16))


def test_each_response_of_a_decoupled_model(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answers(capsys, url, "steps", "-i", "IN=1", "--parameter", "steps=ok ok okfinal")
    assert [each["outputs"][0]["data"] for each in found if each["outputs"]] == [[0], [1], [2]]
    code, out, errors = run(capsys, url, "steps", "-i", "IN=1", "--parameter", "steps=ok errfinal")
    assert (code, errors) == (infer_command.REFUSED, "conch infer: told to\n")
    assert out.startswith("response 1, ")


def test_text_of_a_model_of_texts(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, url, "strings", "--text", "straße", "--output", "upper")
    assert (code, out) == (0, "STRASSE\n")


def test_requests_of_a_file(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[number] * 16 for number in range(50)]
    lines = [json.dumps({"INPUT0": row, "INPUT1": row}) for row in rows]
    lines[7] = json.dumps({"INPUT0": [1], "INPUT1": rows[7]})
    inputs = [
        {"name": name, "shape": [1, 16], "datatype": "INT32", "data": rows[9]}
        for name in ("INPUT0", "INPUT1")
    ]
    lines[9] = json.dumps({"id": "nine", "inputs": inputs, "outputs": [{"name": "OUTPUT0"}]})
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    code, out, errors = run(
        capsys, url, "simple", "--jsonl", str(source), "-o", str(target), "--workers", "4"
    )
    assert (code, out) == (infer_command.REFUSED, "")
    assert errors.startswith("50 requests, 1 failed, ")
    results = [json.loads(line) for line in target.read_text().splitlines()]
    bad = results.pop(7)
    assert bad["line"] == 8
    assert "'INPUT0' takes INT32 of shape [-1, 16]" in bad["error"]
    sums = [found["outputs"][0]["data"][0] for found in results]
    assert sums == [2 * number for number in range(50) if number != 7]
    assert [found["id"] for found in results if "id" in found] == ["nine"]


def test_requests_of_a_file_are_sent_again(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"IN": {number}}}\n' for number in range(4)))
    flags = ["busy", "--jsonl", str(source), "--workers", "1"]
    code, out, errors = run(capsys, url, *flags, "--retries", "0")
    assert code == infer_command.REFUSED
    assert errors.startswith("4 requests, 2 failed, ")
    assert out.count('"error": "busy"') == 2
    code, out, _ = run(capsys, url, *flags, "--retries", "1")
    assert code == infer_command.DONE
    assert [json.loads(line)["outputs"][0]["data"] for line in out.splitlines()] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["simple", "-i", f"INPUT0={NUMBERS}"], 2, "give -i INPUT1=VALUE; model 'simple' has INPUT0 INT32"),
        (["simple", "-i", "NO=1"], 2, "model 'simple' has no input 'NO'; it has INPUT0 INT32 [-1, 16]"),
        (["simple", "-i", "INPUT0=[1]", "-i", "INPUT1=1"], 2, "'INPUT0' takes INT32 of shape [-1, 16]"),
        (
            ["simple", "-i", "INPUT0=x"],
            2,
            "'INPUT0' takes INT32 as JSON, such as 1 or [1, 2], not 'x'; a file",
        ),
        (["simple", "-i", "INPUT0=@/nope"], 2, "/nope can't be read: No such file or directory"),
        ([*SIMPLE, "--output", "NO"], 2, "model 'simple' has no output 'NO'; it has OUTPUT0"),
        ([*SIMPLE, "--shape", "INPUT0=16"], 2, "--shape takes INPUT:DIM,DIM"),
        ([*SIMPLE, "--workers", "2"], 2, "--workers goes with --rows, --csv or --jsonl"),
        (["simple", "--jsonl", "x", "--id", "1"], 2, "--id is of one request"),
        ([*SIMPLE, "--header", "x"], 2, "--header takes NAME=VALUE, not 'x'"),
        (["nope"], 1, "unknown model: 'nope' is not found"),
        (["simple", "-x", "9"], 1, "unknown model: 'simple' version 9 is not found"),
    ],
)
def test_what_is_refused(
    arguments: list[str], code: int, message: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, errors = run(capsys, url, *arguments)
    assert (found, out) == (code, "")
    assert message in errors


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_server_that_is_not_there(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{scheme}://127.0.0.1:{free_port()}"
    code, _, errors = run(capsys, url, *SIMPLE)
    assert code == infer_command.UNREACHED
    assert errors.startswith(f"conch infer: {url}: ")
    assert errors.endswith("; --url or CONCH_URL names the server\n")


def test_tls_with_certificates_on_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority(tmp_path / "authority")
    key, certificate = authority.issue("server")
    client_key, client_certificate = authority.issue("client")
    repository = tmp_path / "repository"
    repository.mkdir()
    copy_example(repository, "simple")
    flags = [
        "--grpc-use-ssl-mutual",
        f"--grpc-server-key={key}",
        f"--grpc-server-cert={certificate}",
        f"--grpc-root-cert={authority.root}",
    ]
    ours = ["--client-cert", str(client_certificate), "--client-key", str(client_key)]
    with serving(repository, flags=flags) as server:
        found = answers(capsys, server.address, *SIMPLE, "--root-cert", str(authority.root), *ours)
        assert found[0]["outputs"][1]["data"] == [0] * 16
        code, _, errors = run(capsys, server.address, *SIMPLE, *ours)  # of an unknown authority
        assert code == infer_command.UNREACHED
        assert "CERTIFICATE_VERIFY_FAILED" in errors


def test_in_a_program(url: str) -> None:
    inputs = {"INPUT0": np.arange(16), "INPUT1": [1] * 16}
    response = infer(url, "simple", inputs, outputs=["OUTPUT1"])
    assert response.arrays["OUTPUT1"].tolist() == [list(range(-1, 15))]
    with RemoteModel(url, "steps") as model:
        request = model.request({"IN": 1}, parameters={"steps": "ok okfinal"})
        found = [each.arrays["OUT"].tolist() for each in model.stream(request) if each.outputs]
        assert found == [[0], [1]]
        with pytest.raises(InputError, match="no value for IN"):
            model.request({})

"""SageMaker's sequences of calls: endpoints of one model and of many, sessions, and malformed requests."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.metrics import get
from tests.support.platforms import (
    NO_PORTS,
    SIMPLE_JSON,
    check_binary,
    check_json,
    memory_request,
    post,
    simple_binary,
    write_memory_model,
)
from tests.support.servers import (
    copy_example,
    free_port,
    serving,
    started,
    write_probe,
)

MIME = "application/vnd.sagemaker-triton.binary+json;json-header-size="
MULTI_MODEL = (
    "--sagemaker-multi-model",
    "--sagemaker-ping-mode=live",
    "--model-control-mode=explicit",
    "--model-namespacing",
)


@contextmanager
def sagemaker(*repositories: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """A server with SageMaker's routes; gives their URL."""
    port = free_port()
    with serving(*repositories, flags=["--allow-sagemaker", f"--sagemaker-port={port}", *flags]):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An endpoint of one model."""
    repository = tmp_path_factory.mktemp("single")
    copy_example(repository, "simple")
    with sagemaker(repository, flags=["--sagemaker-default-model=simple"]) as url:
        yield url


def test_one_model(endpoint: str) -> None:
    assert get(f"{endpoint}/ping")[0] == 200
    status, headers, body = post(f"{endpoint}/invocations", SIMPLE_JSON, Content_Type="application/json")
    assert (status, headers["content-type"]) == (200, "application/json")
    check_json(body)
    head, binary = simple_binary()
    status, headers, body = post(f"{endpoint}/invocations", binary, Content_Type=f"{MIME}{head}")
    assert status == 200
    check_binary(headers["content-type"], MIME, body)
    # SageMaker strips this header, so it does not count where it comes all the same.
    ignored = post(f"{endpoint}/invocations", SIMPLE_JSON, Inference_Header_Content_Length="7")
    check_json(ignored[2])


@pytest.mark.parametrize(
    ("content_type", "text"),
    [
        (f"{MIME}-1", r"inference header size should be in range \(0, \d+\), got: -1"),
        (f"{MIME}9999", r"inference header size should be in range \(0, \d+\), got: 9999"),
        (f"{MIME}nan", "Unable to parse inference header size, got: nan"),
        (f"{MIME}", "Unable to parse inference header size, got: "),
        (
            f"{MIME}12345678901",
            "Unable to parse inference header size, value is out of range, got: 12345678901",
        ),
        (f"x{MIME}5", f"expect MIME type for binary data starts with '{re.escape(MIME)}', got: x.*"),
    ],
)
def test_malformed_sizes(endpoint: str, content_type: str, text: str) -> None:
    status, _, body = post(f"{endpoint}/invocations", simple_binary()[1], Content_Type=content_type)
    assert status == 400 and re.fullmatch(text, json.loads(body)["error"]), body
    check_json(post(f"{endpoint}/invocations", SIMPLE_JSON)[2])


def test_what_is_not_part_of_the_contract(endpoint: str) -> None:
    status, headers, _ = post(f"{endpoint}/invocations", SIMPLE_JSON, Content_Encoding="br")
    assert (status, headers["accept-encoding"]) == (415, "gzip, deflate")
    for path in ("/v2/models/simple", "/v2/repository/index", "/", "/models", "/models/x", "/models/x/y"):
        assert get(f"{endpoint}{path}")[::2] == (400, b""), path
    assert get(f"{endpoint}/invocations")[0] == 405
    for path in ("/models", "/models/x/invoke"):  # no multi-model endpoint
        assert post(f"{endpoint}{path}", b"{")[::2] == (400, b""), path


def test_mlflows_scoring_protocol(tmp_path: Path) -> None:
    copy_example(tmp_path, "simple")
    tensor = {"type": "tensor", "tensor-spec": {"dtype": "int32", "shape": [-1, 16]}}
    signature = {
        side: json.dumps([{**tensor, "name": f"{side[:-1].upper()}{number}"} for number in (0, 1)])
        for side in ("inputs", "outputs")
    }
    (tmp_path / "simple/1/mlflow").mkdir()
    (tmp_path / "simple/1/mlflow/signature.json").write_text(json.dumps(signature))
    flags = ["--sagemaker-default-model=simple", "--sagemaker-inference-type=invocations"]
    row = list(range(16))
    with sagemaker(tmp_path, flags=flags) as url:
        body = json.dumps({"instances": [{"INPUT0": row, "INPUT1": row}]}).encode()
        for kind in ("application/json", "application/json; charset=utf-8"):
            status, headers, answer = post(f"{url}/invocations", body, Content_Type=kind)
            assert (status, headers["content-type"]) == (200, "application/json")
            predicted = {"OUTPUT0": [[2 * each for each in row]], "OUTPUT1": [[0] * 16]}
            assert json.loads(answer) == {"predictions": predicted}
        status, _, answer = post(f"{url}/invocations", b"a\n1\n", Content_Type="text/csv")
        assert status == 400 and b"input 'INPUT0' of model 'simple' has dims" in answer


def test_a_model_that_gets_no_memory(tmp_path: Path) -> None:
    config = copy_example(tmp_path, "simple") / "config.pbtxt"
    with config.open("a") as file:
        file.write('parameters { key: "CONCH_MEMORY_MB" value { string_value: "900" } }')
    flags = [
        "--sagemaker-default-model=simple",
        "--model-control-mode=on-demand",
        "--resident-memory=800000000",
    ]
    with sagemaker(tmp_path, flags=flags) as url:
        status, _, body = post(f"{url}/invocations", SIMPLE_JSON)
    text = "no memory for model 'simple': it needs 900 MB, and all models together have 800 MB"
    assert (status, text in json.loads(body)["error"]) == (507, True), body


def test_without_a_default_model(tmp_path: Path) -> None:
    copy_example(tmp_path, "simple")
    with sagemaker(tmp_path) as url:
        status, _, body = post(f"{url}/invocations", SIMPLE_JSON)
    unknown = "unspecified_SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
    assert (status, json.loads(body)["error"]) == (
        404,
        f"Request for unknown model: '{unknown}' is not found",
    )


class Endpoint:
    """A multi-model endpoint, as SageMaker drives it.

    Args:
        url: Its URL.
        root: Directory in which SageMaker puts archives.
    """

    def __init__(self, url: str, root: Path) -> None:
        self.url = url
        self.root = root

    def load(self, name: str, archive: str, **headers: str) -> int:
        """The status of a load."""
        body = json.dumps({"model_name": name, "url": str(self.root / archive / "model")}).encode()
        return post(f"{self.url}/models", body, **headers)[0]

    def unload(self, name: str) -> int:
        """The status of an unload."""
        return get(f"{self.url}/models/{name}", "DELETE")[0]

    def names(self) -> list[str]:
        """The loaded models, of all pages."""
        found: list[str] = []
        query = ""
        while True:
            page = json.loads(get(f"{self.url}/models{query}")[2])
            found += [each["modelName"] for each in page["models"]]
            if "nextPageToken" not in page:
                return found
            query = f"?next_page_token={page['nextPageToken']}"

    def invoke(self, name: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        """Status and body of an inference."""
        status, _, answer = post(f"{self.url}/models/{name}/invoke", body, **headers)
        return status, answer


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A multi-model endpoint with archives of all layouts."""
    root = tmp_path_factory.mktemp("opt") / "ml" / "models"
    for archive in ("a1", "b2"):
        copy_example(root / archive / "model", "simple")
    copy_example(root / "c3", "simple", "moved").rename(root / "c3" / "model")  # config.pbtxt at the root
    for name in ("digit_image", "digits", "digit_reader"):
        copy_example(root / "d4" / "model", name)
    for name in ("one", "two"):
        write_probe(root / "e5" / "model", name)
    (root / "f6" / "model").mkdir(parents=True)
    (root / "g7").mkdir()
    (root / "g7" / "model").symlink_to("/usr")
    for archive, target in (("h8", "../a1"), ("i9", "../b2/model")):
        (root / archive).mkdir()
        (root / archive / "model").symlink_to(target)
    with sagemaker(flags=[*MULTI_MODEL, f"--sagemaker-models-root={root}"]) as url:
        yield Endpoint(url, root)


def test_many_models(many: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    assert get(f"{many.url}/ping")[0] == 200, "live before any model is loaded"
    assert many.names() == []
    assert many.load("first", "a1") == 200
    assert many.load("first", "b2") == 409, "the name is taken"
    assert many.load("other", "a1") == 409, "the directory is registered"
    assert many.load("linked", "i9") == 200
    assert many.load("other", "b2") == 409, "it is, by a link"
    assert many.unload("linked") == 200
    assert many.load("second", "b2") == 200, "which has a model of the same name"
    assert many.load("third", "c3") == 200
    assert many.names() == ["first", "second", "third"]
    assert json.loads(get(f"{many.url}/models/second")[2]) == {
        "modelName": "second",
        "modelUrl": str(many.root / "b2"),
    }
    for name in ("first", "second", "third"):
        with caplog.at_level("INFO"):
            status, body = many.invoke(name, SIMPLE_JSON, X_Amzn_SageMaker_Target_Model=f"{name}.tar.gz")
        assert status == 200 and json.loads(body)["model_name"] == name
        check_json(body)
        assert f"Invoking SageMaker TargetModel: {name}.tar.gz" in caplog.messages
    assert many.unload("first") == 200
    assert many.unload("first") == 404
    assert get(f"{many.url}/models/first")[0] == 404
    assert many.invoke("first", SIMPLE_JSON)[0] == 404
    check_json(many.invoke("second", SIMPLE_JSON)[1])
    assert many.load("first", "a1") == 200, "it comes back"
    assert [many.unload(name) for name in ("first", "second", "third")] == [200, 200, 200]
    assert many.names() == []


def test_an_ensemble_brings_and_takes_its_parts(many: Endpoint) -> None:
    assert many.load("reader", "d4") == 200
    assert many.names() == ["reader"]
    assert many.invoke("digits", b"{}")[0] == 404, "parts are no models of SageMaker's"
    assert many.unload("reader") == 200
    assert many.load("reader", "d4") == 200 and many.unload("reader") == 200


@pytest.mark.parametrize("entry", ["simple/1", "simple/1/model.onnx", "simple/config.pbtxt"])
@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("another archive's", "a link that leads out of it"),
        ("a path above", "a link that leads out of it"),
        ("a pipe", "neither a file nor a directory"),
        ("its own", ""),
    ],
)
def test_links_in_an_archive_may_not_lead_out_of_it(
    tmp_path: Path, many: Endpoint, entry: str, kind: str, problem: str
) -> None:
    """They could show another tenant's files; a pipe would hold up its reader for ever."""
    archive = many.root / tmp_path.name
    model = copy_example(archive / "model", "simple").parent
    moved = archive / "moved" if kind == "a path above" else model / "simple" / ".moved"
    (model / entry).rename(moved)
    if kind == "a pipe":
        os.mkfifo(model / entry)
    else:
        target = many.root / "a1" / "model" / entry if kind == "another archive's" else moved
        (model / entry).symlink_to(os.path.relpath(target, (model / entry).parent))
    body = json.dumps({"model_name": "linked", "url": str(model)}).encode()
    status, _, answer = post(f"{many.url}/models", body)
    if problem:
        assert (status, f"'{entry}' is {problem}" in json.loads(answer)["error"]) == (400, True), answer
    else:
        assert status == 200, answer
        assert many.unload("linked") == 200
    assert many.names() == []


@pytest.mark.parametrize(
    "archive", ["e5", "f6", "g7", "h8", "none", "../../../etc", "a\0b", "a1/../../../../etc"]
)
def test_archives_that_can_not_be_served(many: Endpoint, archive: str) -> None:
    assert many.load("bad", archive) == 400
    assert many.names() == []


def test_a_client_can_not_have_models_evicted(many: Endpoint) -> None:
    """Its words come back in errors, and 507 has SageMaker unload other models."""
    assert many.load("first", "a1") == 200
    assert many.invoke("first", SIMPLE_JSON.replace(b"INPUT1", b"out of memory"))[0] == 400
    assert many.unload("first") == 200
    assert many.load("oom", "none") == 400
    assert many.load("any", "oom") == 400


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "failed to parse the request JSON buffer: The document is empty. at 0"),
        (b"{", "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
        (b'{"url": Nope}', "failed to parse the request JSON buffer: Invalid value. at 9"),
        (b"{}", "the load request has no text 'model_name'"),
        (b"[1]", "the load request has no text 'model_name'"),
        (b'{"model_name": "x"}', "the load request has no text 'url'"),
        (b'{"model_name": "x", "url": 7}', "the load request has no text 'url'"),
        (
            b'{"model_name": "", "url": "/opt/ml/models/a/model"}',
            "Invalid \"model_name\" '': expected a name without slashes",
        ),
        (b'{"model_name": "a/b", "url": "/opt/ml/models/a/model"}', "Invalid \"model_name\" 'a/b'"),
        (
            b'{"model_name": "x", "url": "/dev/model"}',
            "Invalid \"url\" '/dev/model': expected a path of the form",
        ),
        (b'{"model_name": "x", "url": "/proc/self/model"}', "Invalid \"url\" '/proc/self/model'"),
        (b'{"model_name": "x", "url": "opt/ml/models/a/model"}', "Invalid \"url\" 'opt/ml/models/a/model'"),
    ],
)
def test_malformed_loads(many: Endpoint, body: bytes, text: str) -> None:
    status, _, answer = post(f"{many.url}/models", body)
    assert status == 400 and text in json.loads(answer)["error"], answer
    assert many.names() == []


def test_the_list_has_pages(many: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conch_platforms.sagemaker_models.PAGE_SIZE", 2)
    for name, archive in (("a", "a1"), ("b", "b2"), ("c", "c3")):
        assert many.load(name, archive) == 200
    first = json.loads(get(f"{many.url}/models")[2])
    assert [each["modelName"] for each in first["models"]] == ["a", "b"] and first["nextPageToken"] == "b"
    assert many.names() == ["a", "b", "c"]
    assert [many.unload(name) for name in ("a", "b", "c")] == [200, 200, 200]


SESSIONS = """
    sequence_batching {
        max_sequence_idle_microseconds: 600000000
        control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
    }
"""
COUNTER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy().ravel()[0]
            self.count = 1 if start else self.count + 1
            out = pb_utils.Tensor("OUT", np.full((1, 1), self.count, np.int32))
            responses.append(pb_utils.InferenceResponse([out]))
        return responses
"""


def test_sessions_are_sequences(tmp_path: Path) -> None:
    tensors = 'input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } '
    tensors += 'output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }'
    config = f'backend: "python" max_batch_size: 1 {tensors} {SESSIONS}'
    (tmp_path / "counter" / "1").mkdir(parents=True)
    (tmp_path / "counter" / "config.pbtxt").write_text(config)
    (tmp_path / "counter" / "1" / "model.py").write_text(COUNTER)

    def request(**parameters: bool) -> bytes:
        tensor = {"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [0]}
        return json.dumps({"inputs": [tensor], "parameters": parameters}).encode()

    with sagemaker(tmp_path, flags=["--sagemaker-default-model=counter"]) as base:
        url = f"{base}/invocations"

        def call(session: str, body: bytes) -> tuple[int, Any, bytes]:
            return post(url, body, X_Amzn_SageMaker_Session_Id=session)

        def count(session: str, **parameters: bool) -> int:
            status, _, body = call(session, request(**parameters))
            assert status == 200, body
            return int(json.loads(body)["outputs"][0]["data"][0])

        # Opened by a message of its own, as AWS' clients do.
        status, headers, body = call("NEW_SESSION", b'{"requestType": "NEW_SESSION"}')
        assert (status, body) == (200, b"")
        opened = headers["x-amzn-sagemaker-new-session-id"]
        assert re.fullmatch(r"[0-9a-f-]{36}; Expires=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", opened)
        first = opened.partition(";")[0]
        assert [count(first), count(first)] == [1, 2]
        # Closed by the end of its sequence.
        status, headers, _ = call(first, request(sequence_end=True))
        assert (status, headers["x-amzn-sagemaker-closed-session-id"]) == (200, first)
        # Opened by an inference.
        status, headers, body = call("NEW_SESSION", request())
        second = headers["x-amzn-sagemaker-new-session-id"].partition(";")[0]
        assert status == 200 and second != first
        assert count(second) == 2
        # Closed by a message of its own.
        status, headers, _ = call(second, b'{"requestType": "CLOSE"}')
        assert (status, headers["x-amzn-sagemaker-closed-session-id"]) == (200, second)
        for session in (first, second, "never-opened"):
            status, _, body = call(session, request())
            assert status == 400 and f"there is no session '{session}'".encode() in body
        # The model has one place for a sequence, which each of them has left.
        status, headers, _ = call("NEW_SESSION", request())
        third = headers["x-amzn-sagemaker-new-session-id"].partition(";")[0]
        assert status == 200 and call(third, b'{"requestType": "CLOSE"}')[0] == 200
        # A request that fails opens none.
        status, headers, _ = call("NEW_SESSION", b'{"inputs": []}')
        assert status == 400 and "x-amzn-sagemaker-new-session-id" not in headers


@pytest.mark.process
def test_eviction_under_load_and_another_try(tmp_path: Path) -> None:
    """SageMaker's answer to 507: it unloads the model used longest ago, and loads again."""
    root, places = tmp_path / "models", tmp_path / "places"
    places.mkdir()
    for number in range(3):
        write_memory_model(root / f"h{number}" / "model", "net", places, most=2)
    environment = {
        "SAGEMAKER_MULTI_MODEL": "true",
        "SAGEMAKER_BIND_TO_PORT": str(free_port()),
    }
    flags = [f"--sagemaker-models-root={root}", "--backend-config=python,placement=worker"]
    with started(*flags, environment={**environment, **NO_PORTS}) as server:
        server.wait_ready()
        assert re.search(r"this is SageMaker, as SAGEMAKER_\w+ tells", server.errors)
        assert "| gRPC" not in server.output and "| HTTP" not in server.output
        many = Endpoint(f"http://127.0.0.1:{environment['SAGEMAKER_BIND_TO_PORT']}", root)
        assert [many.load(f"m{number}", f"h{number}") for number in range(3)] == [200, 200, 507]
        assert many.names() == ["m0", "m1"]
        statuses: set[int] = set()
        ended = threading.Event()

        def invoke() -> None:
            while not ended.is_set():
                statuses.add(many.invoke("m1", memory_request())[0])
                statuses.add(many.invoke("m0", memory_request())[0])

        clients = [threading.Thread(target=invoke) for _ in range(4)]
        for client in clients:
            client.start()
        try:
            assert many.unload("m0") == 200
            assert len(list(places.iterdir())) == 1, "it has left memory when the call returns"
            assert many.load("m2", "h2") == 200
        finally:
            ended.set()
            for client in clients:
                client.join()
        assert statuses <= {200, 404}, "requests in flight are answered, later ones find no model"
        assert many.names() == ["m1", "m2"]
        status, body = many.invoke("m1", memory_request(-1))
        assert status == 507 and b"no room for a batch" in body, "out of memory while it runs"
        assert server.stop() == 0


@pytest.mark.process
def test_the_container_of_one_model(tmp_path: Path) -> None:
    copy_example(tmp_path, "simple")
    port, metrics = free_port(), free_port()
    environment: dict[str, str | None] = {
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "SAGEMAKER_SAFE_PORT_RANGE": f"{metrics}-{metrics + 9}",
        "SAGEMAKER_TRITON_ALLOW_METRICS": "true",
        "SAGEMAKER_TRITON_LOG_VERBOSE": "true",
        "SAGEMAKER_TRITON_SHM_DEFAULT_BYTE_SIZE": "1",
        "SAGEMAKER_TRITON_PING_MOOD": "x",
        "SAGEMAKER_TRITON_ADDITIONAL_ARGS": "--id 'of sagemaker'",
        **NO_PORTS,
        "CONCH_METRICS_PORT": str(metrics),
    }
    with started(f"--model-repository={tmp_path}", environment=environment) as server:
        server.wait_ready()
        url = f"http://127.0.0.1:{port}"
        assert get(f"{url}/ping")[0] == 200
        check_json(post(f"{url}/invocations", SIMPLE_JSON)[2])
        assert get(f"http://127.0.0.1:{metrics}/metrics")[0] == 200
        assert "have no effect here: SAGEMAKER_TRITON_SHM_DEFAULT_BYTE_SIZE" in server.errors
        assert "SAGEMAKER_TRITON_PING_MOOD is unknown and has no effect; did you mean" in server.errors
        assert server.stop() == 0

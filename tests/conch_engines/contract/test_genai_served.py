"""A random language model in a worker: texts over gRPC and HTTP, metrics, and a client that goes."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from tests.support import warm_grpc
from tests.support.environments import make_venv, site_of_numpy
from tests.support.genai_models import genai_library, random_model
from tests.support.server_fixtures import server_fixture
from tests.support.servers import WAIT_S, AnyServer, RawClient, client_of, eventually
from tests.support.text_models import CHAT, conversation, deltas
from tritonclient.grpc import service_pb2

import conch.testing
from conch_llm.deltas import decode_deltas

genai_library()
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("genai")
    random_model(root)
    return root


grpc_is_warm = warm_grpc.grpc_is_warm
server = server_fixture()


def request(text: str, **parameters: str) -> service_pb2.ModelInferRequest:
    """A request with one text."""
    raw = len(text.encode()).to_bytes(4, "little") + text.encode()
    message = service_pb2.ModelInferRequest(model_name="tiny", raw_input_contents=[raw])
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    for key, value in parameters.items():
        message.parameters[key].string_param = value
    return message


def running(server: AnyServer) -> bool:
    text = httpx.get(server.metrics_url, timeout=WAIT_S).text
    lines = [line for line in text.splitlines() if line.startswith("openvino_genai:num_requests_running{")]
    return bool(lines) and float(lines[0].split()[-1]) > 0


def test_an_environment_of_its_own(tmp_path: Path) -> None:
    """It has the engine, numpy and jinja2, neither conch nor what else conch needs."""
    site = make_venv(tmp_path / "venv", numpy=False)
    engine = ("openvino", "openvino_genai", "openvino_tokenizers")
    for name in ("numpy", "numpy.libs", "jinja2", "markupsafe", *engine):
        (site / name).symlink_to(Path(site_of_numpy(), name))
    directory = random_model(tmp_path, EXECUTION_ENV_PATH=f"{tmp_path}/venv")
    with conch.testing.load(directory, placement="worker") as model:
        found = deltas(model, CHAT, conversation("hello", max_tokens=3, ignore_eos=True))
    assert sum(delta.tokens for delta in found) == 3


def test_text_over_grpc(server: AnyServer) -> None:
    with client_of(server) as client:
        parameters = client.get_model_config("tiny").config.parameters
        assert parameters["CONCH_LLM"].string_value == "chat,complete,tokenize"
    with closing(RawClient(server.address)) as raw:
        outputs = [each.infer_response for each in raw.stream([request("hello")])]
    names = [output.name for output in outputs[0].outputs]
    assert names == ["text_output", "finish_reason", "num_input_tokens", "num_output_tokens"]


def test_text_over_http(server: AnyServer) -> None:
    url = f"http://{server.http_address}/v2/models/tiny/generate"
    sampling = json.dumps({"max_tokens": 6, "ignore_eos": True})
    found = httpx.post(url, json={"text_input": "hello", "sampling_parameters": sampling}, timeout=WAIT_S)
    assert found.json()["num_output_tokens"] == 6 and found.json()["finish_reason"] == "length"


def test_a_client_that_goes_frees_its_request(server: AnyServer) -> None:
    body = conversation(stream=True, ignore_eos=True)
    with closing(RawClient(server.address)) as raw:
        call = raw.stream([request(json.dumps(body), openai_route=CHAT)])
        first = next(call)
        assert not first.error_message and decode_deltas(
            bytes(first.infer_response.raw_output_contents[0][4:])
        )
        eventually(lambda: running(server), "the request runs")
        call.cancel()
        eventually(lambda: not running(server), "the request is freed")

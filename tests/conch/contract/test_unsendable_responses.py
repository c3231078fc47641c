"""Responses that no message can be made of: only their own request fails, with an error that says why."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.grpc_transports import each_transport
from tests.support.server_fixtures import server_fixture
from tests.support.servers import WAIT_S, AnyServer, RawClient, client_of, write_model
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

TENSORS = """
    input { name: "IN" data_type: TYPE_STRING dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""
START = """
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class Silent:
    def __str__(self):
        raise ValueError("no text")

ELEMENTS = {"half": "\\ud800", "silent": Silent()}
PARAMETERS = {
    "text": {"a": "\\ud800"},
    "key": {"\\ud800": 1},
    "wide": {"a": 2**64},
    "wider": {"a": 10**5000},
}

def response_to(request):
    array = request.inputs()[0].as_numpy()
    order = array.ravel()[0].decode()
    if order in ELEMENTS:
        array = np.full(array.shape, None, object)
        array.ravel()[0] = ELEMENTS[order]
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)], parameters=PARAMETERS.get(order))

class TritonPythonModel:
"""
TOGETHER = """
    def execute(self, requests):
        return [response_to(request) for request in requests]
"""
SENDER = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(response_to(request))
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(["more"], object))]))
            sender.send(flags=FINAL)
"""
BATCHES = """
    max_batch_size: 4
    dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 600000000 }
"""

HALF = "'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed"
TEXTS = {
    "half": f"output 'OUT' of model 'MODEL' can't be sent: {HALF}",
    "silent": "output 'OUT' of model 'MODEL' can't be sent: no text",
    "text": f"response parameter 'a' of model 'MODEL' can't be sent: {HALF}",
    "key": f"response parameter '\\ud800' of model 'MODEL' can't be sent: {HALF}",
    "wide": f"response parameter 'a' of model 'MODEL' must fit into 64 bits, {2**64} does not",
    "wider": "response parameter 'a' of model 'MODEL' must fit into 64 bits, a number of 16610 bits does not",
}

grpc_transport = each_transport()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("unsendable")
    config = 'backend: "python"' + TENSORS
    write_model(repository, "together", config + BATCHES, {"model.py": START + TOGETHER})
    write_model(repository, "one", config, {"model.py": START + TOGETHER})
    decoupled = config + "model_transaction_policy { decoupled: true }"
    write_model(repository, "sender", decoupled, {"model.py": START + SENDER})
    return repository


server = server_fixture(placed=True)


def inputs(text: str, shape: tuple[int, ...] = (1,)) -> list[triton.InferInput]:
    made = triton.InferInput("IN", list(shape), "BYTES")
    made.set_data_from_numpy(np.full(shape, text.encode(), object))
    return [made]


def text_of(name: str, model: str) -> str:
    return TEXTS[name].replace("MODEL", model)


@pytest.mark.parametrize("name", TEXTS)
def test_the_others_of_its_batch_are_answered(server: AnyServer, name: str) -> None:
    said: dict[str, Any] = {}

    def ask(order: str) -> None:
        with client_of(server) as client:
            try:
                result = client.infer("together", inputs(order, (1, 1)), client_timeout=WAIT_S)
                said[order] = result.as_numpy("OUT").tolist()
            except InferenceServerException as error:
                said[order] = error.status(), error.message()

    threads = [threading.Thread(target=ask, args=(order,)) for order in ("x", name, "y")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    failed = said.pop(name)
    assert said == {"x": [[b"x"]], "y": [[b"y"]]}
    assert failed == ("StatusCode.INTERNAL", text_of(name, "together"))


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("way", ["infer", "binary", "generate"])
def test_http(server: AnyServer, name: str, way: str) -> None:
    base = f"http://{server.http_address}/v2/models/one/"
    if way == "generate":
        answer = httpx.post(base + "generate", json={"IN": name}, timeout=WAIT_S)
    else:
        body = {
            "inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": [name]}],
            "parameters": {"binary_data_output": way == "binary"},
        }
        answer = httpx.post(base + "infer", json=body, timeout=WAIT_S)
    assert (answer.status_code, answer.json()) == (500, {"error": text_of(name, "one")})


@pytest.mark.parametrize("name", TEXTS)
def test_it_ends_a_stream_of_responses(server: AnyServer, name: str) -> None:
    """Also where the model goes on to send others."""
    requests = []
    for order in (name, "fine"):
        request = service_pb2.ModelInferRequest(model_name="sender", id=order)
        request.inputs.add(name="IN", datatype="BYTES", shape=[1])
        request.raw_input_contents.append(len(order).to_bytes(4, "little") + order.encode())
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        requests.append(request)
    with closing(RawClient(server.address)) as raw:
        call = raw.stream(requests)
        answers = list(call)
    failed = [answer for answer in answers if answer.infer_response.id != "fine"]
    assert [answer.error_message for answer in failed] == [text_of(name, "sender")]
    fine = [answer.infer_response.raw_output_contents for answer in answers if answer not in failed]
    assert [len(contents) for contents in fine] == [1, 1, 0]


def test_it_ends_the_events_of_generate_stream(server: AnyServer) -> None:
    url = f"http://{server.http_address}/v2/models/sender/generate_stream"
    answer = httpx.post(url, json={"IN": "half"}, timeout=WAIT_S)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert events == [{"error": text_of("half", "sender")}]

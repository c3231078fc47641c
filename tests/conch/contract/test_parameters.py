"""Parts of requests and responses beside their tensors: parameters, timeout, priority, classes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.support.contract_server import CASTER
from tests.support.grpc_transports import each_transport
from tests.support.servers import RawClient, serving, write_model
from tritonclient.grpc import service_pb2

from conch.core.tensor import NUMPY_DTYPES

TELLER = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            seen = [request.parameters(), request.timeout(), request.request_id()]
            responses.append(
                pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([json.dumps(seen)], np.object_))])
            )
        return responses
"""
TELLER_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
    output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""
LABELLED_TYPES = {"FP32": "FP32", "INT8": "INT8", "FP64": "FP64", "UINT64": "UINT64", "BOOL": "BOOL",
                  "FP16": "FP16", "STRING": "BYTES"}  # fmt: skip
LABELLED_CONFIG = 'backend: "python"\nmax_batch_size: 4\n' + "".join(
    f'input {{ name: "{kind}" data_type: TYPE_{kind} dims: [ -1 ] optional: true }}\n'
    f'output {{ name: "O{kind}" data_type: TYPE_{kind} dims: [ -1 ] label_filename: "labels.txt" }}\n'
    for kind in LABELLED_TYPES
)
LABELS = "zero\n\ntwo\n"
ANSWERING = """
import json
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            orders = json.loads(request.parameters())
            answer = eval(orders["answer"])
            responses.append(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())], parameters=answer
                )
            )
        return responses
"""
ANSWERING_CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
    output { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }
"""
Ask = Callable[[Any], Any]

grpc_transport = each_transport()


def write_models(repository: Path) -> None:
    """The models that answer with their parameters, and one with labels."""
    write_model(repository, "teller", TELLER_CONFIG, {"model.py": TELLER})
    directory = write_model(repository, "labelled", LABELLED_CONFIG, {"model.py": CASTER})
    (directory / "labels.txt").write_text(LABELS)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory, placement: str, grpc_transport: str) -> Iterator[RawClient]:
    repository = tmp_path_factory.mktemp("parameters")
    write_models(repository)
    write_model(repository, "answering", ANSWERING_CONFIG, {"model.py": ANSWERING})
    with (
        serving(repository, flags=["--disable-auto-complete-config", placement]) as server,
        closing(RawClient(server.address)) as raw,
    ):
        assert raw("ServerLive", service_pb2.ServerLiveRequest()).live
        yield raw


@pytest.fixture(params=["unary", "stream"])
def ask(raw: RawClient, request: pytest.FixtureRequest) -> Ask:
    """Sends a request by either way; gives the response, or raises its error as text."""

    def by_stream(message: Any) -> Any:
        (answer,) = raw.stream([message])
        if answer.error_message:
            raise ValueError(answer.error_message)
        assert answer.infer_response.parameters.pop("triton_final_response").bool_param
        return answer.infer_response

    def by_call(message: Any) -> Any:
        try:
            return raw.infer(message)
        except grpc.RpcError as error:
            raise ValueError(error.details()) from None

    return by_call if request.param == "unary" else by_stream


def request_with(model: str = "teller", **parameters: Any) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[b"\0" * 4])
    request.inputs.add(name="IN", datatype="INT32", shape=[1])
    for key, value in parameters.items():
        kind, content = value if isinstance(value, tuple) else (KINDS[type(value)], value)
        setattr(request.parameters[key], kind, content)
    return request


KINDS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
SEEN: dict[str, tuple[dict[str, Any], str, int]] = {
    "nothing": ({}, "{}", 0),
    "an integer": ({"a": -1}, '{"a":-1}', 0),
    "a bool": ({"a": True}, '{"a":true}', 0),
    "a text": ({"a": 'ä"\n'}, '{"a":"ä\\"\\n"}', 0),
    "a float": ({"a": 1.5}, '{"a":1.5}', 0),
    "a timeout": ({"timeout": 5}, "{}", 5),
    "a large timeout": ({"timeout": 2**62}, "{}", 2**62),
    "a timeout below zero": ({"timeout": -5}, "{}", 2**64 - 5),
    "a priority": ({"priority": 3}, "{}", 0),
    "an unsigned priority": ({"priority": ("uint64_param", 3)}, "{}", 0),
    "the switch for empty final responses": ({"triton_enable_empty_final_response": True}, "{}", 0),
    "keys of the other protocol": ({"headers": "x"}, '{"headers":"x"}', 0),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "priority below zero": ({"priority": -1}, "invalid value for 'priority', expected value >= 0."),
    "priority as text": (
        {"priority": "1"},
        "invalid value type for 'priority' parameter, expected int64_param or uint64_param.",
    ),
    "timeout unsigned": (
        {"timeout": ("uint64_param", 1)},
        "invalid value type for 'timeout' parameter, expected int64_param.",
    ),
    "custom unsigned": (
        {"a": ("uint64_param", 1)},
        "invalid value type for 'a' parameter, expected int64_param, bool_param, or string_param.",
    ),
    "reserved": (
        {"triton_x": 1},
        "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
        "starting with 'triton_' are allowed: triton_enable_empty_final_response",
    ),
    "switch as number": (
        {"triton_enable_empty_final_response": 1},
        "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param.",
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_a_model_sees(ask: Ask, name: str) -> None:
    parameters, text, timeout = SEEN[name]
    response = ask(request_with(**parameters))
    assert json.loads(response.raw_output_contents[0][4:]) == [text, timeout, ""]
    assert not response.parameters, "nothing of the request is echoed"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(ask: Ask, name: str) -> None:
    parameters, text = REFUSED[name]
    with pytest.raises(ValueError) as raised:
        ask(request_with(**parameters))
    assert str(raised.value) == text


def test_response_parameters(ask: Ask) -> None:
    response = ask(request_with("answering", answer='{"i": -3, "b": False, "s": "ä", "e": ""}'))
    values = {key: value.WhichOneof("parameter_choice") for key, value in response.parameters.items()}
    assert values == {"i": "int64_param", "b": "bool_param", "s": "string_param", "e": "string_param"}
    assert (response.parameters["i"].int64_param, response.parameters["s"].string_param) == (-3, "ä")
    for nothing in ("{}", "None"):
        assert not ask(request_with("answering", answer=nothing)).parameters


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("{1: 2}", "Expect parameters keys to have type str, found type <class 'int'>"),
        ("{'a': 1.5}", "Expect parameters values to have type bool/int/str, found type <class 'float'>"),
        (
            "{'a': 2**63}",
            "response parameter 'a' of model 'answering' must fit into 64 bits, 9223372036854775808 does not",
        ),
    ],
)
def test_response_parameters_that_cannot_be_sent(ask: Ask, answer: str, text: str) -> None:
    with pytest.raises(ValueError) as raised:
        ask(request_with("answering", answer=answer))
    assert text in str(raised.value)


def classes(kind: str, values: Any, count: int) -> Any:
    """A request for the classes of one output."""
    array = np.array(values)
    request = service_pb2.ModelInferRequest(model_name="labelled")
    request.inputs.add(name=kind, datatype=LABELLED_TYPES[kind], shape=array.shape)
    if kind == "STRING":
        data = b"".join(len(text).to_bytes(4, "little") + text.encode() for text in array.ravel())
    else:
        data = array.astype(NUMPY_DTYPES[kind]).tobytes()
    request.raw_input_contents.append(data)
    request.outputs.add(name=f"O{kind}").parameters["classification"].int64_param = count
    return request


NO_CLASSES = "class result not available for output due to unsupported type '{}'"
CLASSES: dict[str, tuple[str, Any, int, list[str] | str]] = {
    "the highest": ("FP32", [[0.5, 3, 1]], 1, ["3.000000:1"]),
    "with labels": ("FP32", [[0.5, 3, 1, 9]], 4,
                    ["9.000000:3", "3.000000:1", "1.000000:2:two", "0.500000:0:zero"]),
    "more than there are": ("INT8", [[-1, 5]], 9, ["5:1", "-1:0:zero"]),
    "two rows": ("INT8", [[1, 2], [4, 3]], 1, ["2:1", "4:0:zero"]),
    "ties": ("FP64", [[1, 1, 0]], 2, ["1.000000:0:zero", "1.000000:1"]),
    "large numbers": ("UINT64", [[2**63]], 1, [f"{2**63}:0:zero"]),
    "of none": ("FP32", [[1]], 0, "invalid value for 'classification' parameter, expected >= 0"),
    "below zero": ("FP32", [[1]], -1, "invalid value for 'classification' parameter, expected >= 0"),
    "of strings": ("STRING", [["a"]], 1, NO_CLASSES.format("BYTES")),
    "of booleans": ("BOOL", [[1]], 1, NO_CLASSES.format("BOOL")),
    "of halves": ("FP16", [[1]], 1, NO_CLASSES.format("FP16")),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_classes(ask: Ask, name: str) -> None:
    kind, values, count, expected = CLASSES[name]
    if isinstance(expected, str):
        with pytest.raises(ValueError) as raised:
            ask(classes(kind, values, count))
        assert str(raised.value) == expected
        return
    response = ask(classes(kind, values, count))
    (output,) = response.outputs
    rows = len(values)
    assert (output.datatype, list(output.shape)) == ("BYTES", [rows, len(expected) // rows])
    data = response.raw_output_contents[0]
    texts = []
    while data:
        size = int.from_bytes(data[:4], "little")
        texts.append(data[4 : 4 + size].decode())
        data = data[4 + size :]
    assert texts == expected

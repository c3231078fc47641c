"""The same requests to a real Triton and to conch: answers, codes and texts must be the same.

Both serve the same Python models. What is known to differ is listed in `KNOWN`, with the reason.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conch.contract.test_bad_input import CASES
from tests.conch.contract.test_decoupled import steps
from tests.conch.contract.test_parameters import (
    CLASSES,
    REFUSED,
    SEEN,
    classes,
    request_with,
)
from tests.conch.contract.test_parameters import (
    write_models as write_parameter_models,
)
from tests.support.cases.repository_cases import CALLS
from tests.support.contract_server import CASTER, CASTER_CONFIG, REPEATER, REPEATER_CONFIG
from tests.support.loading import index
from tests.support.peers import (
    NEEDS_TRITON,
    TRITON,
    Both,
    Growth,
    compare,
    counts,
    outcomes,
    serving_both,
    streamed,
)
from tests.support.servers import (
    copy_example,
    eventually,
    simple_request,
    write_model,
    write_probe,
    write_steps,
)
from tritonclient.grpc import service_pb2

pytestmark = NEEDS_TRITON

KNOWN = {
    "unknown datatype": "conch repeats the datatype it was given, Triton says '<invalid>'",
    "batches of different sizes": "Triton looks at inputs in the order of a hash table and names another one",
    "extra input": "Triton 2.51 counts inputs first and prints a broken list; later ones name the input",
    "empty batch": "Triton 2.51 takes a batch of 0 for one of 1 and misses data; later ones accept it",
    "half a string": "the text is that of later Tritons, which count such a string as missing",
    "decoupled": "conch answers a unary call to a decoupled model that has exactly one response",
}
CACHE = "--cache-config=local,size=10000000"
ADD = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            one, two = (pb_utils.get_input_tensor_by_name(request, f"INPUT{n}").as_numpy() for n in (0, 1))
            outputs = [pb_utils.Tensor("OUTPUT0", one + two), pb_utils.Tensor("OUTPUT1", one - two)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
UPPER_CONFIG = """
    backend: "python"
    max_batch_size: 8
    input { name: "text" data_type: TYPE_STRING dims: [ -1 ] }
    output { name: "upper" data_type: TYPE_STRING dims: [ -1 ] }
    output { name: "length" data_type: TYPE_INT32 dims: [ -1 ] }
"""


def write_models(repository: Path) -> None:
    """Models for both: `simple` as a Python model, among others."""
    simple = copy_example(repository, "simple")
    shutil.rmtree(simple / "1")
    config = (simple / "config.pbtxt").read_text().replace("onnxruntime", "python")
    write_model(repository, "simple", config, {"model.py": ADD})
    strings = copy_example(repository, "strings")
    (strings / "config.pbtxt").write_text(UPPER_CONFIG)
    write_model(repository, "repeater", REPEATER_CONFIG, {"model.py": REPEATER})
    write_model(repository, "caster", CASTER_CONFIG, {"model.py": CASTER})
    write_probe(repository)
    write_probe(repository, "cached", "dynamic_batching { } response_cache { enable: true }")
    write_parameter_models(repository)
    directory = write_steps(repository)
    # Triton 2.51 has no parameters for responses yet.
    model = (directory / "1" / "model.py").read_text()
    model = re.sub(r", parameters=\{.*?\}", "", model)
    (directory / "1" / "model.py").write_text(model)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Both servers with the same models."""
    repository = tmp_path_factory.mktemp("both")
    write_models(repository)
    with serving_both(repository, f"--cache-directory={TRITON / 'caches'}", CACHE) as both:
        yield both


def infer_request(model: str, inputs: dict[str, Any], **more: Any) -> Any:
    """A request with raw contents."""
    request = service_pb2.ModelInferRequest(model_name=model, **more)
    for name, (datatype, shape, data) in inputs.items():
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(data)
    return request


@pytest.mark.parametrize("name", CASES)
def test_bad_requests(both: Both, name: str) -> None:
    changes, _, _ = CASES[name]
    request = simple_request(id="r", **changes)
    if name in KNOWN:
        theirs, ours = outcomes(both, request)
        assert ours[0] == theirs[0], "the code should be the same all the same"
        assert ours != theirs, f"'{name}' is the same now: take it out of KNOWN"
    else:
        compare(both, request)


GOOD: dict[str, Any] = {
    "plain": simple_request(),
    "with an id": simple_request(id="möwe"),
    "version": simple_request(model_version="1"),
    "one output": simple_request(
        outputs=[service_pb2.ModelInferRequest.InferRequestedOutputTensor(name="OUTPUT1")]
    ),
    "typed contents": simple_request(
        raw_input_contents=[],
        inputs=[
            service_pb2.ModelInferRequest.InferInputTensor(
                name=name,
                datatype="INT32",
                shape=[2, 16],
                contents=service_pb2.InferTensorContents(int_contents=range(32)),
            )
            for name in ("INPUT0", "INPUT1")
        ],
    ),
    "classification": simple_request(
        outputs=[
            service_pb2.ModelInferRequest.InferRequestedOutputTensor(
                name="OUTPUT0",
                parameters={"classification": service_pb2.InferParameter(int64_param=3)},
            )
        ]
    ),
    "surplus contents": simple_request(raw_input_contents=[b"\1\0\0\0" * 16] * 3),
    "empty batch": infer_request("probe", {"IN": ("FP32", [0, 4], b"")}),
    "empty tensor": infer_request("caster", {"FP32": ("FP32", [0], b"")}),
    "strings": infer_request("strings", {"text": ("BYTES", [1, 2], b"\2\0\0\0\xc3\xa4\0\0\0\0")}),
    "not UTF-8": infer_request("strings", {"text": ("BYTES", [1, 1], b"\1\0\0\0\xff")}, id="x"),
    "half a string": infer_request("strings", {"text": ("BYTES", [1, 1], b"\1\0\0\0")}, id="x"),
    "many types": infer_request(
        "caster",
        {
            "BOOL": ("BOOL", [2], b"\1\0"),
            "FP16": ("FP16", [1], np.float16(1.5).tobytes()),
            "UINT64": ("UINT64", [1], b"\xff" * 8),
            "STRING": ("BYTES", [1], b"\1\0\0\0\xff"),
        },
    ),
    "decoupled": infer_request("repeater", {"IN": ("INT32", [1], b"\1\0\0\0")}),
}
for _order, _value in (("error", "UNSUPPORTED"), ("error", "CANCELLED"), ("do", "too few"), ("do", "raise"),
                       ("do", "exit"), ("do", "no response")):  # fmt: skip
    GOOD[f"{_order} {_value}"] = infer_request(
        "probe",
        {"IN": ("FP32", [1, 1], b"\0" * 4)},
        parameters={_order: service_pb2.InferParameter(string_param=_value)},
    )


@pytest.mark.parametrize("name", GOOD)
def test_requests(both: Both, name: str) -> None:
    if name in KNOWN:
        theirs, ours = outcomes(both, GOOD[name])
        assert ours != theirs, f"'{name}' is the same now: take it out of KNOWN"
    else:
        compare(both, GOOD[name])


@pytest.mark.parametrize("names", [(), ("final",), ("ok", "ok", "final"), ("ok", "okfinal")])
def test_unary_calls_to_a_decoupled_model(both: Both, names: tuple[str, ...]) -> None:
    """The call fails without exactly one response; conch finds out by running the model."""
    compare(both, steps(*(names or ("final",))))


@pytest.mark.parametrize("name", SEEN)
def test_request_parameters(both: Both, name: str) -> None:
    compare(both, request_with(**SEEN[name][0]))


@pytest.mark.parametrize("name", REFUSED)
def test_request_parameters_that_are_refused(both: Both, name: str) -> None:
    compare(both, request_with(**REFUSED[name][0]))


# Triton 2.51 does not survive being asked for the classes of datatypes that have none.
@pytest.mark.parametrize(
    "name", [name for name, case in CLASSES.items() if "unsupported type" not in case[3]]
)
def test_classes(both: Both, name: str) -> None:
    compare(both, classes(*CLASSES[name][:3]))


def all_ended(growth: Growth, requests: int) -> None:
    """Waits until both servers have counted so many requests of the model `steps`."""

    def ended() -> bool:
        return all(each["steps", "success"] + each["steps", "fail"] == requests for each in growth())

    eventually(ended, "all are counted")


def test_statistics_of_decoupled_models(both: Both) -> None:
    growth = Growth(both, "steps")
    for client in both.clients:
        for names in (("ok", "ok", "final"), ("okfinal",), ("final",), ("empty", "final")):
            list(client.stream([steps(*names)]))
    all_ended(growth, 4)
    theirs, ours = growth()
    assert ours == theirs


def test_a_cancelled_generation(both: Both, tmp_path: Path) -> None:
    """Both stop; Triton 2.51 counts the request as a success, conch as a failure, being cancelled."""
    growth = Growth(both, "steps")
    for name, client in zip(("triton", "conch"), both.clients, strict=True):
        stopped = tmp_path / name
        call = client.stream([steps(f"generate:{stopped}", "final")])
        next(call)
        call.cancel()
        eventually(stopped.exists, "the model stops")
    all_ended(growth, 1)
    changes = [[each["steps", key] for key in ("success", "fail", "runs")] for each in growth()]
    assert changes == [[1, 0, 1], [0, 1, 1]]


def test_streams(both: Both) -> None:
    numbers = {"IN": ("INT32", [2], b"\1\0\0\0\2\0\0\0")}
    empty_final = {"triton_enable_empty_final_response": service_pb2.InferParameter(bool_param=True)}
    requests = [
        simple_request(id="a"),
        simple_request(id="b", model_name="nope"),
        simple_request(id="c", raw_input_contents=[b"\0" * 60, b"\0" * 64]),
        GOOD["error UNSUPPORTED"],
        infer_request("repeater", numbers, id="d"),
        infer_request("repeater", numbers, id="e", parameters=empty_final),
        infer_request("repeater", {"IN": ("INT32", [0], b"")}, id="f", parameters=empty_final),
        simple_request(id="g"),
    ]

    for request in requests:
        theirs, ours = streamed(both, request)
        assert ours == theirs, request.id


def test_cached_answers(both: Both) -> None:
    """Counts and answers of a hit, of two requests for what no hit has, and of a bad request."""

    for request_id, shape in (
        ("one", [1, 4]),
        ("two", [1, 4]),
        ("three", [1, 3]),
        ("four", [9, 1]),
        ("five", [1, 4]),
    ):
        data = b"\0\0\x80\x3f" * shape[0] * shape[1]
        compare(both, infer_request("cached", {"IN": ("FP32", shape, data)}, id=request_id))
        theirs, ours = (counts(client, "cached") for client in both.clients)
        assert ours == theirs, request_id


@pytest.mark.parametrize("name", ["simple", "strings", "caster", "repeater", "nope", ""])
def test_metadata_and_config(both: Both, name: str) -> None:
    # Of an unknown model conch's text names the version too, where one was given; Triton's never does.
    for version in ("", "1", "7", "x") if name not in ("nope", "") else ("", "x"):
        compare(both, service_pb2.ModelReadyRequest(name=name, version=version))
        compare(both, service_pb2.ModelMetadataRequest(name=name, version=version))
        compare(both, service_pb2.ModelConfigRequest(name=name, version=version))


@pytest.mark.parametrize("name", CALLS)
def test_calls(both: Both, name: str) -> None:
    compare(both, CALLS[name].message)


def test_server_and_repository(both: Both) -> None:
    theirs, ours = (c.unary(service_pb2.ServerMetadataRequest()) for c in both.clients)
    assert (ours.name, list(ours.extensions)) == (theirs.name, list(theirs.extensions))
    theirs, ours = (index(client) for client in both.clients)
    assert ours == theirs


def test_statistics(both: Both) -> None:
    """Counts after the same requests; times and the moment differ.

    Failures are left out: Triton's Python backend counts executions that failed, and a request answered
    with a TritonError as a success; conch counts both as failures only, as the protocol's text has it.
    """
    growth = Growth(both, "probe")
    for rows in (1, 3, 3):
        compare(both, infer_request("probe", {"IN": ("FP32", [rows, 1], b"\0" * 4 * rows)}))
    theirs, ours = growth()
    assert ours == theirs

"""Triton's test backends: identity, repeat and square, as its clients use them."""

from __future__ import annotations

import queue
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.backend_harness import Harness, tensor_specs
from tests.support.server_fixtures import server_fixture
from tests.support.servers import AnyServer, RawClient, client_of, eventually, tensor
from tests.support.waiting import PATIENCE_S
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from conch.backends import load_backend
from conch.core.errors import ConchError
from conch.core.tensor import NUMPY_DTYPES

TYPES = tuple(NUMPY_DTYPES)
IDENTITY = """
backend: "identity"
max_batch_size: 8
{tensors}
parameters {{ key: "execute_delay_ms" value {{ string_value: "1" }} }}
"""
REPEAT = """
backend: "repeat"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] },
        { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] },
        { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] },
         { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""
SQUARE = """
backend: "square"
max_batch_size: 1
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""
DELAYS_MS = (20, 100)
DELAYS = "".join(
    f'parameters {{ key: "CUSTOM_{kind}_DELAY_NS" value {{ string_value: "{ms}000000" }} }}'
    for kind, ms in zip(("INFER", "OUTPUT"), DELAYS_MS, strict=True)
)
FLAT = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: [ 4 ] } }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
"""
PARTS = """
parameters { key: "CUSTOM_FAIL_COUNT" value { string_value: "2" } }
parameters { key: "CUSTOM_EMPTY_COUNT" value { string_value: "1" } }
parameters { key: "CUSTOM_OUTPUT_DELAY_NS" value { string_value: "a while" } }
"""
SLOW = """
parameters { key: "CUSTOM_OUTPUT_DELAY_NS" value { string_value: "1000000000" } }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    tensors = "".join(
        f'input {{ name: "INPUT{n}" data_type: TYPE_{_config_type(kind)} dims: [ -1 ] optional: true }}'
        f'output {{ name: "OUTPUT{n}" data_type: TYPE_{_config_type(kind)} dims: [ -1 ] }}'
        for n, kind in enumerate(TYPES)
    )
    for name, config in (
        ("same", IDENTITY.format(tensors=tensors)),
        ("repeat", REPEAT),
        ("square", SQUARE),
        ("repeat_one", REPEAT.replace("true", "false")),
        ("flat", FLAT),
        ("parts (1)", SQUARE + PARTS),
        ("delayed", SQUARE + PARTS[: PARTS.index("CUSTOM_OUTPUT") - len('parameters { key: "')] + DELAYS),
        ("slow", SQUARE + SLOW),
    ):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
    return repository


server = server_fixture()


def _config_type(kind: str) -> str:
    return "STRING" if kind == "BYTES" else kind


def stream(server: AnyServer, model: str, inputs: list[Any], count: int) -> list[Any]:
    """So many answers of a stream, errors as they are."""
    answers: queue.Queue[Any] = queue.Queue()
    with client_of(server) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer(model, inputs, enable_empty_final_response=True)
        found = [answers.get(timeout=PATIENCE_S) for _ in range(count)]
        client.stop_stream()
    assert answers.empty()
    return found


def final(answer: Any) -> bool:
    return bool(answer.get_response().parameters["triton_final_response"].bool_param)


def test_identity_of_every_datatype(server: AnyServer) -> None:
    arrays = {
        n: np.array([[b"a", b""]], dtype=object)
        if kind == "BYTES"
        else np.array([[1, 0]], NUMPY_DTYPES[kind])
        for n, kind in enumerate(TYPES)
    }
    inputs = {n: tensor(f"INPUT{n}", arrays[n], TYPES[n]) for n in arrays}
    with client_of(server) as client:
        result = client.infer("same", list(inputs.values()))
        for n, array in arrays.items():
            assert result.as_numpy(f"OUTPUT{n}").tolist() == array.tolist()
        parameters = result.get_response().parameters
        assert parameters["param0"].string_param == "an example string parameter"
        assert (parameters["param1"].int64_param, parameters["param2"].bool_param) == (42, False)
        assert parameters["param3"].double_param == 123.123
        one = client.infer("same", [inputs[3]])
        assert [output.name for output in one.get_response().outputs] == ["OUTPUT3"]
    sizes = sum(array.nbytes for n, array in arrays.items() if TYPES[n] != "BYTES") + 4 + 1 + 4
    with urllib.request.urlopen(server.metrics_url, timeout=PATIENCE_S) as page:
        lines = page.read().decode().splitlines()
    lines = [line for line in lines if line.startswith('input_byte_size_counter{model="same",version="1"}')]
    assert len(lines) == 1
    assert float(lines[0].rpartition(" ")[2]) == sizes + arrays[3].nbytes


def test_repeat(server: AnyServer) -> None:
    values = np.array([4, 2, 9], np.int32)
    begun = time.monotonic()
    inputs = [
        tensor("IN", values, "INT32"),
        tensor("DELAY", np.array([0, 40, 0], np.uint32), "UINT32"),
        tensor("WAIT", np.array([0], np.uint32), "UINT32"),
    ]
    *parts, last = stream(server, "repeat", inputs, 4)
    assert time.monotonic() - begun >= 0.04
    assert [part.as_numpy("OUT").tolist() for part in parts] == [[4], [2], [9]]
    assert [part.as_numpy("IDX").tolist() for part in parts] == [[0], [1], [2]]
    assert final(last) and not last.get_response().outputs
    inputs[0] = tensor("IN", np.zeros(0, np.int32), "INT32")
    (error,) = stream(server, "repeat", inputs, 1)
    assert "expected IN and DELAY shape to match, got [0] and [3]" in str(error)
    inputs[1] = tensor("DELAY", np.zeros(0, np.uint32), "UINT32")
    (only,) = stream(server, "repeat", inputs, 1)
    assert final(only)


def test_a_repeat_that_is_not_decoupled_takes_one_element(server: AnyServer) -> None:
    with client_of(server) as client:
        for values in ([7], [], [1, 2]):
            delays = tensor("DELAY", np.zeros(len(values), np.uint32), "UINT32")
            wait = tensor("WAIT", np.zeros(1, np.uint32), "UINT32")
            inputs = [tensor("IN", np.array(values, np.int32), "INT32"), delays, wait]
            if len(values) == 1:
                assert client.infer("repeat_one", inputs).as_numpy("OUT").tolist() == values
            else:
                with pytest.raises(InferenceServerException, match="expected IN with one element"):
                    client.infer("repeat_one", inputs)


def test_identity_compares_shapes_as_the_model_sees_them(server: AnyServer) -> None:
    with client_of(server) as client:
        result = client.infer("flat", [tensor("INPUT0", np.array([[1, 2], [3, 4]], np.float32), "FP32")])
    assert result.as_numpy("OUTPUT0").tolist() == [1, 2, 3, 4]


def test_the_delays_of_a_square_are_in_its_statistics(server: AnyServer) -> None:
    infer_ns, output_ns = (ms * 10**6 for ms in DELAYS_MS)
    for count in (4, 6):
        assert (
            len(stream(server, "delayed", [tensor("IN", np.array([[count]], np.int32), "INT32")], count))
            == count
        )
    with client_of(server) as client:
        rows = client.get_inference_statistics("delayed").model_stats[0].response_stats
    kinds = {
        index: (row.success.count, row.fail.count, row.empty_response.count, row.compute_infer.count)
        for index, row in sorted(rows.items())
    }
    # Of each request the last response is empty and the two before fail.
    assert list(kinds.values()) == [
        (2, 0, 0, 2),
        (1, 1, 0, 2),
        (1, 1, 0, 2),
        (0, 1, 1, 2),
        (0, 1, 0, 1),
        (0, 0, 1, 1),
    ]
    for row in rows.values():
        assert row.compute_infer.ns >= row.compute_infer.count * infer_ns
        assert row.compute_output.ns >= row.compute_output.count * output_ns


def test_square(server: AnyServer) -> None:
    three = [tensor("IN", np.array([[3]], np.int32), "INT32")]
    *parts, last = stream(server, "square", three, 4)
    assert [part.as_numpy("OUT").tolist() for part in parts] == [[[3]]] * 3
    assert final(last)
    five = [tensor("IN", np.array([[5]], np.int32), "INT32")]
    full, also, failed, again, last = stream(server, "parts (1)", five, 5)
    assert [part.as_numpy("OUT").tolist() for part in (full, also)] == [[[5]]] * 2
    assert all(isinstance(part, InferenceServerException) for part in (failed, again))
    assert not last.get_response().outputs and final(last)


def test_a_cancelled_square_ends(server: AnyServer) -> None:
    def message(model: str) -> Any:
        made = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[(1).to_bytes(4, "little")])
        made.inputs.add(name="IN", datatype="INT32", shape=[1, 1])
        return made

    with closing(RawClient(server.address)) as raw, client_of(server) as client:
        tries = 0

        def cancelled() -> Any:
            """The statistics, once a request was cancelled while its only response was in work."""
            nonlocal tries
            tries += 1
            call = raw.stream([message("slow"), message("square")])
            # The answer to the second request says that the first one is with its model.
            assert next(call).infer_response.model_name == "square"
            call.cancel()

            def ended() -> Any:
                model = client.get_inference_statistics("slow").model_stats[0]
                ends = model.inference_stats.success.count + model.inference_stats.fail.count
                return ends == tries and model

            model = eventually(ended, "the request ends")
            return "1" in model.response_stats and model

        model = eventually(cancelled, "a request is cancelled while its response is in work")
        rows = model.response_stats
        # The response in work is counted, the next one as cancelled; before the work the first one is, unless
        # its request has not reached the model.
        at_once = model.inference_stats.fail.count - 1
        assert (rows["0"].success.count, rows["1"].cancel.count) == (tries - at_once, 1)
        assert rows["0"].cancel.count <= at_once


@pytest.mark.parametrize(
    ("backend", "inputs", "outputs", "text"),
    [
        (
            "identity",
            {"IN": "FP32"},
            {"OUTPUT0": "FP32"},
            "input name to follow INPUT<index> pattern",
        ),
        ("identity", {"INPUT0": "FP32"}, {}, "must have equal input/output pairs"),
        ("identity", {"INPUT0": "FP32"}, {"OUTPUT1": "FP32"}, "expected input and output indices to match"),
        (
            "identity",
            {"INPUT0": "FP32"},
            {"OUTPUT0": "FP64"},
            "to match, got TYPE_FP32 and TYPE_FP64",
        ),
        (
            "repeat",
            {"x": "INT32", "y": "UINT32", "z": "UINT32"},
            {},
            "tensor name to be IN, got x",
        ),
        (
            "repeat",
            {"IN": "INT32", "DELAY": "UINT32", "WAIT": "INT32"},
            {},
            "expected WAIT datatype to be UINT32, got TYPE_INT32",
        ),
        ("square", {"IN": "FP32"}, {"OUT": "INT32"}, "expected one input IN of datatype INT32"),
    ],
)
def test_configs_that_do_not_fit(
    tmp_path: Path, backend: str, inputs: dict[str, str], outputs: dict[str, str], text: str
) -> None:
    harness = Harness(tmp_path)
    harness.directory("m", {})
    config = {
        "name": "m",
        **{
            kind: [{"name": name, "data_type": f"TYPE_{each}", "dims": [1]} for name, each in tensors.items()]
            for kind, tensors in (("input", inputs), ("output", outputs))
        },
    }
    given = tensor_specs(**{name: (kind, (1,)) for name, kind in inputs.items()})
    made = tensor_specs(**{name: (kind, (1,)) for name, kind in outputs.items()})
    spec = harness.spec("m", given, made, "", backend=backend, config=config)
    with pytest.raises(ConchError, match=text):
        harness.load(load_backend(backend), spec)

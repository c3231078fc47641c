"""ModelInfer, as tritonclient uses it."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.grpc_transports import each_transport
from tests.support.servers import (
    EXAMPLES,
    WAIT_S,
    AnyServer,
    check_simple,
    client_of,
    eventually,
    past_deadline,
    probe,
    probe_inputs,
    simple_inputs,
    tensor,
)
from tritonclient.grpc import InferenceServerClient as Client
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

Answer = tuple[triton.InferResult | None, InferenceServerException | None]

grpc_transport = each_transport()


def test_all_outputs(client: Client) -> None:
    result = client.infer("simple", simple_inputs(3))
    check_simple(result, 3)
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("simple", "1", "")
    outputs = [(output.name, output.datatype, list(output.shape)) for output in response.outputs]
    assert outputs == [("OUTPUT0", "INT32", [1, 16]), ("OUTPUT1", "INT32", [1, 16])]
    assert [len(raw) for raw in response.raw_output_contents] == [64, 64]
    assert not any(output.HasField("contents") for output in response.outputs)


def test_some_outputs_and_request_id(client: Client) -> None:
    result = client.infer(
        "simple", simple_inputs(), outputs=[triton.InferRequestedOutput("OUTPUT1")], request_id="möwe-7"
    )
    response = result.get_response()
    assert response.id == "möwe-7"
    assert [output.name for output in response.outputs] == ["OUTPUT1"]
    assert result.as_numpy("OUTPUT0") is None
    assert result.as_numpy("OUTPUT1").tolist() == [[0] * 16]


def test_outputs_in_the_order_asked_for(client: Client) -> None:
    outputs = [triton.InferRequestedOutput(name) for name in ("OUTPUT1", "OUTPUT0")]
    result = client.infer("simple", simple_inputs(), outputs=outputs)
    assert {output.name for output in result.get_response().outputs} == {"OUTPUT0", "OUTPUT1"}
    check_simple(result)


def test_batch_of_a_client(client: Client) -> None:
    numbers = np.arange(8 * 16, dtype=np.int32).reshape(8, 16)
    result = client.infer("simple", [tensor(name, numbers, "INT32") for name in ("INPUT0", "INPUT1")])
    assert (result.as_numpy("OUTPUT0") == 2 * numbers).all()


@pytest.mark.parametrize("version", ["", "1", "3"])
def test_versions(client: Client, version: str) -> None:
    result = client.infer("versions", probe_inputs(), model_version=version)
    assert result.get_response().model_version == (version or "3")


def test_every_datatype_raw(client: Client) -> None:
    values: dict[str, Any] = {
        "BOOL": [True, False],
        "FP16": [0.5, -2],
        "FP32": [0.25, np.inf],
        "FP64": [1e300, -0.0],
        "BYTES": np.array(["käse".encode(), b"", b"\0\xff"], np.object_),
    }
    for bits in (8, 16, 32, 64):
        values[f"INT{bits}"] = [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1]
        values[f"UINT{bits}"] = [0, 2**bits - 1]
    inputs, expected = [], {}
    for datatype, elements in values.items():
        array = np.array(elements, triton_to_np_dtype(datatype))
        name = "STRING" if datatype == "BYTES" else datatype
        inputs.append(tensor(name, array, datatype))
        expected[name] = array
    result = client.infer("caster", inputs)
    for name, array in expected.items():
        answered = result.as_numpy(f"O{name}")
        assert answered.dtype == array.dtype, name
        assert answered.tolist() == array.tolist(), name


def test_empty_tensor(client: Client) -> None:
    result = client.infer("caster", [tensor("FP32", np.empty((0,), np.float32))])
    assert result.as_numpy("OFP32").shape == (0,)
    assert list(result.get_response().raw_output_contents) == [b""]


def test_classification(client: Client) -> None:
    image = np.zeros((2, 64), np.float32)
    asked = triton.InferRequestedOutput("probabilities", class_count=3)
    result = client.infer("digits", [tensor("image", image)], outputs=[asked])
    plain = client.infer("digits", [tensor("image", image)]).as_numpy("probabilities")
    classes = result.as_numpy("probabilities")
    assert classes.shape == (2, 3)
    labels = (EXAMPLES / "digits" / "labels.txt").read_text().splitlines()
    best = np.argsort(-plain[0], kind="stable")[:3]
    expected = [f"{plain[0][index]:f}:{index}:{labels[index]}" for index in best]
    assert [text.decode() for text in classes[0]] == expected


def test_parameters_reach_the_model(client: Client) -> None:
    parameters = {"count": 7, "loud": True, "name": "x"}
    assert probe(client, parameters=parameters)["parameters"] == parameters


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_request(client: Client, algorithm: str) -> None:
    check_simple(client.infer("simple", simple_inputs(5), compression_algorithm=algorithm), 5)


def test_strings(client: Client) -> None:
    text = np.array([["größe", ""]], np.object_)
    result = client.infer("strings", [tensor("text", text, "BYTES")])
    assert [value.decode() for value in result.as_numpy("upper")[0]] == ["GRÖSSE", ""]
    assert result.as_numpy("length").tolist() == [[5, 0]]


def test_many_at_once_with_callbacks(client: Client) -> None:
    answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
    for number in range(100):
        client.async_infer(
            "simple",
            simple_inputs(number),
            lambda result, error, number=number: answers.put((number, (result, error))),
        )
    seen = set()
    for _ in range(100):
        number, (result, error) = answers.get(timeout=WAIT_S)
        assert error is None
        assert result is not None
        check_simple(result, number)
        seen.add(number)
    assert seen == set(range(100))


def test_cancel_of_an_executing_request(client: Client, tmp_path: Path) -> None:
    started, noticed = tmp_path / "started", tmp_path / "noticed"
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    context = client.async_infer(
        "probe",
        probe_inputs(),
        lambda result, error: answers.put((result, error)),
        parameters={"started": str(started), "until_cancelled": str(noticed)},
    )
    eventually(started.exists, "the model runs")
    context.cancel()
    result, error = answers.get(timeout=WAIT_S)
    assert result is None
    assert "Locally cancelled by application!" in str(error)
    eventually(noticed.exists, "the model sees that its request is cancelled")
    probe(client)


def test_client_timeout(client: Client, signal_files: tuple[Path, Path]) -> None:
    _, go = signal_files
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        client.infer("probe", probe_inputs(), client_timeout=0.2, parameters={"wait_for": str(go)})
    go.touch()
    probe(client)


def test_queue_timeout_while_the_instance_is_busy(client: Client, signal_files: tuple[Path, Path]) -> None:
    started, go = signal_files
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def runs() -> bool:
        """Sends the first request, again where a busy machine left it in the queue for too long."""
        if not (sent and answers.empty()):
            sent.append(
                client.async_infer(
                    "impatient",
                    probe_inputs(),
                    lambda result, error: answers.put((result, error)),
                    parameters={"started": str(started), "wait_for": str(go)},
                )
            )
            while not answers.empty():
                answers.get()
        return started.exists()

    sent: list[object] = []
    eventually(runs, "the model runs")
    with pytest.raises(InferenceServerException) as raised:
        client.infer("impatient", probe_inputs(), request_id="late")
    assert raised.value.status() == "StatusCode.UNAVAILABLE"
    assert raised.value.message() == "Request timeout expired"
    go.touch()
    assert answers.get(timeout=WAIT_S)[1] is None


def test_deadline_that_passes_in_the_queue(client: Client, signal_files: tuple[Path, Path]) -> None:
    started, go = signal_files
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    before = client.get_inference_statistics("probe", as_json=True)["model_stats"][0]["inference_stats"]
    client.async_infer(
        "probe",
        probe_inputs(),
        lambda result, error: answers.put((result, error)),
        parameters={"started": str(started), "wait_for": str(go)},
    )
    eventually(started.exists, "the model runs")

    def late(seconds: float) -> None:
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            client.infer("probe", probe_inputs(), client_timeout=seconds)

    def is_counted() -> bool:
        """True once the request has been taken out of the queue and counted as a failure."""
        after = client.get_inference_statistics("probe", as_json=True)["model_stats"][0]["inference_stats"]
        return int(after["fail"].get("count", 0)) > int(before["fail"].get("count", 0))

    past_deadline(late, is_counted, first_s=0.1)
    go.touch()
    assert answers.get(timeout=WAIT_S)[1] is None


def test_requests_of_many_clients_share_a_batch(server: AnyServer) -> None:
    seen: list[Any] = []

    def ask(number: int) -> None:
        with client_of(server) as client:
            seen.append(probe(client, float(number), "four", request_id=str(number)))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [sorted(said["ids"]) for said in seen] == [["0", "1", "2", "3"]] * 4

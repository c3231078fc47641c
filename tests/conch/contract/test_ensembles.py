"""Ensembles over the wire: what happens inside them, and what clients see of it."""

from __future__ import annotations

import json
import queue
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from tests.support.ensembles import (
    ensemble_config,
    plain,
    request,
    tensor_config,
    write_ensembles,
)
from tests.support.server_fixtures import server_fixture
from tests.support.servers import (
    WAIT_S,
    AnyServer,
    RawClient,
    client_of,
    copy_example,
    eventually,
    past_deadline,
    serving,
    tensor,
    write_model,
    write_probe,
)
from tritonclient.grpc import InferenceServerClient as Client
from tritonclient.utils import InferenceServerException

import conch

COUNTER = '''
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers at once for as long as nobody has cancelled, and says how many it has sent."""

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.send, args=(request.get_response_sender(),)).start()

    def send(self, sender):
        number = 0
        while not sender.is_cancelled() and number < 200:
            outputs = [pb_utils.Tensor("OUT", np.array([number], np.float32))]
            sender.send(pb_utils.InferenceResponse(outputs))
            number += 1
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
CROWD = '''
import threading
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Says how many requests are in it at a time; two instances run side by side."""

    inside = 0
    most = 0
    lock = threading.Lock()

    def execute(self, requests):
        kind = type(self)
        with kind.lock:
            kind.inside += 1
            kind.most = max(kind.most, kind.inside)
        time.sleep(0.001)
        with kind.lock:
            kind.inside -= 1
        outputs = [
            pb_utils.Tensor("OUT", request.inputs()[0].as_numpy() + kind.most * 1000) for request in requests
        ]
        return [pb_utils.InferenceResponse([output]) for output in outputs]
'''
FLAT = tensor_config("input", "IN") + tensor_config("output", "OUT")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with all these ensembles."""
    repository = tmp_path_factory.mktemp("ensembles")
    write_ensembles(repository)
    copy_example(repository, "digits")
    probed = {"IN": "X"}, {"OUT": "t", "SEEN": "S1"}
    write_probe(repository)
    write_model(
        repository, "probing", ensemble_config([("probe", *probed), plain("spy", "t", "Y")], ["Y", "S1"])
    )
    write_probe(
        repository,
        "pairs",
        "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 600000000 }",
    )
    write_model(
        repository,
        "paired",
        ensemble_config(
            [plain("spy", "X", "a"), ("pairs", {"IN": "a"}, {"OUT": "Y", "SEEN": "S1"})], ["Y", "S1"]
        ),
    )
    write_probe(repository, "short", "dynamic_batching { default_queue_policy { max_queue_size: 1 } }")
    write_model(
        repository,
        "shortened",
        ensemble_config([plain("spy", "X", "a"), ("short", {"IN": "a"}, {"OUT": "Y"})]),
    )
    decoupled = "model_transaction_policy { decoupled: true }"
    write_model(repository, "counter", f'backend: "python"\n{FLAT}{decoupled}', {"model.py": COUNTER})
    pair = "instance_group { count: 2 }"
    write_model(repository, "crowd", f'backend: "python"\n{FLAT}{pair}', {"model.py": CROWD})
    write_model(
        repository,
        "one by one",
        ensemble_config(
            [plain("counter", "X", "t"), plain("crowd", "t", "Y")],
            batch=0,
            settings="max_inflight_requests: 1",
        ),
    )
    steps = [plain("counter", "X", "t"), plain("flat", "t", "Y")]
    write_model(repository, "counting", ensemble_config(steps, batch=0))
    write_model(
        repository,
        "digit names",
        """
            platform: "ensemble"
            max_batch_size: 64
            input { name: "pixels" data_type: TYPE_FP32 dims: [ 64 ] }
            output { name: "likely" data_type: TYPE_FP32 dims: [ 10 ] }
            ensemble_scheduling { step {
                model_name: "digits" model_version: -1
                input_map { key: "image" value: "pixels" }
                output_map { key: "probabilities" value: "likely" }
            } }
        """,
    )
    return repository


server = server_fixture()


def counts(client: Client, model: str) -> tuple[int, int]:
    """Requests that succeeded, and those that failed."""
    (stats,) = client.get_inference_statistics(model).model_stats
    return stats.inference_stats.success.count, stats.inference_stats.fail.count


def ask(client: Client, model: str, value: float = 1.0, rows: int = 1, **more: Any) -> Any:
    """Sends X to an ensemble."""
    inputs = [tensor("X", np.full((rows, 2), value, np.float32))]
    return client.infer(model, inputs, client_timeout=more.pop("client_timeout", WAIT_S), **more)


def seen(result: Any, name: str = "S1") -> Any:
    """Values that a step has seen."""
    return json.loads(result.as_numpy(name).ravel()[0])


def test_a_request_goes_through_all_steps(client: Client) -> None:
    result = ask(client, "outer", 3.0, rows=2, request_id="an id", parameters={"key": "value"})
    assert result.as_numpy("Y").tolist() == [[6.0, 6.0]] * 2
    for name in ("S1", "S2"):
        assert seen(result, name)["id"] == "an id"
        assert seen(result, name)["parameters"] == {"key": "value"}
    assert result.get_response().model_name == "outer"


def test_readiness_index_and_metadata(client: Client) -> None:
    assert client.is_server_ready()
    assert client.is_model_ready("outer")
    index = client.get_model_repository_index().models
    assert ("outer", "1", "READY") in {(line.name, line.version, line.state) for line in index}
    metadata = client.get_model_metadata("chain")
    assert (metadata.platform, list(metadata.inputs[0].shape)) == ("ensemble", [-1, -1])
    config = client.get_model_config("each").config
    assert config.model_transaction_policy.decoupled
    assert not config.instance_group


def test_requests_share_batches_inside(client: Client, server: AnyServer) -> None:
    results: list[Any] = []

    def send(number: int) -> None:
        with client_of(server) as own:
            results.append(ask(own, "paired", number, request_id=str(number)))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sorted(seen(result)["ids"]) for result in results] == [["0", "1"]] * 2
    assert sorted(result.as_numpy("Y")[0, 0] for result in results) == [1.0, 2.0]


def test_optional_inputs(client: Client) -> None:
    value = np.ones((1, 1), np.float32)
    assert seen(client.infer("optional", [tensor("X", value)]))["shapes"] == {"IN": [1, 1]}
    result = client.infer("optional", [tensor("X", value), tensor("O", value)])
    assert seen(result)["shapes"] == {"IN": [1, 1], "OPT": [1, 1]}


def test_classification_has_the_labels_of_the_model_inside(client: Client) -> None:
    with np.load(Path(__file__).parents[3] / "examples" / "data" / "digits_heldout.npz") as data:
        image = data["images"][:1].astype(np.float32)
    wanted = triton.InferRequestedOutput("likely", class_count=1)
    (entry,) = client.infer("digit names", [tensor("pixels", image)], outputs=[wanted]).as_numpy("likely")[0]
    direct = triton.InferRequestedOutput("probabilities", class_count=1)
    (known,) = client.infer("digits", [tensor("image", image)], outputs=[direct]).as_numpy("probabilities")[0]
    assert entry == known
    assert entry.count(b":") == 2


def test_response_parameters_move_a_request_to_another_sequence(raw: RawClient) -> None:
    ordered = request("chain", [[1.0]], say_sequence_id=11, say_sequence_end=True, say_more="x")
    answer = raw.infer(ordered)
    texts = dict(zip((output.name for output in answer.outputs), answer.raw_output_contents, strict=True))
    assert json.loads(texts["S1"][4:])["sequence"] == [0, 0]
    assert json.loads(texts["S2"][4:])["sequence"] == [11, 2]
    assert answer.parameters["sequence_id"].int64_param == 11
    assert answer.parameters["sequence_end"].bool_param
    assert not answer.parameters["sequence_start"].bool_param
    assert "more" not in answer.parameters
    with pytest.raises(grpc.RpcError) as raised:
        raw.infer(request("chain", [[1.0]], say_sequence_id=True))
    assert raised.value.details() == (
        "in ensemble 'chain', [request id: an id] expected parameter 'sequence_id' to be "
        "TRITONSERVER_PARAMETER_INT or TRITONSERVER_PARAMETER_STRING"
    )


def stream(client: Client, model: str, value: Any, **parameters: Any) -> list[Any]:
    """Answers to one request on a stream, up to the final flag; errors as they are."""
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.start_stream(lambda result, error: arrived.put((result, error)))
    found: list[Any] = []
    try:
        inputs = [tensor("X", np.array(value, np.float32))]
        client.async_stream_infer(
            model, inputs, enable_empty_final_response=True, parameters=parameters or None
        )
        while True:
            result, error = arrived.get(timeout=WAIT_S)
            if error is not None:
                return [*found, error]
            response = result.get_response()
            found += [result] if response.outputs else []
            if response.parameters["triton_final_response"].bool_param:
                return found
    finally:
        client.stop_stream()


def test_a_decoupled_step(client: Client) -> None:
    results = stream(client, "each", [[1, 2, 3]])
    assert [result.as_numpy("Y").tolist() for result in results] == [[[2.0]], [[3.0]], [[4.0]]]
    assert stream(client, "each", [[]]) == []
    results = stream(client, "both", [[1, 2]])
    assert [result.as_numpy("Y").tolist() for result in results] == [[[2.0]], [[4.0]]]


def test_an_error_behind_a_decoupled_step(client: Client) -> None:
    (error,) = stream(client, "each", [[1, 2, 3]], error_spy="UNAVAILABLE")
    assert error.message() == "in ensemble 'each', told to"
    with pytest.raises(InferenceServerException, match="doesn't support models with decoupled"):
        ask(client, "each")


def test_a_limit_to_answers_under_way(client: Client) -> None:
    results = stream(client, "one by one", [0.0])
    values = [float(result.as_numpy("Y")[0]) for result in results]
    assert values == [1000.0 + number for number in range(200)], "in order, and never two at a time"


def test_strings_go_from_step_to_step(tmp_path: Path) -> None:
    """Each step is given `bytes`, whatever the model before it has made of its strings."""
    made = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["IN"], ["OUT"])],
        "g",
        [onnx.helper.make_tensor_value_info("IN", onnx.TensorProto.STRING, ["n"])],
        [onnx.helper.make_tensor_value_info("OUT", onnx.TensorProto.STRING, ["n"])],
    )
    content = onnx.helper.make_model(
        made, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8
    ).SerializeToString()
    source = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            (array,) = [tensor.as_numpy() for tensor in request.inputs()]
            kinds = {type(element).__name__ for element in array}
            texts = np.array([element.decode() + " " + "".join(kinds) for element in array], np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", texts)]))
        return responses
"""
    strings = "".join(
        tensor_config(kind, name, "-1", "STRING") for kind, name in (("input", "IN"), ("output", "OUT"))
    )
    for name in ("one", "two"):
        write_model(tmp_path, name, f'backend: "onnxruntime"\n{strings}', {"model.onnx": content})
    for name in ("python", "python2"):
        write_model(tmp_path, name, f'backend: "python"\n{strings}', {"model.py": source})
    models = ["one", "two", "python", "python2", "one"]
    steps = [plain(model, f"t{place}", f"t{place + 1}") for place, model in enumerate(models)]
    config = ensemble_config(steps, ["t5"], ["t0"], batch=0).replace("TYPE_FP32", "TYPE_STRING")
    write_model(tmp_path, "strings", config)
    with conch.Server(
        tmp_path,
        grpc_port=None,
        http_port=None,
        metrics_port=None,
        backend_config=["python,placement=in_process"],
    ) as server:
        assert server.infer("strings", {"t0": ["é", "b"]})["t5"].tolist() == [
            "é bytes bytes".encode(),
            b"b bytes bytes",
        ]
        assert server.infer("one", {"IN": ["é"]})["OUT"].tolist() == ["é".encode()]
        assert server.infer("python", {"IN": ["é"]})["OUT"].tolist() == ["é bytes".encode()]


def test_cancelling_a_decoupled_ensemble_stops_its_producer(client: Client, raw: RawClient) -> None:
    before = counts(client, "counting")
    message = request("counting", [1.0])
    call = raw.stream([message])
    next(iter(call))
    call.cancel()
    eventually(lambda: sum(counts(client, "counting")) == sum(before) + 1, "the request is over")


def test_cancelling_reaches_the_running_step_and_begins_no_other(client: Client, tmp_path: Path) -> None:
    begun, noticed = tmp_path / "begun", tmp_path / "noticed"
    spied_on = counts(client, "spy")
    failed = counts(client, "probing")[1]
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    context = client.async_infer(
        "probing",
        [tensor("X", np.ones((1, 1), np.float32))],
        lambda result, error: done.put(error),
        parameters={"started": str(begun), "until_cancelled": str(noticed)},
    )
    eventually(begun.exists, "the first step runs")
    context.cancel()
    assert "Locally cancelled by application!" in str(done.get(timeout=WAIT_S))
    eventually(noticed.exists, "the model sees that its request is cancelled")
    eventually(lambda: counts(client, "probing")[1] == failed + 1, "the ensemble counts a failure")
    assert ask(client, "probing").as_numpy("Y").tolist() == [[2.0, 2.0]]
    assert counts(client, "spy") == (spied_on[0] + 1, spied_on[1])


def hold(client: Client, model: str, tmp_path: Path, name: str = "IN") -> tuple[Any, Path]:
    """Has a probe run until a file is there; gives where its answer comes, and the file."""
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.async_infer(
        model,
        [tensor(name, np.ones((1, 1), np.float32))],
        lambda result, error: done.put(error),
        parameters={"started": str(begun), "wait_for": str(go_on)},
    )
    eventually(begun.exists, "the probe runs")
    return done, go_on


def test_a_deadline_that_passes_in_a_steps_queue(client: Client, tmp_path: Path) -> None:
    done, go_on = hold(client, "short", tmp_path)
    before = counts(client, "short")[1], counts(client, "shortened")[1]

    def late(seconds: float) -> None:
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            ask(client, "shortened", client_timeout=seconds)

    # The step is taken out of its queue, while the model is busy.
    past_deadline(late, lambda: counts(client, "short")[1] > before[0])
    eventually(lambda: counts(client, "shortened")[1] > before[1], "the ensemble counts a failure")
    go_on.touch()
    assert done.get(timeout=WAIT_S) is None


def test_a_full_queue_of_a_step_fails_the_request_at_once(client: Client, tmp_path: Path) -> None:
    done, go_on = hold(client, "short", tmp_path)
    answered: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(3):
        inputs = [tensor("X", np.ones((1, 1), np.float32))]
        client.async_infer("shortened", inputs, lambda result, error: answered.put(error), request_id="r")
    for _ in range(2):
        error = answered.get(timeout=WAIT_S)
        assert error.message() == "in ensemble 'shortened', [request id: r] Exceeds maximum queue size"
        assert error.status() == "StatusCode.UNAVAILABLE"
    go_on.touch()
    assert done.get(timeout=WAIT_S) is None
    assert answered.get(timeout=WAIT_S) is None, "one had a place"


def test_loading_unloading_and_what_is_wrong(tmp_path: Path) -> None:
    write_ensembles(tmp_path)
    write_model(tmp_path, "wrong", ensemble_config([plain("spy", "X", "t")]))
    write_model(tmp_path, "wrong again", ensemble_config([plain("nothere", "X", "Y")]))
    with (
        serving(tmp_path, flags=["--model-control-mode=explicit"]) as server,
        client_of(server) as client,
    ):
        client.load_model("outer")
        for name in ("outer", "chain", "spy", "spy2"):
            assert client.is_model_ready(name), "it was loaded as it is needed"
        assert ask(client, "outer").as_numpy("Y").tolist() == [[4.0, 4.0]]
        client.unload_model("spy")
        assert not client.is_model_ready("outer")
        with pytest.raises(InferenceServerException, match="'outer' has no available versions"):
            ask(client, "outer")
        client.load_model("spy")
        assert ask(client, "outer").as_numpy("Y").tolist() == [[4.0, 4.0]]
        client.unload_model("outer", unload_dependents=True)
        eventually(lambda: not client.is_model_ready("spy2"), "what was loaded for it only goes too")
        assert client.is_model_ready("spy")
        with pytest.raises(InferenceServerException, match="failed to load 'wrong', failed to poll"):
            client.load_model("wrong")
        with pytest.raises(InferenceServerException) as raised:
            client.load_model("wrong again")
        assert raised.value.message() == (
            "load failed for model 'wrong again': ensemble wrong again contains models that are not "
            "available or ambiguous: nothere\n"
        )
        reasons = {line.name: line.reason for line in client.get_model_repository_index().models}
        assert reasons["wrong"] == "ensemble output 'Y' for ensemble wrong' is not used"


@pytest.mark.slow
def test_requests_through_a_reload_of_a_step(tmp_path: Path) -> None:
    """While a model inside is replaced again and again, no request of the ensemble fails."""
    write_ensembles(tmp_path)
    flags = ["--model-control-mode=explicit", "--load-model=chain"]
    with (
        serving(tmp_path, flags=flags) as server,
        client_of(server) as client,
        client_of(server) as manager,
    ):
        failed: list[Exception] = []
        stop = threading.Event()

        def send() -> None:
            while not stop.is_set():
                try:
                    assert ask(client, "chain").as_numpy("Y").tolist() == [[3.0, 3.0]]
                except Exception as error:
                    failed.append(error)

        threads = [threading.Thread(target=send) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(10):
            model = tmp_path / ("spy" if number % 2 else "spy2") / "1" / "model.py"
            model.write_text(model.read_text() + f"# {number}\n")
            manager.load_model(model.parents[1].name)
        stop.set()
        for thread in threads:
            thread.join()
        assert not failed

"""Functions as models: what clients of the network and of the process see of them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tests.support.leaks import local_server
from tests.support.servers import WAIT_S, eventually
from tritonclient.utils import InferenceServerException

import conch
from conch.core.tensor import Array

X, Y = conch.Tensor("X"), conch.Tensor("Y")


@pytest.fixture(scope="module")
def server() -> Iterator[conch.Server]:
    server = conch.Server(grpc_port=0, http_port=0, metrics_port=0, grpc_address="127.0.0.1")

    @conch.batch
    def add_sub(A: Array, B: Array) -> tuple[Array, Array]:
        return A + B, A - B

    def upper(requests: list[conch.Request]) -> list[dict[str, Any]]:
        return [{"UP": np.char.upper(request["TEXT"].astype(bytes))} for request in requests]

    @conch.sample
    def count(N: Array) -> Iterator[dict[str, Array]]:
        for number in range(int(N[0])):
            yield {"I": np.array([number], np.int32)}

    def parameters(requests: list[conch.Request]) -> list[Any]:
        return [[[json.dumps([dict(r.parameters), r.id, r.rows])]] for r in requests]

    pair = [conch.Tensor("A", np.int32, (3,)), conch.Tensor("B", np.int32, (3,))]
    server.bind("add_sub", add_sub, pair, [conch.Tensor(None, np.int32, (3,))] * 2)
    texts = conch.Tensor("TEXT", str), conch.Tensor("UP", bytes)
    plain = conch.ModelConfig(batching=False)
    server.bind("upper", upper, [texts[0]], [texts[1]], plain)
    streams = conch.ModelConfig(batching=False, decoupled=True)
    server.bind(
        "count", count, [conch.Tensor("N", np.int32, (1,))], [conch.Tensor("I", np.int32, (1,))], streams
    )
    server.bind("parameters", parameters, [X], [conch.Tensor("TOLD", str, (1,))], plain)
    with local_server(), server:
        yield server


def told(server: conch.Server, path: str) -> Any:
    return httpx.get(f"{server.http_url}/{path}").raise_for_status().json()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_tritonclient_gets_what_the_function_returns(server: conch.Server, protocol: str) -> None:
    module: Any = triton if protocol == "grpc" else triton_http
    url = server.grpc_url if protocol == "grpc" else str(server.http_url).removeprefix("http://")
    given = {"A": np.arange(6, dtype=np.int32).reshape(2, 3), "B": np.ones((2, 3), np.int32)}
    inputs = [module.InferInput(name, [2, 3], "INT32") for name in given]
    for tensor in inputs:
        tensor.set_data_from_numpy(given[tensor.name()])
    client = module.InferenceServerClient(url)
    try:
        result = client.infer("add_sub", inputs)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT_1"), given["A"] + 1)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT_2"), given["A"] - 1)
    finally:
        client.close()


def test_a_bound_model_is_a_model_like_any_other(server: conch.Server) -> None:
    metadata = told(server, "v2/models/add_sub")
    assert metadata["inputs"][0] == {"name": "A", "datatype": "INT32", "shape": [-1, 3]}
    assert [tensor["name"] for tensor in metadata["outputs"]] == ["OUTPUT_1", "OUTPUT_2"]
    assert told(server, "v2/models/add_sub/config")["backend"] == "bound"
    assert httpx.get(f"{server.http_url}/v2/models/add_sub/ready").status_code == 200
    index = httpx.post(f"{server.http_url}/v2/repository/index").json()
    assert {"name": "count", "version": "1", "state": "READY"} in index
    assert [entry.name for entry in server.models] == ["add_sub", "count", "parameters", "upper"]

    def successes() -> int:
        (statistics,) = told(server, "v2/models/add_sub/stats")["model_stats"]
        count: int = statistics["inference_stats"]["success"]["count"]
        return count

    before = successes()
    row = np.ones((1, 3), np.int32)
    server.infer("add_sub", {"A": row, "B": row})
    assert successes() == before + 1
    metrics = httpx.get(str(server.metrics_url)).text
    assert f'nv_inference_request_success{{model="add_sub",version="1"}} {before + 1}' in metrics


def test_the_process_gets_the_same_as_clients(server: conch.Server) -> None:
    given = np.arange(3, dtype=np.int32)[np.newaxis]
    result = server.infer("add_sub", {"A": given, "B": [[1, 1, 1]]}, outputs=["OUTPUT_1"])
    assert list(result) == ["OUTPUT_1"]
    np.testing.assert_array_equal(result["OUTPUT_1"], given + 1)
    result["OUTPUT_1"][:] = 0  # it is the caller's
    np.testing.assert_array_equal(given, [[0, 1, 2]])


@pytest.mark.parametrize("texts", [["a", "ß"], [b"a", "ß".encode()], np.array(["a", "ß"])])
def test_strings_come_as_bytes(server: conch.Server, texts: Any) -> None:
    assert server.infer("upper", {"TEXT": texts})["UP"].tolist() == [b"A", "ß".encode()]


def test_the_function_sees_parameters_and_id(server: conch.Server) -> None:
    def seen(**options: Any) -> Any:
        return json.loads(server.infer("parameters", {"X": [1.0]}, **options)["TOLD"].item())

    assert seen() == [{}, "", None]
    given = {"a": 1, "b": True, "c": "x", "d": 0.5}
    assert seen(parameters=given, request_id="me") == [given, "me", None]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_client_gets_samples_and_batches(server: conch.Server, protocol: str) -> None:
    url = server.grpc_url if protocol == "grpc" else server.http_url
    assert url is not None
    with conch.Client(url, "add_sub") as client:
        row = np.arange(3, dtype=np.int32)
        assert client.infer_sample(row, row)["OUTPUT_1"].tolist() == [0, 2, 4]
        assert client.infer_batch(A=row[np.newaxis], B=row[np.newaxis])["OUTPUT_2"].tolist() == [[0, 0, 0]]
        assert client.infer_sample([1, 2, 3], [1, 1, 1])["OUTPUT_2"].tolist() == [0, 1, 2]
        with pytest.raises(conch.InvalidArgumentError, match="has no input 'C'; it has A, B"):
            client.infer_sample(A=row, C=row)
        with pytest.raises(conch.InvalidArgumentError, match="needs input 'B'"):
            client.infer_sample(row)
        with pytest.raises(conch.InvalidArgumentError, match="has 2 inputs, not 3"):
            client.infer_sample(row, row, row)
        with pytest.raises(conch.InvalidArgumentError, match="not both"):
            client.infer_sample(row, B=row)
        with pytest.raises(conch.InvalidArgumentError, match="unexpected shape for input 'A'"):
            client.infer_sample(np.arange(4, dtype=np.int32), row)
    with conch.Client(url, "parameters") as client:
        told = client.infer_batch([1.0], parameters={"a": "b"})["TOLD"].item()
        assert json.loads(told)[0] == {"a": "b"}
    with conch.Client(url, "upper") as client:
        assert client.infer_sample(["abc"])["UP"].tolist() == [b"ABC"]


def test_streams(server: conch.Server) -> None:
    assert server.grpc_url is not None
    assert server.http_url is not None
    with conch.Client(server.grpc_url, "count") as client:
        assert [int(result["I"][0]) for result in client.stream_sample([5])] == [0, 1, 2, 3, 4]
        assert list(client.stream_sample([0])) == []
        several = [client.stream_batch([3]), client.stream_batch([3])]
        assert [[int(r["I"][0]) for r in turn] for turn in zip(*several, strict=True)] == [
            [0, 0],
            [1, 1],
            [2, 2],
        ]
    with (
        conch.Client(server.http_url, "count") as client,
        pytest.raises(conch.UnsupportedError, match="over gRPC only"),
    ):
        client.stream_sample([1])
    assert [int(result["I"][0]) for result in server.stream("count", {"N": [40]})] == list(range(40))
    assert int(server.infer("count", {"N": [1]})["I"][0]) == 0
    for responses in (0, 2):
        with pytest.raises(conch.InvalidArgumentError, match="'count' is decoupled"):
            server.infer("count", {"N": [responses]})


def test_a_loop_that_is_left_early_cancels_the_request(server: conch.Server) -> None:
    ended = threading.Event()

    def forever(requests: list[conch.Request]) -> Iterator[list[Any]]:
        try:
            while True:
                yield [request["X"] for request in requests]
        finally:
            ended.set()

    server.bind("forever", forever, [X], [Y], conch.ModelConfig(batching=False, decoupled=True))
    for result in server.stream("forever", {"X": [1.0]}):
        assert result["Y"].tolist() == [1.0]
        break
    assert ended.wait(WAIT_S)
    ended.clear()
    assert server.grpc_url is not None
    with conch.Client(server.grpc_url, "forever") as client:
        stream = client.stream_sample([1.0])
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    assert ended.wait(WAIT_S)
    server.unbind("forever")


WRONG: dict[str, tuple[Any, type[conch.ConchError], str]] = {
    "client": (conch.InvalidArgumentError("too hot"), conch.InvalidArgumentError, "^too hot$"),
    "later": (conch.UnavailableError("not now"), conch.UnavailableError, "^not now$"),
    "bug": (
        ZeroDivisionError("oops"),
        conch.InternalError,
        "function of model 'wrong' failed: ZeroDivisionError: oops",
    ),
    "exit": (SystemExit(3), conch.InternalError, "failed: SystemExit: 3"),
    "dtype": (
        [[np.zeros(1)]],
        conch.InternalError,
        "output 'Y' of model 'wrong' has datatype FP64, but .* FP32",
    ),
    "shape": (
        [[np.zeros((1, 1), "f")]],
        conch.InternalError,
        r"output 'Y' of model 'wrong' has shape \[1,1\]",
    ),
    "name": (
        [{"Z": 1}],
        conch.InternalError,
        "returned output 'Z', which it was not bound with; its outputs are Y",
    ),
    "missing": ([{}], conch.InternalError, "model 'wrong' did not return output 'Y'"),
    "many": ([[1, 2]], conch.InternalError, "returned 2 outputs, and was bound with 1: Y"),
    "none": ([None], conch.InternalError, "returned no outputs for a request"),
    "dict": (
        {"Y": 1},
        conch.InternalError,
        "must return a list with an answer for each of 1 requests, not dict",
    ),
    "short": ([], conch.InternalError, "for each of 1 requests, not 0"),
    "yields": (iter([1]), conch.InternalError, r"ModelConfig\(decoupled=True\)"),
    "one": ([conch.InvalidArgumentError("yours")], conch.InvalidArgumentError, "^yours$"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_goes_wrong_is_told_as_what_it_is(server: conch.Server, what: str) -> None:
    value, kind, text = WRONG[what]

    def wrong(requests: list[conch.Request]) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    server.bind("wrong", wrong, [X], [Y], conch.ModelConfig(batching=False))
    with pytest.raises(kind, match=text):
        server.infer("wrong", {"X": [1.0]})
    assert server.grpc_url is not None
    with conch.Client(server.grpc_url, "wrong") as client, pytest.raises(kind, match=text):
        client.infer_sample([1.0])
    server.unbind("wrong")


def test_coroutine_functions(server: conch.Server) -> None:
    loops = []

    async def of_requests(requests: list[conch.Request]) -> list[Any]:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        assert conch.model_context().name == "coroutine"
        return [request["X"] + 1 for request in requests]

    @conch.batch
    async def of_arrays(X: Array) -> Array:
        await asyncio.sleep(0)
        if X[0] < 0:
            raise conch.InvalidArgumentError("negative")
        return X * 2

    class Called:
        async def __call__(self, requests: list[conch.Request]) -> list[Any]:
            return [request["X"] for request in requests]

    functions: dict[str, Any] = {"coroutine": of_requests, "batch": of_arrays, "object": Called()}
    for name, function in functions.items():
        server.bind(name, function, [X], [Y])
    for name, wanted in {"coroutine": 4, "batch": 6, "object": 3}.items():
        for _ in range(2):
            assert server.infer(name, {"X": [[3.0]]})["Y"].tolist() == [[wanted]]
    assert loops[0] is loops[1]  # what belongs to a loop can be kept
    with pytest.raises(conch.InvalidArgumentError, match="negative"):
        server.infer("batch", {"X": [[-1.0]]})
    for name in ("coroutine", "batch", "object"):
        server.unbind(name)
    eventually(loops[0].is_closed, "the loop goes with the model")


@pytest.mark.parametrize("decorated", [False, True])
def test_async_generators(server: conch.Server, decorated: bool) -> None:
    closed = threading.Event()

    async def count(X: Array) -> AsyncIterator[Any]:
        try:
            for number in range(100):
                await asyncio.sleep(0)
                yield {"Y": X + number}
        finally:
            closed.set()

    async def of_requests(requests: list[conch.Request]) -> AsyncIterator[Any]:
        async for outputs in count(requests[0]["X"]):
            yield [outputs]

    streams = conch.ModelConfig(batching=False, decoupled=True)
    server.bind("counting", conch.sample(count) if decorated else of_requests, [X], [Y], streams)
    found = [outputs["Y"].tolist() for outputs in server.stream("counting", {"X": [1.0]})]
    assert found == [[number + 1] for number in range(100)]
    assert closed.is_set()
    closed.clear()
    for _ in server.stream("counting", {"X": [1.0]}):
        break
    assert closed.wait(WAIT_S), "a generator that is left is closed"
    server.unbind("counting")


@pytest.mark.parametrize("protocol", ["grpc", "http", "direct"])
def test_inputs_can_be_written_to(server: conch.Server, protocol: str) -> None:
    """Arrays are writable, as frameworks warn of others, and writes stay inside the function."""

    def add_in_place(requests: list[conch.Request]) -> list[Any]:
        for request in requests:
            request["X"][:] += 1
            assert request["X"] is request["X"] and request["X"].flags.writeable
        return [request["X"] for request in requests]

    server.bind("in_place", add_in_place, [X], [Y])
    given = np.ones((2, 3), np.float32)
    if protocol == "direct":
        assert server.infer("in_place", {"X": given})["Y"].tolist() == [[2] * 3] * 2
    else:
        url = server.grpc_url if protocol == "grpc" else server.http_url
        assert url is not None
        with conch.Client(url, "in_place") as client:
            assert client.infer_batch(given)["Y"].tolist() == [[2] * 3] * 2
    assert given.tolist() == [[1] * 3] * 2
    server.unbind("in_place")


def test_an_error_of_one_request_leaves_the_others(server: conch.Server) -> None:
    together = threading.Event()

    def picky(requests: list[conch.Request]) -> list[Any]:
        together.wait(WAIT_S)
        return [
            conch.InvalidArgumentError("negative") if (request["X"] < 0).any() else request["X"]
            for request in requests
        ]

    server.bind("picky", picky, [X], [Y])
    answers: dict[float, Any] = {}

    def ask(value: float) -> None:
        try:
            answers[value] = server.infer("picky", {"X": [[value]]})["Y"].item()
        except conch.ConchError as error:
            answers[value] = error.message

    threads = [threading.Thread(target=ask, args=(value,)) for value in (1.0, -2.0, 3.0)]
    for thread in threads:
        thread.start()
    together.set()
    for thread in threads:
        thread.join()
    assert answers == {1.0: 1.0, -2.0: "negative", 3.0: 3.0}
    server.unbind("picky")


def test_each_function_of_a_list_is_an_instance(server: conch.Server) -> None:
    barrier = threading.Barrier(2)

    def instance(number: int) -> Any:
        def run(requests: list[conch.Request]) -> list[Any]:
            barrier.wait(WAIT_S)  # both run at the same time
            context = conch.model_context()
            assert (context.name, context.inputs, context.outputs) == ("pair", ("X",), ("N",))
            return [[np.array([number], np.int32)] for _ in requests]

        return run

    config = conch.ModelConfig(batching=False)
    server.bind("pair", [instance(1), instance(2)], [X], [conch.Tensor("N", np.int32)], config)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(server.infer("pair", {"X": [0.0]})["N"].item()))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [1, 2]
    server.unbind("pair")


def test_binding_again_swaps_and_unbinding_ends(server: conch.Server) -> None:
    running, go = threading.Event(), threading.Event()

    def old(requests: list[conch.Request]) -> list[Any]:
        running.set()
        go.wait(WAIT_S)
        return [{"Y": request["X"]} for request in requests]

    server.bind("swapped", old, [X], [Y])
    answers: list[float] = []
    thread = threading.Thread(
        target=lambda: answers.append(server.infer("swapped", {"X": [[1.0]]})["Y"].item())
    )
    thread.start()
    assert running.wait(WAIT_S)
    server.bind("swapped", conch.batch(lambda X: -X), [X], [Y])
    assert server.infer("swapped", {"X": [[1.0]]})["Y"].item() == -1.0
    go.set()
    thread.join()
    assert answers == [1.0]  # by the function that it came to
    with pytest.raises(conch.InvalidArgumentError, match="max_batch_size"):
        server.bind("swapped", old, [X], [Y], conch.ModelConfig(max_batch_size=0))
    with pytest.raises(conch.ConchError, match="preferred"):
        batcher = conch.DynamicBatcher(preferred_batch_size=[99])
        server.bind("swapped", old, [X], [Y], conch.ModelConfig(batcher=batcher))
    assert server.infer("swapped", {"X": [[1.0]]})["Y"].item() == -1.0
    server.bind("swapped", conch.batch(lambda X: X), [X], [Y], version=7)
    assert server.model_ready("swapped", 7)
    assert not server.model_ready("swapped", 1)
    server.unbind("swapped")
    with pytest.raises(conch.ConchError, match="'swapped'"):
        server.infer("swapped", {"X": [[1.0]]})
    assert "swapped" not in [entry.name for entry in server.models]
    with pytest.raises(conch.InvalidArgumentError, match="no function is bound to 'swapped'"):
        server.unbind("swapped")


@pytest.mark.parametrize("name", ["", " ", "a/b", "a\n", None])
def test_names_that_can_not_be(server: conch.Server, name: Any) -> None:
    with pytest.raises(conch.InvalidArgumentError, match="can't be the name of a model"):
        server.bind(name, lambda requests: requests, [X], [Y])


@pytest.mark.parametrize("function", [None, [], ["x"], 3])
def test_what_is_no_function(server: conch.Server, function: Any) -> None:
    with pytest.raises(conch.InvalidArgumentError, match="a function, or a list of functions, must be bound"):
        server.bind("m", function, [X], [Y])


def test_a_model_may_be_unloaded_and_loaded_by_clients() -> None:
    with conch.Server(
        grpc_port=0, http_port=None, metrics_port=None, model_control_mode="explicit"
    ) as server:
        server.bind("m", conch.batch(lambda X: X), [X], [Y])
        client = triton.InferenceServerClient(server.grpc_url)
        try:
            client.unload_model("m")
            assert not client.is_model_ready("m")
            assert client.get_model_repository_index(as_json=True)["models"][0]["name"] == "m"
            client.load_model("m")
            assert client.is_model_ready("m")
            assert server.infer("m", {"X": [[2.0]]})["Y"].item() == 2.0
            too_many = {
                "backend": "bound",
                "max_batch_size": 4,
                "instance_group": [{"kind": "KIND_CPU", "count": 2}],
            }
            with pytest.raises(
                InferenceServerException, match="was bound with 1 function, which is how many"
            ):
                client.load_model("m", config=json.dumps(too_many))
        finally:
            client.close()
        server.unload("m")
        eventually(lambda: not server.model_ready("m"), "it is unloaded")
        server.load("m")
        assert server.infer("m", {"X": [[2.0]]})["Y"].item() == 2.0


def test_sequences_and_the_cache_are_there_for_functions_too() -> None:
    calls: list[int] = []

    def counting(requests: list[conch.Request]) -> list[Any]:
        calls.append(len(requests))
        return [{"Y": request["X"]} for request in requests]

    def total(requests: list[conch.Request]) -> list[Any]:
        return [
            {"Y": request["S"] + request["X"], "S_OUT": request["S"] + request["X"]} for request in requests
        ]

    states = """
        sequence_batching {
            state {
                input_name: "S" output_name: "S_OUT" data_type: TYPE_FP32 dims: [ 1 ]
                initial_state { name: "s" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true }
            }
        }
    """
    one = conch.Tensor("X", shape=(1,)), conch.Tensor("Y", shape=(1,))
    server = conch.Server(
        grpc_port=None, http_port=None, metrics_port=None, cache_config="local,size=1048576"
    )
    server.bind("cached", counting, [X], [Y], conch.ModelConfig(response_cache=True))
    server.bind("total", total, [one[0]], [one[1]], conch.ModelConfig(text=states))
    with server:
        for _ in range(3):
            result = server.infer("cached", {"X": [[2.0]]})
            result["Y"] *= 2  # what is cached stays
            assert result["Y"].item() == 4.0
        assert len(calls) == 1
        found = [
            server.infer(
                "total", {"X": [[2.0]]}, sequence_id=5, sequence_start=not step, sequence_end=step == 2
            )
            for step in range(3)
        ]
        assert [result["Y"].item() for result in found] == [2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            conch.ModelConfig(parameters={"CONCH_PADDING": '{"inputs": {"X": {"axis": 0, "to": [8]}}}'}),
            "CONCH_PADDING",
        ),
        (
            conch.ModelConfig(
                text="""batch_input {
                    kind: BATCH_ELEMENT_COUNT target_name: "C" data_type: TYPE_FP32 source_input: "X"
                }"""
            ),
            "batch_input",
        ),
    ],
)
def test_what_functions_would_not_be_given_is_refused(
    server: conch.Server, config: conch.ModelConfig, text: str
) -> None:
    with pytest.raises(conch.InvalidArgumentError, match=f"model 'm': {text} has no effect"):
        server.bind("m", conch.batch(lambda X: X), [X], [Y], config)


def test_one_client_s_bad_value_is_its_own(server: conch.Server) -> None:
    running, go = threading.Event(), threading.Event()
    sizes: list[int] = []

    @conch.group_by_values("scale")
    @conch.batch
    @conch.first_value("scale")
    def scaled(X: Array, scale: Any) -> Any:
        if scale <= 0:
            raise conch.InvalidArgumentError("scale must be above 0")
        return X * scale

    def waiting(requests: list[conch.Request]) -> Any:
        sizes.append(len(requests))
        running.set()
        go.wait(WAIT_S)
        return scaled(requests)

    server.bind(
        "scaled", waiting, [X, conch.Tensor("scale", shape=(1,))], [Y], conch.ModelConfig(max_batch_size=8)
    )
    told: dict[float, Any] = {}

    def ask(scale: float) -> None:
        try:
            told[scale] = server.infer("scaled", {"X": [[1.0]], "scale": [[scale]]})["Y"].item()
        except conch.ConchError as error:
            told[scale] = str(error)

    threads = [threading.Thread(target=ask, args=(scale,)) for scale in (2.0, -1.0, 3.0)]
    threads[0].start()
    assert running.wait(WAIT_S)
    for thread in threads[1:]:
        thread.start()
    pending = 'nv_inference_pending_request_count{model="scaled",version="1"} 2'
    eventually(lambda: pending in httpx.get(str(server.metrics_url)).text, "the others wait together")
    go.set()
    for thread in threads:
        thread.join()
    assert sizes == [1, 2]
    assert told == {2.0: 2.0, -1.0: "scale must be above 0", 3.0: 3.0}


@pytest.mark.parametrize("words", [["abc", "ß"], [b"a\0", "ß"]])
def test_strings_are_the_same_for_everybody(server: conch.Server, words: list[str | bytes]) -> None:
    wanted = [word.encode() if isinstance(word, str) else word for word in words]
    server.bind(
        "words", lambda requests: [[words]], [X], [conch.Tensor("W", str)], conch.ModelConfig(batching=False)
    )
    assert server.infer("words", {"X": [1.0]})["W"].tolist() == wanted
    assert server.grpc_url is not None
    with conch.Client(server.grpc_url, "words") as client:
        assert client.infer_sample([1.0])["W"].tolist() == wanted


def test_requests_without_rows_have_results_without_rows(server: conch.Server) -> None:
    def rows(requests: list[conch.Request]) -> list[Any]:
        return [
            {"Y": 2 * request["X"], "ROWS": np.full((request.rows, 1), request.rows)} for request in requests
        ]

    optional, count = conch.Tensor("Z", np.float32, (1,), optional=True), conch.Tensor("ROWS", np.int64, (1,))
    x, y = conch.Tensor("X", np.float32, (1,)), conch.Tensor("Y", np.float32, (1,))
    server.bind("double", conch.batch(lambda X: 2 * X), [x], [y])
    server.bind("rows", rows, [x], [y, count])
    server.bind("filled", conch.fill_optionals(Z=1)(conch.batch(lambda X, Z: X + Z)), [x, optional], [y])
    none = np.zeros((0, 1), np.float32)
    assert server.grpc_url is not None
    for model in ("double", "rows", "filled"):
        result = server.infer(model, {"X": none})
        assert {array.shape for array in result.values()} == {(0, 1)}
        with conch.Client(server.grpc_url, model) as client:
            assert client.infer_batch(X=none)["Y"].shape == (0, 1)
    assert server.infer("rows", {"X": [[1.0], [2.0]]})["ROWS"].tolist() == [[2], [2]]


def test_a_number_that_is_too_large_for_its_input_is_refused(server: conch.Server) -> None:
    server.bind("same", conch.batch(lambda X: X), [conch.Tensor("X", np.float32, (1,))], [Y])
    with pytest.raises(conch.InvalidArgumentError, match=r"input 'X' .*does not fit FP32"):
        server.infer("same", {"X": [[1e300]]})


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_brain_floats_of_ml_dtypes(protocol: str) -> None:
    brain_float = pytest.importorskip("ml_dtypes").bfloat16
    server = conch.Server(grpc_port=0, http_port=0, metrics_port=None, grpc_address="127.0.0.1")

    @conch.batch
    def double(X: Array) -> Array:
        assert X.dtype == brain_float and X.flags.writeable
        return X + X

    server.bind("said", double, [conch.Tensor("X", brain_float)], [conch.Tensor("Y", brain_float)])
    server.bind(
        "shown", double, example={"X": np.ones((1, 2), brain_float)}, outputs=[conch.Tensor("Y", "f4")]
    )
    values = [[1.5, -2.0]]
    with local_server(), server:
        url = server.grpc_url if protocol == "grpc" else server.http_url
        for given in (np.array(values, brain_float), np.array(values, np.float32), values):
            assert server.infer("said", {"X": given})["Y"].tolist() == [[3, -4]]
            assert url is not None
            with conch.Client(url, "said") as client:
                assert client.infer_batch(given)["Y"].tolist() == [[3, -4]]
        with pytest.raises(conch.InternalError, match=r"has datatype BF16, but .* specifies FP32"):
            server.infer("shown", {"X": np.array(values, brain_float)})

"""Sequences over sockets: strategies, controls, states, the backlog, errors, iterative generation."""

from __future__ import annotations

import json
import queue
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.sequence_models import (
    COUNTDOWN,
    ECHOES,
    GROWING,
    HISTORY,
    IO,
    LONG,
    SUMS,
    WRONG_COUNTDOWN,
    concatenator,
    python_config,
    write_accumulator,
    write_sums,
)
from tests.support.server_fixtures import LOAD_ALL, server_fixture
from tests.support.servers import (
    WAIT_S,
    AnyServer,
    RawClient,
    client_of,
    eventually,
    tensor,
    write_model,
)
from tritonclient.grpc import InferenceServerClient as Client
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

DECOUPLED = "model_transaction_policy { decoupled: true }"
ITERATIVE = LONG + "iterative_sequence: true"
RESCHEDULED = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to "
    "handle such a flag."
)


def write_models(repository: Path) -> None:
    for strategy in ("direct", "oldest"):
        write_sums(repository, strategy, strategy)
        write_accumulator(repository, f"onnx_{strategy}", strategy)
        config = python_config(strategy, more=ITERATIVE, io=IO)
        write_model(repository, f"countdown_{strategy}", config, {"model.py": COUNTDOWN})
        config = python_config(strategy, more=ITERATIVE, io=IO, extra=DECOUPLED)
        write_model(repository, f"counting_{strategy}", config, {"model.py": COUNTDOWN})
    write_sums(repository, "strings", "oldest", "TYPE_STRING")
    write_sums(repository, "int32", "oldest", "TYPE_INT32")
    write_sums(repository, "whole", "direct", batch=0)
    write_sums(repository, "narrow", "direct", batch=1)
    brief = python_config("direct", more="max_sequence_idle_microseconds: 200000", batch=1)
    write_model(repository, "brief", brief, {"model.py": SUMS})
    config = python_config("oldest", more=LONG, io=IO, extra=DECOUPLED)
    write_model(repository, "echoes", config, {"model.py": ECHOES})
    write_model(
        repository,
        "wrong_countdown",
        python_config("oldest", more=ITERATIVE, io=IO),
        {"model.py": WRONG_COUNTDOWN},
    )
    write_model(
        repository, "not_iterative", python_config("oldest", more=LONG, io=IO), {"model.py": COUNTDOWN}
    )
    write_model(
        repository,
        "not_even_sequences",
        f'backend: "python" max_batch_size: 4 {IO} dynamic_batching {{ }}',
        {"model.py": COUNTDOWN.replace("& pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START", "+ 1")},
    )
    for name, strategy, files in (
        ("history", "oldest", {"model.py": HISTORY}),
        ("growing_direct", "direct", {"model.onnx": concatenator()}),
        ("growing_oldest", "oldest", {"model.onnx": concatenator()}),
    ):
        config = python_config(strategy, more=LONG + GROWING, io=IO)
        if name != "history":
            config = config.replace("python", "onnxruntime") + "instance_group { count: 1 kind: KIND_CPU }"
        directory = write_model(repository, name, config, files)
        (directory / "initial_state").mkdir()
        (directory / "initial_state" / "start.bin").write_bytes(np.array([10, 20], np.float32).tobytes())


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of models with sequences."""
    repository = tmp_path_factory.mktemp("sequences")
    write_models(repository)
    return repository


server = server_fixture(flags=LOAD_ALL, placed=True)


def value(number: float) -> list[triton.InferInput]:
    return [tensor("IN", np.array([[number]], np.float32))]


def out(result: triton.InferResult) -> float:
    return float(result.as_numpy("OUT").ravel()[0])


def seen(result: triton.InferResult) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(result.as_numpy("SEEN").ravel()[0])["rows"]
    return rows


def send(client: Client, model: str, number: float, sequence: int | str, flags: str = "", **more: Any) -> Any:
    """Sends one request of a sequence; the flags are of `S` for start and `E` for end."""
    return client.infer(
        model,
        more.pop("inputs", None) or value(number),
        sequence_id=sequence,
        sequence_start="S" in flags,
        sequence_end="E" in flags,
        client_timeout=WAIT_S,
        **more,
    )


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    """The status and the text of a call that fails."""
    with pytest.raises(InferenceServerException) as raised:
        call()
    return str(raised.value.status()).removeprefix("StatusCode."), str(raised.value.message())


class Stream:
    """A stream of a client of its own."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        client.start_stream(lambda result, error: self._arrived.put(error if result is None else result))

    def send(self, model: str, number: float, sequence: int | str = 0, flags: str = "", **more: Any) -> None:
        """Sends a request."""
        self._client.async_stream_infer(
            model,
            value(number),
            sequence_id=sequence,
            sequence_start="S" in flags,
            sequence_end="E" in flags,
            **more,
        )

    def next(self) -> Any:
        """The next result, or error."""
        return self._arrived.get(timeout=WAIT_S)

    def close(self) -> None:
        """Ends the stream."""
        self._client.stop_stream()


@contextmanager
def stream_of(server: AnyServer) -> Iterator[Stream]:
    with client_of(server) as client:
        stream = Stream(client)
        yield stream
        stream.close()


@contextmanager
def cancelled(raw: RawClient, *messages: Any) -> Iterator[Any]:
    """A stream with these requests, which is cancelled in the end; `next` gives its responses."""
    call = raw.stream(messages)
    yield call
    call.cancel()


def message(model: str, number: float, **parameters: Any) -> Any:
    """A request as a message; its parameters are given by their fields, such as ``{"bool_param": True}``."""
    return service_pb2.ModelInferRequest(
        model_name=model,
        inputs=[service_pb2.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[1, 1])],
        raw_input_contents=[np.float32(number).tobytes()],
        parameters={key: service_pb2.InferParameter(**value) for key, value in parameters.items()},
    )


def counts(client: Client, model: str) -> tuple[int, int, int, int]:
    """Inferences, executions, successes and failures."""
    (stats,) = client.get_inference_statistics(model).model_stats
    inference = stats.inference_stats
    return stats.inference_count, stats.execution_count, inference.success.count, inference.fail.count


BOTH = pytest.mark.parametrize("strategy", ["direct", "oldest"])


@BOTH
def test_sequences_keep_what_they_have(client: Client, strategy: str) -> None:
    for step, flags in enumerate(("S", "", "E"), 1):
        for sequence in range(1, 5):
            result = send(client, strategy, sequence, sequence, flags)
            assert out(result) == step * sequence
    # More than there are places for at a time, one after the other.
    for sequence in range(10, 20):
        assert out(send(client, strategy, sequence, sequence, "SE")) == sequence


@BOTH
def test_models_are_told_where_requests_stand(client: Client, strategy: str) -> None:
    told = [
        (row["id"], row["flags"], row["S"], row["E"], row["R"], row["C"])
        for flags in ("S", "", "E", "SE")
        for row in seen(send(client, strategy, 1, 7, flags))
    ]
    assert told == [
        (7, 1, [1], [0.0], [True], [7]),
        (7, 0, [0], [0.0], [True], [7]),
        (7, 2, [0], [1.0], [True], [7]),
        (7, 3, [1], [1.0], [True], [7]),
    ]


def test_direct_keeps_rows_and_fills_those_before(client: Client) -> None:
    for sequence in (1, 2, 3):
        send(client, "direct", 1, sequence, "S")
    before = counts(client, "direct")
    rows = seen(send(client, "direct", 5, 3))
    assert [(row["id"], row["R"], row["C"], row["flags"]) for row in rows] == [
        (0, [False], [0], 0),
        (0, [False], [0], 0),
        (3, [True], [3], 0),
    ]
    assert all(row["shapes"] == [[1, 1]] * 5 for row in rows)
    after = counts(client, "direct")
    assert [new - old for old, new in zip(before, after, strict=True)] == [1, 1, 1, 0], "fillers do not count"
    send(client, "direct", 1, 1, "E")
    send(client, "direct", 0, 2)  # runs after all that is to be done about the one before it
    assert len(seen(send(client, "direct", 1, 4, "SE"))) == 1, "the first row is free"
    assert [out(send(client, "direct", 1, sequence, "E")) for sequence in (2, 3)] == [2, 7]


def test_a_model_without_batches_has_sequences_too(client: Client) -> None:
    def whole(number: float, flags: str) -> Any:
        inputs = [tensor("IN", np.array([number], np.float32))]
        return send(client, "whole", 0, 9, flags, inputs=inputs)

    (row,) = seen(whole(1, "S"))
    assert row["shapes"] == [[1]] * 5
    assert out(whole(2, "E")) == 3


def test_ids_may_be_strings(client: Client) -> None:
    assert out(send(client, "strings", 1, "a", "S")) == 1
    assert out(send(client, "strings", 1, "ä" * 100, "S")) == 1
    result = send(client, "strings", 4, "a", "E")
    assert (out(result), seen(result)[0]["id"], seen(result)[0]["C"]) == (5, "a", ["a"])
    result = send(client, "strings", 5, "ä" * 100, "E")
    assert (out(result), seen(result)[0]["C"]) == (6, ["ä" * 100])


def test_a_number_and_its_text_are_two_sequences(repository: Path, client: Client) -> None:
    config = python_config("oldest", more=LONG)  # no control has the id, so it may be of either kind
    write_model(repository, "either", config, {"model.py": SUMS})
    client.load_model("either")
    assert out(send(client, "either", 1, 5, "S")) == 1
    assert out(send(client, "either", 10, "5", "S")) == 10
    assert out(send(client, "either", 1, 5, "E")) == 2
    assert out(send(client, "either", 10, "5", "E")) == 20
    client.unload_model("either")


def test_ids_are_cut_to_their_datatype(client: Client) -> None:
    (row,) = seen(send(client, "int32", 1, 2**32 + 7, "SE"))
    assert (row["id"], row["C"]) == (2**32 + 7, [7])
    # The protocol has a signed field for an unsigned number.
    (row,) = seen(send(client, "oldest", 1, -1, "SE"))
    assert (row["id"], row["C"]) == (2**64 - 1, [2**64 - 1])


@pytest.mark.parametrize(
    ("model", "settings", "text"),
    [
        (
            "direct",
            {"sequence": 0},
            "inference request to model 'direct' must specify a non-zero or non-empty correlation ID",
        ),
        (
            "strings",
            {"sequence": "", "request_id": "r"},
            "[request id: r] sequence batching control 'C' data-type is 'UINT64', but model 'strings' "
            "expects 'BYTES'",
        ),
        (
            "oldest",
            {"sequence": 77},
            "inference request for sequence 77 to model 'oldest' must specify the START flag on the first "
            "request of the sequence",
        ),
        (
            "strings",
            {"sequence": "who"},
            "inference request for sequence who to model 'strings' must specify the START flag on the first "
            "request of the sequence",
        ),
        (
            "oldest",
            {"sequence": 8, "flags": "S", "inputs": [tensor("IN", np.zeros((2, 1), np.float32))]},
            "inference request to model 'oldest' must specify batch-size 1 due to requirements of sequence "
            "batcher",
        ),
        (
            "oldest",
            {"sequence": "a", "flags": "S"},
            "sequence batching control 'C' data-type is 'BYTES', but model 'oldest' expects 'UINT64'",
        ),
        (
            "oldest",
            {
                "sequence": 8,
                "flags": "S",
                "inputs": [*value(1), tensor("S", np.ones((1, 1), np.int32), "INT32")],
            },
            "unexpected inference input 'S' for model 'oldest', allowed inputs are: IN",
        ),
        (
            "onnx_oldest",
            {
                "sequence": 8,
                "flags": "S",
                "inputs": [*value(1), tensor("BEFORE", np.ones((1, 1), np.float32))],
            },
            "unexpected inference input 'BEFORE' for model 'onnx_oldest', allowed inputs are: IN",
        ),
        (
            "growing_oldest",
            {"sequence": 8, "flags": "S", "outputs": [triton.InferRequestedOutput("AFTER")]},
            "unexpected inference output 'AFTER' for model 'growing_oldest', allowed outputs are: OUT",
        ),
    ],
)
def test_requests_that_are_refused(client: Client, model: str, settings: dict[str, Any], text: str) -> None:
    assert refusal(partial(send, client, model, 1, **settings)) == ("INVALID_ARGUMENT", text)


@pytest.mark.parametrize(
    ("key", "parameter", "expected"),
    [
        ("sequence_id", {"bool_param": True}, "int64_param or string_param."),
        ("sequence_id", {"double_param": 1.0}, "int64_param or string_param."),
        ("sequence_start", {"int64_param": 1}, "bool_param."),
        ("sequence_end", {"string_param": "true"}, "bool_param."),
    ],
)
def test_parameters_of_a_wrong_type(
    raw: RawClient, key: str, parameter: dict[str, Any], expected: str
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        raw.infer(message("direct", 1, **{key: parameter}))
    assert raised.value.details() == f"invalid value type for '{key}' parameter, expected {expected}"


def test_a_second_start_begins_again(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    assert out(send(client, "oldest", 5, 3, "S")) == 5
    assert out(send(client, "oldest", 2, 3, "S")) == 2
    assert out(send(client, "oldest", 2, 3, "E")) == 4
    assert refusal(partial(send, client, "oldest", 1, 3))[0] == "INVALID_ARGUMENT"
    eventually(
        lambda: "sequence 3 of model 'oldest' was started again" in caplog.text, "the warning is logged"
    )


def test_a_sequence_survives_a_request_that_failed(client: Client) -> None:
    for model in ("direct", "oldest"):
        assert out(send(client, model, 5, 3, "S")) == 5
        status, text = refusal(partial(send, client, model, -1, 3))
        assert status == "INTERNAL"
        assert "ValueError: told to" in text
        assert out(send(client, model, 2, 3, "E")) == 7


def test_metadata_and_config(client: Client) -> None:
    metadata = client.get_model_metadata("onnx_direct")
    assert [each.name for each in metadata.inputs] == ["IN"]
    assert [each.name for each in metadata.outputs] == ["OUT", "TOLD"]
    config = client.get_model_config("oldest").config
    assert config.sequence_batching.max_sequence_idle_microseconds == 600_000_000
    assert list(config.sequence_batching.oldest.preferred_batch_size) == [4]
    assert [each.name for each in config.sequence_batching.control_input] == ["S", "E", "R", "C"]
    assert not config.HasField("dynamic_batching")


@BOTH
def test_implicit_state(client: Client, strategy: str) -> None:
    model = f"onnx_{strategy}"
    for step, flags in enumerate(("S", "", "E"), 1):
        for sequence in (1, 2, 3):
            result = send(client, model, sequence, sequence, flags)
            assert out(result) == step * sequence
            assert result.as_numpy("TOLD").tolist() == [["S" in flags, "E" in flags, True, sequence]]
            assert result.as_numpy("AFTER") is None
    assert out(send(client, model, 5, 1, "S")) == 5, "a new sequence begins at zero"
    assert out(send(client, model, 7, 1, "S")) == 7, "and so does one that takes another's id"
    only = [triton.InferRequestedOutput("TOLD")]
    assert send(client, model, 1, 1, outputs=only).as_numpy("OUT") is None
    assert out(send(client, model, 1, 1, "E")) == 9, "the state is kept whatever the client asked for"


@pytest.mark.parametrize("model", ["history", "growing_direct", "growing_oldest"])
def test_states_that_grow(server: AnyServer, model: str) -> None:
    """Sequences whose states have different shapes run side by side; the first value is a file's."""
    with stream_of(server) as stream:
        sent = 0
        for step in range(1, 9):
            for sequence in range(1, 4):
                if step == 1 or step % sequence == 0:  # so that they grow at different rates
                    flags = ("S" if step == 1 else "") + ("E" if step > 8 - sequence else "")
                    stream.send(model, 1, sequence, flags, request_id=str(sequence))
                    sent += 1
        totals: dict[str, list[float]] = {}
        for _ in range(sent):
            result = stream.next()
            assert isinstance(result, triton.InferResult), str(result)
            totals.setdefault(result.get_response().id, []).append(out(result))
    for numbers in totals.values():
        assert numbers == [31.0 + number for number in range(len(numbers))]


@BOTH
def test_many_sequences_over_streams(server: AnyServer, strategy: str) -> None:
    """Far more sequences than places, interleaved, on two streams: each adds up its own numbers."""
    models = (strategy, f"onnx_{strategy}")
    with stream_of(server) as first, stream_of(server) as second:
        streams = (first, second)
        for step in range(6):
            for sequence in range(1, 21):
                flags = {0: "S", 5: "E"}.get(step, "")
                for model, stream in zip(models, streams, strict=True):
                    stream.send(model, sequence, sequence, flags, request_id=str(sequence))
        for stream in streams:
            sums: dict[str, list[float]] = {}
            for _ in range(120):
                result = stream.next()
                assert isinstance(result, triton.InferResult), str(result)
                sums.setdefault(result.get_response().id, []).append(out(result))
            assert sums == {str(n): [n * step for step in range(1, 7)] for n in range(1, 21)}


def test_an_idle_sequence_gives_its_place_away(client: Client) -> None:
    assert out(send(client, "brief", 1, 1, "S")) == 1
    assert out(send(client, "brief", 2, 2, "S")) == 2, "it waited for the one place"
    status, text = refusal(partial(send, client, "brief", 1, 1))
    assert status == "INVALID_ARGUMENT"
    assert "must specify the START flag" in text
    send(client, "brief", 0, 1, "SE")


def test_the_backlog_waits_in_order(server: AnyServer) -> None:
    with stream_of(server) as stream:
        stream.send("narrow", 1, 1, "S")
        for sequence in (2, 3):
            stream.send("narrow", 10, sequence, "S")
            stream.send("narrow", 10, sequence, "E")
        stream.send("narrow", 1, 1, "E")
        results = [stream.next() for _ in range(6)]
        assert [out(result) for result in results] == [1, 10, 20, 10, 20, 2]
        runs = [json.loads(result.as_numpy("SEEN")[0, 0])["run"] for result in results]
        assert [run - runs[0] for run in runs] == [0, 2, 3, 4, 5, 1]


def test_a_timeout_counts_in_the_backlog(client: Client) -> None:
    send(client, "narrow", 1, 1, "S")
    send(client, "narrow", 0, 1, timeout=1)  # it has a place, so its timeout means nothing
    waits = partial(send, client, "narrow", 1, 2, "S", timeout=20_000)
    assert refusal(waits) == ("UNAVAILABLE", "timeout of the corresponding sequence has been expired")
    assert "must specify the START flag" in refusal(partial(send, client, "narrow", 1, 2))[1]
    assert out(send(client, "narrow", 1, 1, "E")) == 2


def test_a_cancelled_sequence_leaves_the_backlog(raw: RawClient, client: Client) -> None:
    send(client, "narrow", 1, 1, "S")
    failures = counts(client, "narrow")[3]
    waiting = message("narrow", 1, sequence_id={"int64_param": 2}, sequence_start={"bool_param": True})
    # The last one is answered out of order, so those before it have been queued by then.
    with cancelled(raw, waiting, waiting, waiting, message("counting_oldest", 1)) as responses:
        assert next(responses).infer_response.model_name == "counting_oldest"
    eventually(lambda: counts(client, "narrow")[3] == failures + 3, "the requests are cancelled")
    assert out(send(client, "narrow", 1, 1, "E")) == 2
    assert out(send(client, "narrow", 5, 2, "SE")) == 5


def test_decoupled_sequences(server: AnyServer) -> None:
    with stream_of(server) as stream:
        for number, flags in ((1, "S"), (2, ""), (3, "E")):
            stream.send("echoes", number, 5, flags)
        assert [out(stream.next()) for _ in range(6)] == [1, 1, 3, 3, 6, 6]


@BOTH
def test_a_request_runs_again_until_it_is_done(client: Client, strategy: str) -> None:
    model = f"countdown_{strategy}"
    before = counts(client, model)
    assert out(client.infer(model, value(5), client_timeout=WAIT_S)) == 0
    after = counts(client, model)
    assert [new - old for old, new in zip(before, after, strict=True)] == [1, 5, 1, 0]
    assert "ValueError: told to" in refusal(partial(client.infer, model, value(-1)))[1]
    assert out(client.infer(model, value(1), client_timeout=WAIT_S)) == 0


@BOTH
def test_generation(server: AnyServer, client: Client, strategy: str) -> None:
    """One request each, several responses, more requests than places; they come and go in the batches."""
    model = f"counting_{strategy}"
    before = counts(client, model)
    lengths = [1500, 90, 1, 40, 70, 20, 80]  # the first still runs when the others come
    with stream_of(server) as stream:
        for number, length in enumerate(lengths):
            stream.send(model, length, request_id=str(number))
        parts: dict[str, list[float]] = {}
        for _ in range(sum(lengths)):
            result = stream.next()
            assert isinstance(result, triton.InferResult), str(result)
            parts.setdefault(result.get_response().id, []).append(out(result))
    assert parts == {
        str(n): [float(left) for left in reversed(range(length))] for n, length in enumerate(lengths)
    }
    inferences, executions, successes, failures = (
        new - old for old, new in zip(before, counts(client, model), strict=True)
    )
    assert (inferences, successes, failures) == (7, 7, 0)
    assert executions < sum(lengths), "they ran together"


def test_a_cancelled_generation_stops(raw: RawClient, client: Client) -> None:
    failures = counts(client, "counting_oldest")[3]
    with cancelled(raw, message("counting_oldest", 10_000_000)) as responses:
        assert next(responses).infer_response.raw_output_contents == [np.float32(9_999_999).tobytes()]
    eventually(lambda: counts(client, "counting_oldest")[3] == failures + 1, "the request is cancelled")
    runs = counts(client, "counting_oldest")[1]
    assert out(client.infer("countdown_oldest", value(100), client_timeout=WAIT_S)) == 0
    assert counts(client, "counting_oldest")[1] == runs, "the model is left alone"


@pytest.mark.parametrize("model", ["not_iterative", "not_even_sequences"])
def test_only_iterative_models_run_requests_again(client: Client, model: str) -> None:
    failures = counts(client, model)[3]
    assert refusal(partial(send, client, model, 3, 1, "SE")) == ("INVALID_ARGUMENT", RESCHEDULED)
    assert counts(client, model)[3] == failures + 1
    assert out(send(client, model, 1, 1, "SE")) == 0


def test_a_rescheduled_request_has_no_response_yet(client: Client) -> None:
    status, text = refusal(partial(client.infer, "wrong_countdown", value(2), client_timeout=WAIT_S))
    assert status == "INTERNAL"
    assert (
        "Expected a None object in the execute function return list for reschduled request, found type "
        "'<class 'conch.backends.python.api.pb_response.InferenceResponse'>'." in text
    )
    assert out(client.infer("wrong_countdown", value(1), client_timeout=WAIT_S)) == 0


def test_a_live_sequence_ends_on_the_version_that_it_began_on(repository: Path, client: Client) -> None:
    write_sums(repository, "replaced", "direct")
    client.load_model("replaced")
    assert out(send(client, "replaced", 1, 1, "S")) == 1
    assert out(send(client, "replaced", 1, 2, "S")) == 1
    newer = SUMS.replace("self.sums[key] = 0", "self.sums[key] = 100")
    write_model(repository, "replaced", None, {"model.py": newer})
    client.load_model("replaced")
    assert out(send(client, "replaced", 1, 3, "S")) == 101
    assert out(send(client, "replaced", 1, 1)) == 2
    assert out(send(client, "replaced", 1, 2, "E")) == 2
    assert out(send(client, "replaced", 1, 2, "S")) == 101, "what starts again does so on the new one"
    assert out(send(client, "replaced", 1, 1, "E")) == 3
    assert "must specify the START flag" in refusal(partial(send, client, "replaced", 1, 1))[1]
    assert [out(send(client, "replaced", 1, sequence, "E")) for sequence in (2, 3)] == [102, 102]
    client.unload_model("replaced")


WRONG: Sequence[tuple[str, str]] = (
    ("state { }", "sequence batching state must have an 'input_name' and an 'output_name'"),
    (
        'state { input_name: "A" output_name: "B" data_type: TYPE_FP32 dims: 1 initial_state { name: "i" '
        'data_type: TYPE_FP32 dims: 1 data_file: "../config.pbtxt" } }',
        "file '../config.pbtxt' of state input 'A' must stay within the folder 'initial_state' of the model",
    ),
)


@pytest.mark.parametrize(("settings", "text"), WRONG)
def test_configs_that_fail_the_load(repository: Path, client: Client, settings: str, text: str) -> None:
    write_model(repository, "wrong", python_config("oldest", more=settings), {"model.py": SUMS})
    try:
        _, message = refusal(partial(client.load_model, "wrong"))
    finally:
        shutil.rmtree(repository / "wrong")  # the next server, for the other placement, loads all there is
    assert text in message

"""Backends compiled for Triton, served unchanged."""

from __future__ import annotations

import importlib.util
import itertools
import json
import queue
import urllib.request
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.core import make_spec
from tests.support.cuda import FakeCuda
from tests.support.cuda_fixtures import cuda, driver
from tests.support.native_backends import NativeBackends, native_backends
from tests.support.servers import ServerProcess, client_of, eventually
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from conch.backends import load_backend
from conch.core.errors import UnavailableError
from conch.core.tensor import Array
from conch.workers.backend_directory import backends_within

__all__ = ["cuda", "driver", "native_backends"]

pytestmark = pytest.mark.process

ONE_BY_ONE = """
    backend: "probe"
    input { name: "IN" data_type: TYPE_UINT8 dims: [ 1, -1 ] }
    output { name: "OUT" data_type: TYPE_UINT8 dims: [ 1, -1 ] }
    output { name: "BATCH" data_type: TYPE_INT32 dims: [ 1, 1 ] }
"""
TWO = "instance_group { count: 2 kind: KIND_CPU }"
SUMS = """
    backend: "sums"
    max_batch_size: 8
    input {{ name: "IN" data_type: TYPE_INT64 dims: 1 }}
    output {{ name: "OUT" data_type: TYPE_INT64 dims: 1 }}
    sequence_batching {{
      {strategy}
      state {{ input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT64 dims: 1 }}
    }}
"""
LEFT = """
    backend: "sums"
    max_batch_size: 8
    input { name: "IN" data_type: TYPE_INT64 dims: 1 }
    output { name: "OUT" data_type: TYPE_INT64 dims: 1 }
    sequence_batching {
      iterative_sequence: true
      state { input_name: "LEFT_IN" output_name: "LEFT_OUT" data_type: TYPE_INT64 dims: 1 }
    }
"""
STEPS = """
    backend: "steps"
    max_batch_size: 8
    input { name: "IN" data_type: TYPE_INT64 dims: 1 }
    output { name: "OUT" data_type: TYPE_INT64 dims: 1 }
    model_transaction_policy { decoupled: true }
    sequence_batching {
      iterative_sequence: true
      state { input_name: "LEFT_IN" output_name: "LEFT_OUT" data_type: TYPE_INT64 dims: 1 }
    }
"""
AGAIN = """
    backend: "again"
    max_batch_size: 8
    input { name: "IN" data_type: TYPE_INT64 dims: 1 }
    output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
    sequence_batching { iterative_sequence: true }
"""
CALLER = """
    backend: "caller"
    input { name: "IN" data_type: TYPE_UINT8 dims: [ 1, -1 ] }
    output { name: "OUT" data_type: TYPE_UINT8 dims: [ 1, -1 ] }
"""
ASKER = CALLER.replace("caller", "asker")
CRASH = """
    backend: "crash"
    input {{ name: "IN" data_type: TYPE_INT32 dims: 1 }}
    output {{ name: "OUT" data_type: TYPE_INT32 dims: 1 }}
    parameters {{ key: "where" value {{ string_value: "{where}" }} }}
    parameters {{ key: "how" value {{ string_value: "{how}" }} }}
"""
HEAVY = """
    backend: "heavy"
    input { name: "IN" data_type: TYPE_INT64 dims: 2 }
    output { name: "OUT" data_type: TYPE_UINT8 dims: -1 }
"""
STREAM = """
    backend: "stream"
    input { name: "IN" data_type: TYPE_INT32 dims: 1 }
    output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
    model_transaction_policy { decoupled: true }
"""


def write(root: Path, name: str, config: str) -> Path:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    return root


def number_of(client: triton.InferenceServerClient, model: str, value: int, **sequence: Any) -> int:
    tensor = triton.InferInput("IN", [1, 1], "INT64")
    tensor.set_data_from_numpy(np.array([[value]], np.int64))
    result: Any = client.infer(model, [tensor], **sequence)
    return int(result.as_numpy("OUT")[0, 0])


def gone(client: triton.InferenceServerClient, model: str) -> bool:
    return not client.is_model_ready(model)


def echo(client: triton.InferenceServerClient, model: str, value: int) -> int:
    tensor = triton.InferInput("IN", [1], "INT32")
    tensor.set_data_from_numpy(np.array([value], np.int32))
    result: Any = client.infer(model, [tensor])
    return int(result.as_numpy("OUT")[0])


def streamed(
    client: triton.InferenceServerClient, model: str, values: Array, sequence_id: int = 0
) -> list[list[int]]:
    """The responses to each request of a decoupled model; the requests are one sequence if it has an id."""
    results: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: results.put(error or result))
    for number, value in enumerate(values):
        tensor = triton.InferInput("IN", value.shape, np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        client.async_stream_infer(
            model,
            [tensor],
            request_id=str(number),
            enable_empty_final_response=True,
            sequence_id=sequence_id,
            sequence_start=bool(sequence_id) and number == 0,
            sequence_end=bool(sequence_id) and number == len(values) - 1,
        )
    found: list[list[int]] = [[] for _ in values]
    left = len(values)
    while left:
        result = results.get(timeout=120)
        assert not isinstance(result, InferenceServerException), result
        response = result.get_response()
        left -= response.parameters["triton_final_response"].bool_param
        if response.outputs:
            found[int(response.id)] += result.as_numpy("OUT").reshape(-1).tolist()
    client.stop_stream()
    return found


def probed(server: ServerProcess, *texts: bytes) -> list[Any]:
    """Results, or errors, of requests that are sent together."""
    results: queue.Queue[tuple[int, Any]] = queue.Queue()
    with client_of(server) as client:
        for number, text in enumerate(texts):
            tensor = triton.InferInput("IN", [1, len(text)], "UINT8")
            tensor.set_data_from_numpy(np.frombuffer(text, np.uint8)[None])

            def done(result: Any, error: Any, number: int = number) -> None:
                results.put((number, error or result))

            client.async_infer("probe", [tensor], done, request_id=f"request-{number}")
        found = [results.get(timeout=120) for _ in texts]
    return [result for _, result in sorted(found, key=lambda each: each[0])]


def test_a_config_is_completed_and_requests_are_batched(
    tmp_path: Path, native_backends: NativeBackends
) -> None:
    with native_backends.serving(write(tmp_path, "probe", 'backend: "probe"'), "probe") as server:
        texts = [b"a" * (100 + 10_000 * (number % 8 == 7)) for number in range(32)] + [b"x" * 1_000_000]
        results = probed(server, *texts)
        assert [result.as_numpy("OUT").tobytes() for result in results] == texts
        assert max(int(result.as_numpy("BATCH")[0, 0]) for result in results) > 1
        assert results[0].get_response().parameters["by"].string_param == "probe"
        with client_of(server) as client:
            config: Any = client.get_model_config("probe", as_json=True)["config"]
            assert config["max_batch_size"] == 8
            (statistics,) = client.get_inference_statistics("probe", as_json=True)["model_stats"]
            assert int(statistics["inference_count"]) == len(texts)
            assert int(statistics["execution_count"]) < len(texts)
        assert "the probe is there" in server.errors


def test_instances_of_one_process_execute_at_the_same_time(
    tmp_path: Path, native_backends: NativeBackends
) -> None:
    with native_backends.serving(write(tmp_path, "probe", ONE_BY_ONE + TWO), "probe") as server:
        results = probed(server, b"M", b"M")
        assert [result.as_numpy("OUT").tobytes() for result in results] == [b"M", b"M"]


def test_a_changed_number_of_instances_is_a_new_process(
    tmp_path: Path, native_backends: NativeBackends
) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=probe")
    models = write(tmp_path, "probe", ONE_BY_ONE)
    with native_backends.serving(models, "probe", flags=flags) as server, client_of(server) as client:
        (models / "probe/config.pbtxt").write_text(ONE_BY_ONE + TWO)
        client.load_model("probe")
        results = probed(server, b"M", b"M")
        assert [result.as_numpy("OUT").tobytes() for result in results] == [b"M", b"M"]


def test_errors_of_batches_and_of_responses_reach_their_clients(
    tmp_path: Path, native_backends: NativeBackends
) -> None:
    with native_backends.serving(write(tmp_path, "probe", ONE_BY_ONE), "probe") as server:
        error, refused, fine = probed(server, b"E", b"R", b"L")
        assert (error.status(), error.message()) == ("StatusCode.INVALID_ARGUMENT", "the input has an E")
        assert (refused.status(), refused.message()) == ("StatusCode.NOT_FOUND", "the input has an R")
        assert fine.as_numpy("OUT").tobytes() == b"L"
        eventually(lambda: "the input has an L" in server.errors, "the text is logged")

        def counted() -> bool:
            metrics = urllib.request.urlopen(server.metrics_url).read().decode()
            return 'probe_letters_total{letter="L"} 1' in metrics or 'probe_letters{letter="L"} 1' in metrics

        eventually(counted, "the metric is shown")


def test_a_crash_fails_the_requests_of_the_version_and_its_worker_restarts(
    tmp_path: Path, native_backends: NativeBackends
) -> None:
    library = native_backends.build("probe")
    with native_backends.serving(write(tmp_path, "probe", ONE_BY_ONE + TWO)) as server:
        (crashed,) = probed(server, b"C")
        assert crashed.status() == "StatusCode.UNAVAILABLE"
        assert crashed.message().startswith(
            "Failed to process the request(s) for model 'probe', message: The worker of backend 'probe' has "
            "ended. Its process was killed by signal 11 (SIGSEGV)."
        )
        (again,) = probed(server, b"again")
        assert again.as_numpy("OUT").tobytes() == b"again"
        assert f"backend: 'probe', {library}" in server.errors
        assert "with the ids 'request-0'" in server.errors
        assert "TRITONBACKEND_ModelInstanceExecute" in server.errors  # the C stack


@pytest.mark.slow
def test_a_backend_in_cpp_serves_and_throws(tmp_path: Path, native_backends: NativeBackends) -> None:
    config = ONE_BY_ONE.replace('backend: "probe"', 'backend: "upper"')
    with native_backends.serving(write(tmp_path, "probe", config), "upper") as server:
        word, again = probed(server, b"conch server")[0], probed(server, b"conch server")[0]
        assert word.as_numpy("OUT").tobytes() == b"CONCH SERVER"
        assert again.get_response().parameters["count"].int64_param == 2
        (caught,) = probed(server, b"stop!")
        assert caught.message() == "'!' has no upper case"
        (thrown,) = probed(server, b"throw")
        assert thrown.status() == "StatusCode.UNAVAILABLE"
        assert "SIGABRT" in thrown.message()
        eventually(lambda: "what():  thrown out of Execute" in server.errors, "the exception is logged")
        assert probed(server, b"after")[0].as_numpy("OUT").tobytes() == b"AFTER"


CRASHES = {
    "ModelInitialize": "loading",
    "ModelInstanceInitialize": "loading",
    "ModelInstanceExecute": "executing",
    "ModelInstanceFinalize": "unloading",
    "Finalize": "unloading",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["write", "abort", "exit"])
def test_crashes_stay_in_the_worker(tmp_path: Path, native_backends: NativeBackends, how: str) -> None:
    for where in CRASHES:
        write(tmp_path, where, CRASH.format(where=where, how=how))
    write(tmp_path, "fine", CRASH.format(where="nowhere", how=how))
    flags = ("--model-control-mode=explicit", "--load-model=fine")
    with (
        native_backends.serving(tmp_path, "crash", flags=flags) as server,
        client_of(server) as client,
    ):
        for where, when in CRASHES.items():
            if when == "loading":
                with pytest.raises(
                    InferenceServerException, match="The worker of backend 'crash' has ended"
                ) as raised:
                    client.load_model(where)
                assert (
                    "(SIGSEGV)" if how == "write" else "SIGABRT" if how == "abort" else "status 7"
                ) in str(raised.value)
                continue
            client.load_model(where)
            if when == "executing":
                with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
                    echo(client, where, 13)
                assert echo(client, where, 12) == 12
            client.unload_model(where)
            eventually(partial(gone, client, where), "it is unloaded")
        assert echo(client, "fine", 13) == 13


def test_a_decoupled_backend_responds_after_its_execution(
    tmp_path: Path, native_backends: NativeBackends
) -> None:
    with native_backends.serving(write(tmp_path, "stream", STREAM), "stream") as server:
        counts = [0, 1, 5, 500, 3000]
        with client_of(server) as client:
            values = np.array(counts, np.int32).reshape(-1, 1)
            assert streamed(client, "stream", values) == [list(range(count)) for count in counts]


@pytest.mark.parametrize("strategy", ["oldest { max_candidate_sequences: 8 }", "direct { }"])
def test_states_of_sequences_are_kept(tmp_path: Path, native_backends: NativeBackends, strategy: str) -> None:
    with (
        native_backends.serving(write(tmp_path, "sums", SUMS.format(strategy=strategy)), "sums") as server,
        client_of(server) as client,
    ):
        # Each runs while the other one has a row of the batch.
        sums: dict[int, list[int]] = {7: [], 8: []}
        values = [3, 1, 2, 4]
        for index, value in enumerate(values):
            for sequence, found in sums.items():
                found.append(
                    number_of(
                        client,
                        "sums",
                        value * sequence,
                        sequence_id=sequence,
                        sequence_start=index == 0,
                        sequence_end=index == 3,
                    )
                )
        for sequence, found in sums.items():
            assert found == [sequence * total for total in itertools.accumulate(values)]


def test_requests_are_executed_again(tmp_path: Path, native_backends: NativeBackends) -> None:
    with (
        native_backends.serving(write(tmp_path, "again", AGAIN), "again") as server,
        client_of(server) as client,
    ):
        assert [number_of(client, "again", value) for value in (1, 2, 30)] == [1, 2, 30]


def test_requests_that_are_executed_again_keep_their_states(
    tmp_path: Path, native_backends: NativeBackends
) -> None:
    with (
        native_backends.serving(write(tmp_path, "left", LEFT), "sums") as server,
        client_of(server) as client,
    ):
        assert [number_of(client, "left", value) for value in (0, 1, 20)] == [0, 1, 20]


@pytest.mark.slow
def test_a_decoupled_backend_responds_in_each_execution(
    tmp_path: Path, native_backends: NativeBackends
) -> None:
    counts = [0, 1, 50, 7, 200]
    with (
        native_backends.serving(write(tmp_path, "steps", STEPS), "steps") as server,
        client_of(server) as client,
    ):
        assert streamed(client, "steps", np.array(counts).reshape(-1, 1, 1)) == [
            list(range(count, -1, -1)) for count in counts
        ]


@pytest.mark.slow
def test_a_decoupled_sequence_keeps_its_states(tmp_path: Path, native_backends: NativeBackends) -> None:
    config = SUMS.format(strategy="oldest { }") + "model_transaction_policy { decoupled: true }"
    values = [3, 1, 2, 4]
    with (
        native_backends.serving(write(tmp_path, "sums", config), "sums") as server,
        client_of(server) as client,
    ):
        assert streamed(client, "sums", np.array(values).reshape(-1, 1, 1), sequence_id=7) == [
            [total] for total in itertools.accumulate(values)
        ]


def test_a_backend_calls_a_model(tmp_path: Path, native_backends: NativeBackends) -> None:
    write(tmp_path, "inner", ONE_BY_ONE)
    write(tmp_path, "probe", CALLER)
    with native_backends.serving(tmp_path, "probe", "caller") as server:
        texts = [b"small", b"large" * 100_000]
        results = probed(server, *texts)
        assert [result.as_numpy("OUT").tobytes() for result in results] == texts
        parameters = results[0].get_response().parameters
        assert parameters["transaction"].int64_param == 1
        assert json.loads(parameters["config"].string_param)["backend"] == "probe"
        metadata = json.loads(parameters["metadata"].string_param)
        assert (metadata["name"], metadata["versions"]) == ("inner", ["1"])
        assert metadata["inputs"] == [{"name": "IN", "datatype": "UINT8", "shape": [1, -1]}]
        (error,) = probed(server, b"R")
        assert (error.status(), error.message()) == ("StatusCode.NOT_FOUND", "the input has an R")


@pytest.mark.slow
def test_a_backend_asks_for_facts_of_the_server(tmp_path: Path, native_backends: NativeBackends) -> None:
    write(tmp_path, "inner", ONE_BY_ONE)
    write(tmp_path, "probe", ASKER)
    (tmp_path / "absent/1").mkdir(parents=True)
    (tmp_path / "absent/config.pbtxt").write_text('backend: "absent"')
    flags = ("--exit-on-error=false", "--strict-readiness=false", "--host-policy=cpu,color=red")
    with native_backends.serving(tmp_path, "probe", "asker", flags=flags) as server:

        def asked(question: str) -> str:
            (result,) = probed(server, question.encode())
            return str(result.as_numpy("OUT").tobytes().decode())

        def served(path: str, body: bytes | None = None) -> Any:
            return json.load(urllib.request.urlopen(f"http://{server.http_address}/v2{path}", body))

        inner = urllib.request.Request(
            f"http://{server.http_address}/v2/models/inner/infer",
            json.dumps(
                {"inputs": [{"name": "IN", "datatype": "UINT8", "shape": [1, 2], "data": [1, 2]}]}
            ).encode(),
        )
        assert urllib.request.urlopen(inner).status == 200
        assert (asked("live"), asked("ready"), asked("batches")) == ("1", "1", "1")
        assert json.loads(asked("server")) == served("")
        assert json.loads(asked("model")) == served("/models/inner")
        assert json.loads(asked("config")) == served("/models/inner/config")
        statistics = json.loads(asked("statistics"))
        assert statistics == served("/models/inner/stats")
        assert statistics["model_stats"][0]["inference_count"] == 1
        everything = json.loads(asked("all statistics"))["model_stats"]
        assert [each["name"] for each in everything] == ["inner", "probe"]
        assert json.loads(asked("index")) == served("/repository/index", b"{}")
        assert json.loads(asked("ready index")) == served("/repository/index", b'{"ready": true}')
        assert 'nv_inference_count{model="inner",version="1"} 1' in asked("metrics")
        assert json.loads(asked("policy")) == {"cpu": {"color": "red"}}
        (error,) = probed(server, b"unknown")
        assert error.message() == "requested model 'unknown' is not available"


@pytest.mark.slow
def test_a_backend_loads_a_model_from_files(tmp_path: Path, native_backends: NativeBackends) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=probe")
    with (
        native_backends.serving(write(tmp_path, "probe", ASKER), "asker", flags=flags) as server,
        client_of(server) as client,
    ):
        assert probed(server, b"load")[0].as_numpy("OUT").tobytes() == b"1"
        config: Any = client.get_model_config("made", as_json=True)["config"]
        assert config["max_batch_size"] == 8
        assert probed(server, b"unload")[0].as_numpy("OUT").tobytes() == b"0"
        eventually(partial(gone, client, "made"), "it is unloaded")


@pytest.mark.parametrize("with_driver", [False, True])
def test_memory_of_gpus(
    tmp_path: Path,
    native_backends: NativeBackends,
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    with_driver: bool,
) -> None:
    if with_driver:
        for name, value in cuda.environment.items():
            monkeypatch.setenv(name, value)
    config = (
        f'{ASKER} parameters {{ key: "CONCH_PASS_ENVIRONMENT" value {{ string_value: "FAKE_CUDA_DIR" }} }}'
    )
    with native_backends.serving(write(tmp_path / "models", "probe", config), "asker") as server:

        def asked(device: int) -> tuple[str, str]:
            (result,) = probed(server, b"memory %d" % device)
            if isinstance(result, InferenceServerException):
                return str(result.status()), result.message()
            return "", result.as_numpy("OUT").tobytes().decode()

        if not with_driver:
            assert asked(0) == ("StatusCode.UNIMPLEMENTED", "Pinned memory allocation not supported")
            return
        assert asked(1) == ("", "0")
        for device in (2, -1, 64):
            refused = "GPU memory allocation failed: invalid device ordinal"
            assert asked(device) == ("StatusCode.UNAVAILABLE", refused)
        with cuda.failing("cuMemHostAlloc", 2):
            assert asked(1) == ("StatusCode.UNAVAILABLE", "Pinned memory allocation failed: out of memory")


def test_without_the_package_the_load_says_what_to_install(
    tmp_path: Path, native_backends: NativeBackends, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_backends.build("probe")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    get = backends_within(native_backends.directory, load_backend)
    spec = replace(
        make_spec(), backend="probe", directory=tmp_path, version_directory=tmp_path / "1", config={}
    )
    backend = get("probe", "", tmp_path)
    with pytest.raises(UnavailableError) as raised:
        backend.load(spec)
    assert str(raised.value) == (
        "backend 'probe' is a library compiled for Triton, which needs the package conch-native: pip install "
        "--find-links dist 'conch[native]', in a checkout after `make wheel`"
    )


@pytest.mark.slow
def test_a_large_parameter_reaches_the_client(tmp_path: Path, native_backends: NativeBackends) -> None:
    with (
        native_backends.serving(write(tmp_path, "heavy", HEAVY), "heavy") as server,
        client_of(server) as client,
    ):
        nbytes = 10 << 20
        tensor = triton.InferInput("IN", [2], "INT64")
        tensor.set_data_from_numpy(np.array([nbytes, 0]))
        result: Any = client.infer("heavy", [tensor])
        assert len(result.get_response().parameters["text"].string_param) == nbytes

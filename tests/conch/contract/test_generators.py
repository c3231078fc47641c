"""Models that stream with generators, and coroutines in flight, over gRPC."""

from __future__ import annotations

import logging
import queue
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.server_fixtures import server_fixture
from tests.support.servers import WAIT_S, AnyServer, RawClient, client_of, eventually
from tritonclient.grpc import service_pb2

STREAM = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    KIND execute(self, requests):
        counts = [int(request.inputs()[0].as_numpy()[0]) for request in requests]
        try:
            for value in range(max(counts)):
                yield [
                    pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))])
                    if value < count else None
                    for count in counts
                ]
        finally:
            pb_utils.Logger.log_info("closed")
"""

MEET = """
import asyncio
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.here = 0
        self.all_here = asyncio.Event()

    async def execute(self, requests):
        self.here += 1
        if self.here == 8:
            self.all_here.set()
        await self.all_here.wait()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])
                for request in requests]
"""

CONFIG = """
    backend: "python"
    input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
INFLIGHT = 'parameters { key: "CONCH_MAX_INFLIGHT" value { string_value: "8" } }'


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("generators")
    for name, source, config in (
        ("def", STREAM.replace("KIND", "def"), DECOUPLED),
        ("async", STREAM.replace("KIND", "async def"), DECOUPLED),
        ("meet", MEET, INFLIGHT),
    ):
        (root / name / "1").mkdir(parents=True)
        (root / name / "1/model.py").write_text(source)
        (root / name / "config.pbtxt").write_text(CONFIG + config)
    return root


server = server_fixture(flags=["--disable-auto-complete-config"], placed=True)


def tensor(value: int) -> triton.InferInput:
    made = triton.InferInput("IN", [1], "INT32")
    made.set_data_from_numpy(np.array([value], np.int32))
    return made


@pytest.mark.parametrize("name", ["def", "async"])
def test_streams(server: AnyServer, name: str) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with client_of(server) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer(name, [tensor(20)], enable_empty_final_response=True)
        values = [int(answers.get(timeout=WAIT_S).as_numpy("OUT")[0]) for _ in range(20)]
        last = answers.get(timeout=WAIT_S).get_response()
        client.stop_stream()
    assert values == list(range(20))
    assert last.parameters["triton_final_response"].bool_param


@pytest.mark.parametrize("name", ["def", "async"])
def test_a_generator_is_closed_when_its_client_goes(
    server: AnyServer, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.INFO)

    def closed() -> int:
        return caplog.messages.count("closed")

    before = closed()
    request = service_pb2.ModelInferRequest(
        model_name=name, raw_input_contents=[np.array([2**31 - 1], np.int32).tobytes()]
    )
    request.inputs.add(name="IN", datatype="INT32", shape=[1])
    with closing(RawClient(server.address)) as raw:
        call = raw.stream([request])
        assert not next(call).error_message
        call.cancel()
    eventually(lambda: closed() == before + 1, "the generator is closed")


def test_batches_in_flight_meet(server: AnyServer) -> None:
    with client_of(server) as client, ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda value: client.infer("meet", [tensor(value)]), range(8)))
        counted: Any = client.get_inference_statistics("meet").model_stats[0]
    assert [int(result.as_numpy("OUT")[0]) for result in results] == list(range(8))
    assert (counted.execution_count, counted.inference_stats.success.count) == (8, 8)

"""Calls of the probe model by raw messages, and models that answer with much."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton
from tests.support.servers import WAIT_S, ServerProcess, client_of, eventually, probe
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
FLOOD = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        block = np.zeros(65536, np.uint8)
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            for number in range(count):
                block[0] = number % 251
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", block.copy())]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FLOOD_CONFIG = """
    backend: "python"
    input { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_UINT8 dims: [ -1 ] }
    model_transaction_policy { decoupled: true }
"""


def probe_request(**orders: str) -> bytes:
    """A request for the probe model."""
    request = service_pb2.ModelInferRequest(model_name="probe", raw_input_contents=[b"\0" * 4])
    request.inputs.add(name="IN", datatype="FP32", shape=[1, 1])
    for key, value in orders.items():
        request.parameters[key].string_param = value
    return bytes(request.SerializeToString())


def counts(client: triton.InferenceServerClient, model: str = "probe") -> tuple[int, int]:
    """Requests that succeeded, and those that failed."""
    (stats,) = client.get_inference_statistics(model).model_stats
    return stats.inference_stats.success.count, stats.inference_stats.fail.count


@contextmanager
def blocked(server: ServerProcess, directory: Path) -> Iterator[None]:
    """Keeps the probe model busy."""
    running, go = directory / "blocked", directory / "unblock"
    said: list[Any] = []

    def ask() -> None:
        with client_of(server) as client:
            said.append(probe(client, parameters={"started": str(running), "wait_for": str(go)}))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        eventually(running.exists, "the model is busy")
        yield
    finally:
        go.touch()
        thread.join(WAIT_S)
    assert said


def refused(call: Any, *arguments: Any, **more: Any) -> tuple[str, str]:
    """Makes a call that must fail; gives its code and text."""
    with pytest.raises(InferenceServerException) as raised:
        call(*arguments, **more)
    return str(raised.value.status()).removeprefix("StatusCode."), str(raised.value.message())

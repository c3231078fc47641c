"""Models that all call each other, under more clients than they have instances."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.servers import client_of, serving, tensor, write_model
from tritonclient.utils import InferenceServerException

MODEL = """
import random

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.number = int(args["model_name"].removeprefix("m"))

    def execute(self, requests):
        return [self.answer(int(request.inputs()[0].as_numpy()[0, 0])) for request in requests]

    def answer(self, depth):
        if depth > 0:
            other = CHOICE
            asked = pb_utils.InferenceRequest(
                model_name=f"m{other}",
                requested_output_names=["OUT"],
                inputs=[pb_utils.Tensor("IN", np.array([[depth - 1]], np.int32))],
            )
            response = asked.exec()
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            depth += int(response.output_tensors()[0].as_numpy()[0, 0])
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[depth]], np.int32))])
"""
CONFIG = """
    backend: "python"
    max_batch_size: 4
    input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
    output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
    dynamic_batching { }
    instance_group { count: 2 kind: KIND_CPU }
    parameters { key: "CONCH_MAX_QUEUE_SIZE" value { string_value: "8" } }
"""
DEPTH = 5
DEADLINE_S = 10.0
ALLOWED = ("StatusCode.UNAVAILABLE", "StatusCode.RESOURCE_EXHAUSTED", "StatusCode.DEADLINE_EXCEEDED",
           "StatusCode.CANCELLED")  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "clients", "each"),
    [
        ("(self.number + 1) % 6", 16, 2),  # a circle, but never one that is closed
        ("random.randrange(6)", 16, 2),  # models that wait for each other, and for themselves
        pytest.param("(self.number + 1) % 6", 64, 40, marks=pytest.mark.slow),
        pytest.param("random.randrange(6)", 64, 40, marks=pytest.mark.slow),
    ],
)
def test_everybody_calls_somebody(tmp_path: Path, choice: str, clients: int, each: int) -> None:
    for number in range(6):
        write_model(tmp_path, f"m{number}", CONFIG, {"model.py": MODEL.replace("CHOICE", choice)})
    outcomes: Counter[str] = Counter()
    lock = threading.Lock()

    with serving(tmp_path) as server:

        def use(number: int) -> None:
            with client_of(server) as client:
                for turn in range(each):
                    begun = time.monotonic()
                    outcome = ask(client, (number + turn) % 6)
                    # What is late here waits for somebody else to notice that it has to end.
                    assert time.monotonic() - begun < 2 * DEADLINE_S
                    with lock:
                        outcomes[outcome] += 1

        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(use, range(clients)))
        # All have their instances again.
        with client_of(server) as client:
            for number in range(6):
                answer = client.infer(f"m{number}", depth(0), client_timeout=DEADLINE_S)
                assert answer.as_numpy("OUT").tolist() == [[0]]
            statistics = client.get_inference_statistics(as_json=True)["model_stats"]
        counted = sum(int(one["inference_stats"]["success"].get("count", 0)) for one in statistics)
    assert sum(outcomes.values()) == clients * each
    assert set(outcomes) <= {"ok", *ALLOWED}, outcomes
    assert outcomes["ok"] > 0
    # Deadlocks are found, not waited for; only who is overtaken again and again is late.
    assert outcomes["StatusCode.DEADLINE_EXCEEDED"] <= clients * each // 20, outcomes
    assert counted >= outcomes["ok"] * (DEPTH + 1)


def depth(value: int) -> list[triton.InferInput]:
    return [tensor("IN", np.array([[value]], np.int32), "INT32")]


def ask(client: triton.InferenceServerClient, number: int) -> str:
    try:
        answer = client.infer(f"m{number}", depth(DEPTH), client_timeout=DEADLINE_S)
    except InferenceServerException as error:
        return str(error.status())
    assert answer.as_numpy("OUT").tolist() == [[sum(range(DEPTH + 1))]]
    return "ok"

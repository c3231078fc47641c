"""Models that all call each other, under more clients than they have instances."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from operator import sub
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.servers import client_of, serving_process, tensor, write_model
from tests.support.waiting import PATIENCE_S
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
PROGRESS_S = PATIENCE_S
"""Longest time in which no request at all ends."""

DEADLINE_S = 300.0
"""Deadlocks are found at a rate, so that a request may wait for some hundreds before it has its turn."""

REFUSED = ("StatusCode.UNAVAILABLE", "StatusCode.RESOURCE_EXHAUSTED")
NEXT = "(self.number + 1) % MODELS"  # a circle, but no request goes all around
ANY = "random.randrange(MODELS)"  # models that wait for each other, and for themselves


@pytest.mark.parametrize(
    ("placement", "choice", "models", "clients", "each"),
    [
        ("in_process", NEXT, 6, 16, 2),
        ("in_process", ANY, 6, 16, 2),
        ("worker", ANY, 2, 16, 2),
        pytest.param("in_process", NEXT, 6, 64, 40, marks=pytest.mark.slow),
        pytest.param("in_process", ANY, 6, 64, 40, marks=pytest.mark.slow),
        pytest.param("worker", NEXT, 6, 64, 40, marks=pytest.mark.slow),
        pytest.param("worker", ANY, 6, 64, 40, marks=pytest.mark.slow),
    ],
)
def test_everybody_calls_somebody(
    tmp_path: Path, placement: str, choice: str, models: int, clients: int, each: int
) -> None:
    code = MODEL.replace("CHOICE", choice).replace("MODELS", str(models))
    for number in range(models):
        write_model(tmp_path, f"m{number}", CONFIG, {"model.py": code})
    outcomes: Counter[str] = Counter()
    lock = threading.Lock()

    with serving_process(tmp_path, flags=[f"--backend-config=python,placement={placement}"]) as server:
        ends = [time.monotonic()]

        def use(number: int) -> None:
            with client_of(server) as client:
                for turn in range(each):
                    outcome = ask(client, (number + turn) % models)
                    with lock:
                        outcomes[outcome] += 1
                        ends.append(time.monotonic())

        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(use, range(clients)))
        assert max(map(sub, ends[1:], ends)) < PROGRESS_S
        # All have their instances again.
        with client_of(server) as client:
            for number in range(models):
                answer = client.infer(f"m{number}", depth(0), client_timeout=DEADLINE_S)
                assert answer.as_numpy("OUT").tolist() == [[0]]
                if choice == NEXT:  # one alone, which meets no model twice
                    assert ask(client, number) == "ok"
            statistics = client.get_inference_statistics(as_json=True)["model_stats"]
        counted = sum(int(one["inference_stats"]["success"].get("count", 0)) for one in statistics)
    assert sum(outcomes.values()) == clients * each
    # Deadlocks are found, not waited for: no call is late.
    assert set(outcomes) <= {"ok", *REFUSED}, outcomes
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

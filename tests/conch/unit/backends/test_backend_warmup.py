"""Warm-up with the real backends: array functions and Python models."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tests.support.backend_harness import Harness, rows, tensor_specs

from conch.backends.arrays import ArrayBackend, ArrayFunction
from conch.core.errors import InvalidArgumentError
from conch.core.execution.placement import Placement
from conch.core.model_version import Model
from conch.core.spec import InstanceGroup, ModelSpec, WarmupInput, WarmupSample
from conch.core.tensor import Array
from conch.workers.python_backend import PythonBackend

INPUTS = tensor_specs(A=("FP32", (2,)), S=("BYTES", (1,)))
OUTPUTS = tensor_specs(B=("FP32", (2,)))
DATA = np.array([1, 2], np.float32).tobytes()
SAMPLE = WarmupSample(
    "w",
    (WarmupInput("A", "FP32", (2,), "FILE", DATA), WarmupInput("S", "BYTES", (1,), "FILE", b"\1\0\0\0s")),
    batch_size=3,
    count=2,
)
ZERO = WarmupSample(
    "zero sample", (WarmupInput("A", "FP32", (2,)), WarmupInput("S", "BYTES", (1,), "RANDOM"))
)


class Recording(ArrayBackend):
    """A backend whose models keep what they are given, by the name of their instance."""

    default_model_file = "model"

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Array]]] = []

    def open(self, spec: ModelSpec, placement: Placement) -> ArrayFunction:
        def function(inputs: dict[str, Array], outputs: tuple[str, ...]) -> Mapping[str, Array]:
            self.calls.append((placement.name, inputs))
            if not inputs["A"].any():
                raise ValueError("An Error Occurred")
            return {"B": inputs["A"] * 2}

        return function


def make_spec(harness: Harness, **changes: Any) -> ModelSpec:
    return harness.spec(
        inputs=INPUTS, outputs=OUTPUTS, instance_groups=(InstanceGroup("g", count=2),), **changes
    )


def test_array_functions_get_the_rows_of_a_sample_at_once(harness: Harness) -> None:
    backend = Recording()
    model = harness.load(backend, make_spec(harness), [SAMPLE])
    assert [name for name, _ in backend.calls] == ["g_0", "g_0", "g_1", "g_1"]
    for _, inputs in backend.calls:
        np.testing.assert_array_equal(inputs["A"], [[1, 2]] * 3)
        assert inputs["S"].tolist() == [[b"s"]] * 3
    assert model.statistics.snapshot().execution_count == 0
    answer = harness.infer(model, {"A": rows(4), "S": np.array([[b""]], object)})
    np.testing.assert_array_equal(answer.array("B"), rows(8))


def test_an_array_function_that_fails(harness: Harness) -> None:
    backend = Recording()
    with pytest.raises(InvalidArgumentError) as raised:
        harness.load(backend, make_spec(harness), [SAMPLE, ZERO])
    assert raised.value.message == "failed to run warmup sample 'zero sample': An Error Occurred; "
    assert [name for name, _ in backend.calls] == ["g_0"] * 3  # the second instance is not even made
    assert backend.calls[-1][1]["S"].tolist() == [[b""]]


PYTHON = """
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        self.log = open(args["model_repository"] + "/log", "a")

    def execute(self, requests):
        seen = []
        for request in requests:
            a, s = request.inputs()
            seen.append([a.as_numpy().tolist(), s.as_numpy()[0, 0].decode()])
            a.as_numpy()[...] = 7  # a model's own copy: the next run must not see it
        self.log.write(json.dumps([self.name, seen]) + "\\n")
        if not seen[0][1]:
            raise ValueError("An Error Occurred")
        return self.respond(requests)

    def respond(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("B", request.inputs()[0].as_numpy())])
                for request in requests]

    def finalize(self):
        self.log.close()
"""

SENDERS = """
        import threading
        for request in requests:
            sender = request.get_response_sender()
            a = request.inputs()[0].as_numpy()
            def send(sender=sender, a=a):
                for _ in range(2):
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("B", a)]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            threading.Thread(target=send).start()
        return None
"""


def load_python(harness: Harness, source: str, *samples: WarmupSample, **changes: Any) -> Model:
    harness.directory("m", {"1/model.py": source})
    return harness.load(PythonBackend(), make_spec(harness, **changes), samples)


def runs(harness: Harness) -> list[Any]:
    """Lines that the instances wrote; they have been closed."""
    return [json.loads(line) for line in (harness.root / "m" / "log").read_text().splitlines()]


@pytest.mark.parametrize("decoupled", [False, True])
def test_python_models(harness: Harness, decoupled: bool) -> None:
    head, tail = PYTHON.split("        return [pb_utils")
    source = f"{head}{SENDERS}\n    def finalize{tail.split('def finalize')[1]}" if decoupled else PYTHON
    model = load_python(harness, source, SAMPLE, decoupled=decoupled)
    assert model.statistics.snapshot().execution_count == 0
    harness.close()
    seen = [[[[1.0, 2.0]], "s"]] * 3
    assert runs(harness) == [["g_0", seen], ["g_0", seen], ["g_1", seen], ["g_1", seen]]


def test_a_python_model_that_fails(harness: Harness) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        load_python(harness, PYTHON, SAMPLE, ZERO)
    assert raised.value.message.replace("'g_1'", "'g_0'").startswith(  # they are made at the same time
        "failed to run warmup sample 'zero sample': Failed to process the request(s) for model 'g_0', "
        "message: ValueError: An Error Occurred"
    )
    assert raised.value.message.endswith("; ")
    ran = Counter(name for name, _ in runs(harness))  # as its finalize wrote it out
    assert 3 in ran.values() and ran.keys() <= {"g_0", "g_1"}


def test_an_error_of_a_decoupled_python_model(harness: Harness) -> None:
    source = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            error = pb_utils.TritonError("An Error Occurred")
            request.get_response_sender().send(pb_utils.InferenceResponse(error=error), flags=1)
"""
    with pytest.raises(InvalidArgumentError) as raised:
        load_python(harness, source, ZERO, decoupled=True)
    assert raised.value.message == "failed to run warmup sample 'zero sample': An Error Occurred; "


def test_a_decoupled_python_model_that_forgets_a_request_does_not_hang_the_load(harness: Harness) -> None:
    source = "class TritonPythonModel:\n    def execute(self, requests):\n        return None\n"
    with pytest.raises(InvalidArgumentError, match="dropped the response sender of a request"):
        load_python(harness, source, ZERO, decoupled=True)

"""Exceptions of models that can't say what they are: told by their type and place, as others are."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.backend_harness import Harness, one_batch, rows, tensor_specs

from conch.core.errors import NO_MESSAGE, ConchError, as_conch_error, message_of
from conch.core.model_version import Model
from conch.workers.python_backend import PythonBackend

START = """
import numpy as np
import triton_python_backend_utils as pb_utils

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class SilentOfTriton(pb_utils.TritonModelException):
    def __str__(self):
        raise SystemExit("no text")

def reply(request):
    return pb_utils.InferenceResponse([pb_utils.Tensor("B", request.inputs()[0].as_numpy())])

class TritonPythonModel:
"""

PLAIN = """
    def execute(self, requests):
        raise Silent()
"""
COROUTINE = """
    async def execute(self, requests):
        raise Silent()
"""
GENERATOR = """
    def execute(self, requests):
        yield [reply(request) for request in requests]
        raise Silent()
"""
ASYNC_GENERATOR = """
    async def execute(self, requests):
        yield [reply(request) for request in requests]
        raise Silent()
"""
OF_TRITON = """
    def execute(self, requests):
        raise SilentOfTriton()
"""


@pytest.fixture(params=["in_process", "worker"])
def placement(request: pytest.FixtureRequest) -> str:
    """Models behave the same in both places."""
    return str(request.param)


def load(harness: Harness, body: str, **changes: Any) -> Model:
    harness.directory("m", {"1/model.py": START + body})
    tensors: dict[str, Any] = {
        "inputs": tensor_specs(A=("FP32", (2,))),
        "outputs": tensor_specs(B=("FP32", (2,))),
    }
    return harness.load(PythonBackend(), harness.spec(**tensors, **changes))


def told(name: str = "Silent") -> str:
    return f"{name}: {NO_MESSAGE}\n\nAt:\n"


@pytest.mark.parametrize(
    ("body", "decoupled"),
    [
        (PLAIN, False),
        (PLAIN, True),
        (OF_TRITON, False),
        (COROUTINE, False),
        (COROUTINE, True),
        (GENERATOR, True),
        (ASYNC_GENERATOR, True),
    ],
)
def test_execute(harness: Harness, body: str, decoupled: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = load(harness, body, decoupled=decoupled, batching=one_batch(2))
    name = "SilentOfTriton" if body is OF_TRITON else "Silent"
    for _ in range(2):
        for answer in harness.batch(model, [{"A": rows(1)}, {"A": rows(2)}]):
            error = answer.wait()[-1].error
            assert error is not None
            start = f"Failed to process the request(s) for model 'm_0_0', message: {told(name)}"
            assert error.message.startswith(start)
            assert "/m/1/model.py(" in error.message and "): execute\n" in error.message
    assert f"message: {name}: {NO_MESSAGE}" in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        "    raise Silent()\n",
        "    def initialize(self, args):\n        raise Silent()\n" + PLAIN,
    ],
)
def test_loading(harness: Harness, body: str) -> None:
    with pytest.raises(ConchError) as raised:
        load(harness, body)
    assert raised.value.message.startswith(told())
    assert "/m/1/model.py(" in raised.value.message


@pytest.mark.parametrize("name", ["Silent", "SilentOfTriton"])
def test_auto_complete(harness: Harness, name: str) -> None:
    body = f"    @staticmethod\n    def auto_complete_config(config):\n        raise {name}()\n" + PLAIN
    directory = harness.directory("m", {"1/model.py": START + body})
    with pytest.raises(ConchError) as raised:
        PythonBackend().complete_config({"name": "m"}, directory / "1", {"placement": harness.placement})
    assert NO_MESSAGE in raised.value.message


def test_texts_of_exceptions() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    assert (message_of(ValueError("a")), message_of("b"), message_of(Silent())) == ("a", "b", NO_MESSAGE)
    assert as_conch_error(Silent()).message == NO_MESSAGE
    assert as_conch_error(KeyError()).message == "KeyError"

"""Bound functions as instances of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.backend import BackendInstance
from conch.core.errors import DeadlineExceededError, InternalError
from conch.core.execution.placement import Placement
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Tensor, decode_bytes
from conch.protocol.model_config_pb2 import ModelConfig
from conch_api.function_backend import BoundFunctions
from conch_api.function_repository import BoundModel
from conch_api.response_queue import ResponseQueue


def bound(spec: ModelSpec, function: Callable[..., Any]) -> BackendInstance:
    model = BoundModel(ModelConfig(name=spec.name), [function], 1)
    return BoundFunctions(spec, model).create_instance(Placement("m_0", "CPU"))


def answered(datatype: str, value: Any) -> InferenceResponse:
    """Response for a function's value of its output."""
    one = request(ResponseQueue())
    instance = bound(spec(datatype), lambda requests: [{"Y": value}])
    responses = instance.execute(Batch([one], 1))
    assert responses is not None
    response = responses[0]
    assert response is not None
    return response


@given(st.lists(st.binary() | st.text()))
def test_strings_are_bytes_as_they_were(texts: list[bytes | str]) -> None:
    wanted = [text.encode() if isinstance(text, str) else text for text in texts]
    for value in (texts, tuple(texts), np.array([*texts, None], object)[:-1]):
        (output,) = answered("BYTES", value).outputs
        assert output.numpy().tolist() == wanted
        assert list(decode_bytes(output.data)) == wanted


@pytest.mark.parametrize("value", [np.array(["a", "ß"]), np.array([b"a", "ß".encode()])])
def test_arrays_of_strings_are_bytes_too(value: Any) -> None:
    (output,) = answered("BYTES", value).outputs
    assert output.numpy().tolist() == [b"a", "ß".encode()]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([None], "output 'Y' of model 'm': it has an element of NoneType among its strings"),
        (np.array([3], object), "output 'Y' of model 'm': it has an element of int among its strings"),
        (np.zeros(1, np.float32), "has datatype FP32, but the model configuration specifies BYTES"),
    ],
)
def test_what_is_no_string_is_named(value: Any, text: str) -> None:
    error = answered("BYTES", value).error
    assert isinstance(error, InternalError)
    assert text in error.message


def test_a_string_is_no_number() -> None:
    error = answered("FP32", ["a"]).error
    assert error is not None
    assert "has datatype BYTES, but the model configuration specifies FP32" in error.message


def spec(datatype: str = "FP32", decoupled: bool = False) -> ModelSpec:
    return ModelSpec(
        name="m",
        version=1,
        platform="",
        backend="bound",
        max_batch_size=0,
        inputs=(TensorSpec("X", "FP32", (1,)),),
        outputs=(TensorSpec("Y", datatype, (-1,)),),
        directory=Path(),
        version_directory=Path(),
        model_file="",
        instance_groups=(),
        decoupled=decoupled,
    )


def request(handover: ResponseQueue) -> InferenceRequest:
    inputs = {"X": Tensor.from_array("X", np.zeros(1, np.float32))}
    return InferenceRequest("m", "", inputs, handover.put, 0)


def test_a_deadline_that_passes_while_it_yields_is_no_end() -> None:
    handover = ResponseQueue()
    late = request(handover)

    def yields(requests: list[Any]) -> Iterator[list[Any]]:
        yield [np.zeros(1, np.float32)]
        late.deadline_ns = 0
        yield [np.ones(1, np.float32)]

    bound(spec(decoupled=True), yields).execute(Batch([late], 1))
    first, second = handover.take(), handover.take()
    assert first is not None
    assert first.outputs[0].numpy().tolist() == [0.0]
    assert second is not None
    assert isinstance(second.error, DeadlineExceededError)
    assert handover.over


@pytest.mark.parametrize("decoupled", [False, True])
def test_an_exception_that_can_not_say_what_it_is(decoupled: bool) -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def fails(requests: list[Any]) -> list[Any]:
        raise Silent

    instance = bound(spec(decoupled=decoupled), fails)
    with pytest.raises(InternalError) as raised:
        instance.execute(Batch([request(ResponseQueue())], 1))
    text = "the function of model 'm' failed: Silent: <MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"
    assert raised.value.message == text

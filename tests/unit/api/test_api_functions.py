"""Bound functions as instances of a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from conch.api.backend import FunctionInstance
from conch.api.handover import Handover
from conch.core.errors import DeadlineExceededError
from conch.core.request import InferenceRequest
from conch.core.scheduler.base import Batch
from conch.core.spec import ModelSpec, TensorSpec
from conch.core.tensor import Tensor


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


def request(handover: Handover) -> InferenceRequest:
    inputs = {"X": Tensor.from_array("X", np.zeros(1, np.float32))}
    return InferenceRequest("m", "", inputs, handover.put, 0)


def test_a_deadline_that_passes_while_it_yields_is_no_end() -> None:
    handover = Handover()
    late = request(handover)

    def yields(requests: list[Any]) -> Iterator[list[Any]]:
        yield [np.zeros(1, np.float32)]
        late.deadline_ns = 0
        yield [np.ones(1, np.float32)]

    FunctionInstance(spec(decoupled=True), "m_0", yields, lambda function: None).execute(Batch([late], 1))
    first, second = handover.take(), handover.take()
    assert first is not None
    assert first.outputs[0].numpy().tolist() == [0.0]
    assert second is not None
    assert isinstance(second.error, DeadlineExceededError)
    assert handover.over

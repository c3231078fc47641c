"""Sequences in ONNX models: controls and states."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.support.backend_harness import Harness
from tests.support.sequence_models import accumulator
from tests.support.summing import CONTROLS, STATE, SUMMING, send, spec

from conch.backends import load_backend
from conch.core.errors import ConchError
from conch.core.spec import ControlTensor, SequenceBatching, StateSpec
from conch_engines.onnxruntime import OnnxRuntimeBackend


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_onnx_models_have_controls_and_states(harness: Harness, engine: str) -> None:
    harness.directory("m", {"1/model.onnx": accumulator()})
    settings = dataclasses.replace(spec(harness, SUMMING), model_file="model.onnx")
    model = harness.load(load_backend(engine), settings)
    for number, flags, expected in ((1, "S", 1), (2, "", 3), (3, "E", 6)):
        assert send(harness, model, number, 1, flags).array("OUT").item() == expected


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (
            SequenceBatching(controls=CONTROLS),
            "unable to load model 'm', configuration expects 5 inputs, model provides 6",
        ),
        (
            SequenceBatching(controls=CONTROLS, states=(StateSpec("X", "AFTER", "FP32", (1,), (1,)),)),
            "unexpected inference input 'X', allowed inputs are: BEFORE, C, E, IN, R, S",
        ),
        (
            SequenceBatching(controls=CONTROLS, states=(StateSpec("BEFORE", "X", "FP32", (1,), (1,)),)),
            "unexpected inference output 'X', allowed outputs are: AFTER, OUT, TOLD",
        ),
        (
            SequenceBatching(controls=(ControlTensor("S", "START", "FP32"), *CONTROLS[1:]), states=(STATE,)),
            "unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'S', model "
            "provides TYPE_INT32",
        ),
    ],
)
def test_onnx_models_that_do_not_fit(harness: Harness, sequence: SequenceBatching, message: str) -> None:
    harness.directory("m", {"1/model.onnx": accumulator()})
    with pytest.raises(ConchError) as raised:
        harness.load(
            OnnxRuntimeBackend(), dataclasses.replace(spec(harness, sequence), model_file="model.onnx")
        )
    assert raised.value.message == message


def test_completion_leaves_out_what_is_not_for_clients(harness: Harness) -> None:
    directory = harness.directory("m", {"1/model.onnx": accumulator()}) / "1"
    config: dict[str, Any] = {
        "name": "m",
        "sequence_batching": {
            "control_input": [{"name": name} for name in "SERC"],
            "state": [{"input_name": "BEFORE", "output_name": "AFTER"}],
        },
    }
    completed = OnnxRuntimeBackend().complete_config(config, directory, {})
    assert [entry["name"] for entry in completed["input"]] == ["IN"]
    assert [entry["name"] for entry in completed["output"]] == ["OUT", "TOLD"]
    assert completed["max_batch_size"] == 4
    assert "dynamic_batching" not in completed

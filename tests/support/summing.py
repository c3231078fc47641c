"""A spec whose models add up the numbers of a sequence, and requests for it."""

from __future__ import annotations

from typing import Any

from tests.support.backend_harness import Harness, HarnessAnswer, rows, tensor_specs

from conch.core.model_version import Model
from conch.core.spec import ControlTensor, ModelSpec, SequenceBatching, StateSpec

INPUTS = tensor_specs(IN=("FP32", (1,)))
OUTPUTS = tensor_specs(OUT=("FP32", (1,)))
STATE = StateSpec("BEFORE", "AFTER", "FP32", (1,), (1,))
CONTROLS = (
    ControlTensor("S", "START", "INT32"),
    ControlTensor("E", "END", "FP32"),
    ControlTensor("R", "READY", "BOOL"),
    ControlTensor("C", "CORRID", "UINT64"),
)
SUMMING = SequenceBatching(states=(STATE,), controls=CONTROLS)


def spec(harness: Harness, sequence: SequenceBatching, **changes: Any) -> ModelSpec:
    return harness.spec(inputs=INPUTS, outputs=OUTPUTS, sequence=sequence, **changes)


def send(
    harness: Harness, model: Model, number: float, sequence: int | str = 0, flags: str = ""
) -> HarnessAnswer:
    return harness.infer(
        model,
        {"IN": rows(number, width=1)},
        correlation_id=sequence,
        sequence_start="S" in flags,
        sequence_end="E" in flags,
    )

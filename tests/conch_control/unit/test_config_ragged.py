"""Configs with ragged inputs, batch inputs and batch outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.core.errors import InvalidArgumentError
from conch.core.spec import BatchInput, BatchOutput
from conch_control.config.model_spec import build_spec
from conch_control.config.parse import parse_config
from conch_control.config.problems import raise_first
from conch_control.config.ragged import ragged_problems

BASE = """
    name: "m" max_batch_size: 8
    input { name: "A" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
    input { name: "MAYBE" data_type: TYPE_FP32 dims: [ -1 ] optional: true }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""


def batch_input(kind: str = "BATCH_ELEMENT_COUNT", source: str = 'source_input: "A"', **more: str) -> str:
    fields = {"target_name": '"N"', "data_type": "TYPE_INT32", **more}
    said = " ".join(f"{name}: {value}" for name, value in fields.items())
    return f"batch_input {{ kind: {kind} {said} {source} }}"


def test_everything_the_core_reads(tmp_path: Path) -> None:
    config = parse_config(
        BASE
        + batch_input(target_name='[ "N", "M" ]')
        + batch_input("BATCH_ITEM_SHAPE", target_name='"S"', data_type="TYPE_FP32")
        + 'batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "OUT" source_input: "A" }',
        "c",
    )
    raise_first(ragged_problems(config))
    spec = build_spec(config, tmp_path, 1, "model", {})
    assert [tensor.ragged for tensor in spec.inputs] == [True, False]
    assert spec.batch_inputs == (
        BatchInput("BATCH_ELEMENT_COUNT", ("N", "M"), "INT32", "A"),
        BatchInput("BATCH_ITEM_SHAPE", ("S",), "FP32", "A"),
    )
    assert spec.batch_outputs == (BatchOutput("BATCH_SCATTER_WITH_INPUT_SHAPE", ("OUT",), "A"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (batch_input(source=""), "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0"),
        (
            batch_input("BATCH_ITEM_SHAPE", source='source_input: [ "A", "A" ]'),
            "batch input kind 'BATCH_ITEM_SHAPE' expects 1 source input, got 2",
        ),
        (batch_input(data_type="TYPE_INT64"), "batch input data type must be TYPE_INT32 or TYPE_FP32"),
        (batch_input(source='source_input: "UNKNOWN"'), "unknown source input name 'UNKNOWN'"),
        (
            batch_input(source='source_input: "MAYBE"'),
            "source input 'MAYBE' of batch input kind 'BATCH_ELEMENT_COUNT' must not be optional for m: a "
            "request may leave it out",
        ),
        (
            batch_input(target_name="[]"),
            "batch input kind 'BATCH_ELEMENT_COUNT' must specify 'target_name' for m",
        ),
        (
            batch_input() + batch_input(),
            "target input name 'N' of batch input kind 'BATCH_ELEMENT_COUNT' is taken by another input for "
            "m; inputs that the server makes are not listed under 'input'",
        ),
        (
            "batch_output {}",
            "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 0",
        ),
        ('batch_output { source_input: "X" }', "unknown source input name 'X'"),
        ('batch_output { source_input: "A" target_name: "X" }', "unknown target output name 'X'"),
        (
            'batch_output { source_input: "A" target_name: [ "OUT", "OUT" ] }',
            "target output name 'OUT' can only be specified once",
        ),
        (
            batch_input() + "max_batch_size: 0",
            "'batch_input' and 'batch_output' need max_batch_size > 0 for m",
        ),
    ],
)
def test_rules(text: str, message: str) -> None:
    base = BASE.replace("max_batch_size: 8", "") if "max_batch_size" in text else BASE
    with pytest.raises(InvalidArgumentError) as raised:
        raise_first(ragged_problems(parse_config(base + text, "c")))
    assert raised.value.message == message

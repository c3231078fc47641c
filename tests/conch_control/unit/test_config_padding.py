"""The parameter CONCH_PADDING: what it says, and what is said about a wrong one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conch.core.errors import InvalidArgumentError
from conch.core.padding import MadeInput, PaddedInput, PaddedOutput, Padding
from conch_control.config.padding import checked_padding
from conch_control.config.parse import parse_config
from conch_control.config.problems import result_or_raise

BASE = """
    name: "m" max_batch_size: 8 dynamic_batching { }
    input { name: "tokens" data_type: TYPE_INT64 dims: [ -1 ] }
    input { name: "image" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] }
    input { name: "flag" data_type: TYPE_BOOL dims: [ -1 ] optional: true }
    input { name: "text" data_type: TYPE_STRING dims: [ -1 ] }
    input { name: "small" data_type: TYPE_INT8 dims: [ -1 ] }
    input { name: "brain" data_type: TYPE_BF16 dims: [ -1 ] }
    input { name: "flat" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
    input { name: "turned" data_type: TYPE_FP32 dims: [ -1 ] reshape { shape: [ 1, -1 ] } }
    output { name: "logits" data_type: TYPE_FP32 dims: [ -1, 10 ] }
"""
TOKENS: dict[str, Any] = {"tokens": {"axis": 0, "to": "pow2"}}


def read(value: Any, base: str = BASE) -> Padding | None:
    text = value if isinstance(value, str) else json.dumps(value)
    config = parse_config(base, "c")
    config.parameters["CONCH_PADDING"].string_value = text
    return result_or_raise(checked_padding(config))


def test_none() -> None:
    assert result_or_raise(checked_padding(parse_config(BASE, "c"))) is None


def test_everything_it_can_say() -> None:
    padding = read(
        {
            "inputs": {
                "tokens": {
                    "axis": 0,
                    "to": [64, 16, 16],
                    "value": 3.0,
                    "lengths": {"name": "n", "data_type": "TYPE_INT32", "dims": [1]},
                    "mask": "mask",
                },
                "image": [
                    {"axis": 1, "to": {"multiple_of": 32}},
                    {"axis": 2, "to": "pow2", "value": -1, "lengths": "width"},
                ],
                "flag": {"axis": 0, "to": "pow2", "value": True},
                "text": {"axis": 0, "to": "pow2"},
            },
            "outputs": {"logits": {"axis": 0, "like": "image", "like_axis": 2}},
            "max_batch_elements": 4096,
        }
    )
    assert padding == Padding(
        (
            PaddedInput(
                "tokens", 0, (16, 64), 0, 3, MadeInput("n", "INT32", True), MadeInput("mask", "INT64")
            ),
            PaddedInput("image", 1, (), 32, 0.0),
            PaddedInput("image", 2, (), 0, -1.0, MadeInput("width")),
            PaddedInput("flag", 0, (), 0, True),
            PaddedInput("text", 0, (), 0, ""),
        ),
        (PaddedOutput("logits", 0, "image", 2),),
        4096,
    )


def tokens(**changes: Any) -> dict[str, Any]:
    rule = {**TOKENS["tokens"], **changes}
    return {"inputs": {"tokens": {key: value for key, value in rule.items() if value is not ...}}}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[" * 100_000, "not JSON: "),
        ([], "must be an object, got []"),
        ({}, "inputs: is missing; give an object"),
        ({"inputs": {}}, "inputs: name at least one input"),
        ({"inputs": 3}, "inputs: must be an object with tensor names as keys, got 3"),
        ({"input": {}}, "unknown key 'input'; did you mean 'inputs'?"),
        ({"inputs": {}, "x": 1}, "unknown key 'x'; known are inputs, outputs, max_batch_elements"),
        (tokens(axis=...), "inputs.tokens.axis: is missing; give a whole number"),
        (tokens(axis=-1), "inputs.tokens.axis: must be a whole number >= 0, got -1"),
        (tokens(axis=True), "inputs.tokens.axis: must be a whole number >= 0, got true"),
        (
            tokens(axis=1),
            "inputs.tokens.axis: dims [-1] have no axis 1; axes are counted from 0, without the batch "
            "dimension",
        ),
        (tokens(to=...), 'inputs.tokens.to: is missing; give a list of lengths, "pow2" or'),
        (tokens(to="pow3"), 'inputs.tokens.to: must be a list of lengths, "pow2" or {"multiple_of": n}, got'),
        (tokens(to=[]), "inputs.tokens.to: must be a list of lengths"),
        (tokens(to=[16, 0]), "inputs.tokens.to: must be a whole number >= 1, got 0"),
        (tokens(to={"multiple_of": 0}), "inputs.tokens.to.multiple_of: must be a whole number >= 1, got 0"),
        (tokens(value=[1]), "inputs.tokens.value: must be a number, a boolean or a string, got [1]"),
        (tokens(value=1.5), "inputs.tokens.value: 1.5 is no value of TYPE_INT64"),
        (tokens(value=2**63), f"inputs.tokens.value: {2**63} is no value of TYPE_INT64"),
        (tokens(value=10**400), "inputs.tokens.value: 1000"),
        (tokens(value="a"), "inputs.tokens.value: 'a' is no value of TYPE_INT64"),
        (tokens(mask={"name": ""}), 'inputs.tokens.mask.name: must be a tensor\'s name, got ""'),
        (tokens(mask=5), "inputs.tokens.mask: must be an object, got 5"),
        (
            tokens(mask={"name": "a", "data_type": "TYPE_FP32"}),
            'inputs.tokens.mask.data_type: must be TYPE_INT32 or TYPE_INT64, got "TYPE_FP32"',
        ),
        (
            tokens(lengths={"name": "a", "dims": [2]}),
            "inputs.tokens.lengths.dims: must be [] or [1], got [2]",
        ),
        (tokens(lengths="a", mask="a"), "'a' is made by the server, so it can't be another input as well"),
        (tokens(lengths="image"), "'image' is made by the server, so it can't be another input as well"),
        (
            {"inputs": {"token": TOKENS["tokens"]}},
            "inputs.token: the model has no input 'token'; did you mean 'tokens'?",
        ),
        (
            {"inputs": {"image": {"axis": 0, "to": "pow2"}}},
            "inputs.image.axis: axis 0 of dims [3, -1, -1] must be -1, a variable one",
        ),
        ({"inputs": {"tokens": [TOKENS["tokens"]] * 2}}, "inputs.tokens: axis 0 is given twice"),
        ({"inputs": {"brain": TOKENS["tokens"]}}, "inputs.brain: inputs of TYPE_BF16 can't be padded"),
        (
            {"inputs": {"small": {"axis": 0, "to": "pow2", "value": 128}}},
            "inputs.small.value: 128 is no value of TYPE_INT8",
        ),
        (
            {"inputs": {"flat": TOKENS["tokens"]}},
            "inputs.flat: a ragged input is not padded; drop 'allow_ragged_batch'",
        ),
        ({"inputs": {"turned": TOKENS["tokens"]}}, "inputs.turned: a tensor with a reshape can't be padded"),
        (
            {"inputs": {"text": {"axis": 0, "to": "pow2", "value": 7}}},
            "inputs.text.value: 7 is no value of TYPE_STRING",
        ),
        (
            {"inputs": TOKENS, "outputs": {"logit": {"axis": 0, "like": "tokens"}}},
            "outputs.logit: the model has no output 'logit'; did you mean 'logits'?",
        ),
        (
            {"inputs": TOKENS, "outputs": {"logits": {"axis": 1, "like": "tokens"}}},
            "outputs.logits.axis: axis 1 of dims [-1, 10] must be -1, a variable one",
        ),
        (
            {"inputs": TOKENS, "outputs": {"logits": {"axis": 0, "like": "token"}}},
            "outputs.logits.like: 'token' is not padded; padded are tokens; did you mean 'tokens'?",
        ),
        (
            {"inputs": TOKENS, "outputs": {"logits": {"axis": 0, "like": "tokens", "like_axis": 1}}},
            "outputs.logits.like_axis: 'tokens' is not padded along 1",
        ),
        (
            {
                "inputs": {"image": [{"axis": 1, "to": "pow2"}, {"axis": 2, "to": "pow2"}]},
                "outputs": {"logits": {"axis": 0, "like": "image"}},
            },
            "outputs.logits: 'image' is padded along several axes; say which with 'like_axis'",
        ),
        (
            {
                "inputs": {"flag": {"axis": 0, "to": "pow2"}},
                "outputs": {"logits": {"axis": 0, "like": "flag"}},
            },
            "outputs.logits.like: input 'flag' must not be optional: its length is needed",
        ),
        (
            {"inputs": TOKENS, "max_batch_elements": -1},
            "max_batch_elements: must be a whole number >= 0, got -1",
        ),
    ],
)
def test_mistakes_are_named(value: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        read(value)
    start = "parameter 'CONCH_PADDING' of model 'm': "
    assert raised.value.message.startswith(start + message)


def test_a_budget_needs_the_dynamic_batcher() -> None:
    with pytest.raises(InvalidArgumentError, match="max_batch_elements: needs 'dynamic_batching'"):
        read({"inputs": TOKENS, "max_batch_elements": 5}, BASE.replace("dynamic_batching { }", ""))


def test_only_for_models_that_batch() -> None:
    with pytest.raises(InvalidArgumentError, match="padding is for models with max_batch_size > 0"):
        read({"inputs": TOKENS}, BASE.replace("max_batch_size: 8", ""))


@pytest.mark.parametrize(
    ("rule", "lengths"),
    [
        (PaddedInput("x", 0, (4, 9)), {0: 4, 1: 4, 4: 4, 5: 9, 9: 9, 10: None}),
        (PaddedInput("x", 0), {0: 1, 1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 1025: 2048}),
        (PaddedInput("x", 0, (), 6), {0: 6, 1: 6, 6: 6, 7: 12}),
    ],
)
def test_buckets(rule: PaddedInput, lengths: dict[int, int | None]) -> None:
    assert {length: rule.padded(length) for length in lengths} == lengths

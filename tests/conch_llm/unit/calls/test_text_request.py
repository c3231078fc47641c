"""Tensors and parameters from prompts and fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.core import make_spec

from conch.core.spec import ModelSpec, TensorSpec
from conch_llm.calls.generation import FieldError, GenerationCall
from conch_llm.calls.text_request import TextRequest, text_request
from conch_llm.contract import CHAT, COMPLETIONS

PICTURE = {"type": "image_url", "image_url": {"url": "data:;base64,AA"}}
TEXT = TensorSpec("text_input", "BYTES", (1,))


def spec_of(*inputs: TensorSpec, batch: int = 0, outputs: tuple[str, ...] = ()) -> ModelSpec:
    found = tuple(TensorSpec(name, "BYTES", (-1,)) for name in ("text_output", *outputs))
    return make_spec(batch, (TEXT, *inputs), found, decoupled=True)


def made(spec: ModelSpec, choice: int = 0, route: str = COMPLETIONS, **fields: Any) -> TextRequest:
    call = GenerationCall(route, fields, b"", ["hi"], 1, 12, "id", "adapter")
    return text_request(spec, "text_input", call, "hi", choice)


@given(st.sampled_from([(1,), (-1,), (1, 1), (-1, 1)]), st.sampled_from([0, 4]))
def test_a_value_has_the_shape_of_the_config(dims: tuple[int, ...], batch: int) -> None:
    rules = (TensorSpec("max_tokens", "INT32", dims), TensorSpec("temperature", "BF16", dims))
    inputs = made(spec_of(*rules, batch=batch), temperature=0.5).inputs
    ones = (1,) * (len(dims) + (batch > 0))
    assert [inputs[rule.name].shape for rule in rules] == [ones, ones]
    assert inputs["max_tokens"].numpy().ravel().tolist() == [12]
    assert inputs["temperature"].data == b"\x00\x3f"


@pytest.mark.parametrize(
    ("field", "name", "datatype", "value", "expected"),
    [
        ("top_p", "runtime_top_p", "FP32", 0.5, [0.5]),
        ("seed", "random_seed", "UINT64", -1, [2]),
        ("stop", "stop_words", "BYTES", ["a", "ü"], [b"a", "ü".encode()]),
        ("presence_penalty", "sampling_param_presence_penalty", "FP64", 1.0, [1.0]),
        ("stop_token_ids", "stop_token_ids", "INT64", [1, 2], [1, 2]),
    ],
)
def test_inputs_have_several_names(field: str, name: str, datatype: str, value: Any, expected: Any) -> None:
    spec = spec_of(TensorSpec(name, datatype, (-1,), optional=True), batch=2)
    request = made(spec, 3, **{field: value})
    assert request.inputs[name].numpy().tolist() == [expected]
    assert field not in request.parameters


def test_what_has_no_input_is_a_parameter() -> None:
    request = made(spec_of(), 2, temperature=0.5, seed=1, stop=["a"], ignore_eos=True)
    assert request.parameters == {
        "temperature": 0.5,
        "seed": 3,
        "stop": '["a"]',
        "ignore_eos": True,
        "max_tokens": 12,
        "lora_name": "adapter",
    }


def test_the_form_of_vllm_is_json() -> None:
    flags = ("stream", "exclude_input_in_output", "return_logprobs", "return_num_output_tokens")
    rules = [TensorSpec(name, "BOOL", (1,), optional=True) for name in flags]
    spec = spec_of(
        TensorSpec("sampling_parameters", "BYTES", (1,), optional=True), *rules, outputs=("logprobs",)
    )
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    request = made(
        spec, 1, CHAT, seed=4, n=2, stream=True, stop=["a"], logprobs=True, response_format=form, user="me"
    )
    assert json.loads(request.inputs["sampling_parameters"].numpy()[0]) == {
        "seed": 5,
        "stop": ["a"],
        "logprobs": 1,
        "max_tokens": 12,
        "structured_outputs": json.dumps({"json": schema}),
        "lora_name": "adapter",
    }
    assert all(request.inputs[name].numpy().tolist() == [True] for name in flags)
    assert not request.parameters


def test_schemas_reach_inputs_for_guides() -> None:
    names = ("guided_decoding_guide_type", "guided_decoding_guide")
    spec = spec_of(*[TensorSpec(name, "BYTES", (1,), optional=True) for name in names])
    inputs = made(spec, structured_outputs={"regex": "a+"}).inputs
    assert [inputs[name].numpy()[0] for name in names] == [b"regex", b"a+"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs"),
        ({"logprobs": 2}, "logprobs"),
        ({"prompt_logprobs": 2}, "prompt_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"messages": [{"content": [PICTURE]}]}, "messages"),
    ],
)
def test_what_a_model_can_not_do_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError, match=param) as refused:
        made(spec_of(), **fields)
    assert refused.value.param == param


def test_a_required_input_that_nothing_fills_is_named() -> None:
    with pytest.raises(FieldError, match="required input 'beam_width'"):
        made(spec_of(TensorSpec("beam_width", "INT32", (1,))))

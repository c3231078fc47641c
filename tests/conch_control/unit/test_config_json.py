from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.json_format import from_json, parse_override, to_json
from conch_control.config.lenient_json import parse_lenient
from conch_control.config.parse import parse_config

EVERYTHING = """
name: "m" backend: "b" max_batch_size: 4
version_policy { specific { versions: [ 1, 9007199254740993 ] } }
input { name: "X" data_type: TYPE_FP32 dims: [ -1, 3 ] reshape { shape: [ 3, -1 ] } }
dynamic_batching {
  max_queue_delay_microseconds: 7
  priority_queue_policy { key: 2 value { max_queue_size: 1 } }
}
instance_group { count: 2 secondary_devices { device_id: 5 } }
parameters { key: "k" value { string_value: "v" } }
metric_tags { key: "a" value: "b" }
"""


def test_prints_defaults_names_and_numbers() -> None:
    data = to_json(parse_config(EVERYTHING, "c"))
    assert list(data)[:5] == ["name", "platform", "backend", "runtime", "version_policy"]
    assert data["version_policy"] == {"specific": {"versions": [1, 9007199254740993]}}
    assert data["input"] == [
        {
            "name": "X",
            "data_type": "TYPE_FP32",
            "format": "FORMAT_NONE",
            "dims": [-1, 3],
            "reshape": {"shape": [3, -1]},
            "is_shape_tensor": False,
            "allow_ragged_batch": False,
            "optional": False,
            "is_non_linear_format_io": False,
        }
    ]
    batching = data["dynamic_batching"]
    assert batching["max_queue_delay_microseconds"] == 7
    assert batching["priority_queue_policy"]["2"]["default_timeout_microseconds"] == 0
    assert data["parameters"] == {"k": {"string_value": "v"}}
    assert data["runtime"] == ""
    assert "sequence_batching" not in data


def test_keeps_the_paths_that_triton_leaves_as_strings() -> None:
    assert to_json(parse_config(EVERYTHING, "c"))["instance_group"][0]["secondary_devices"] == [
        {"kind": "KIND_NVDLA", "device_id": "5"}
    ]


def test_round_trip() -> None:
    config = parse_config(EVERYTHING, "c")
    assert from_json(to_json(config)) == config


def test_reads_enums_in_any_case_and_numbers_as_strings() -> None:
    data = {"input": [{"name": "X", "data_type": "type_fp32", "dims": ["2", 3]}]}
    assert from_json(data) == parse_config('input { name: "X" data_type: TYPE_FP32 dims: [ 2, 3 ] }', "c")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"max_batch": 1}, "did you mean 'max_batch_size'?"),
        ({"input": [{"dim": [1]}]}, "did you mean 'dims'?"),
        ({"input": [{"data_type": "TYPE_FP23"}]}, "did you mean 'TYPE_FP32'?"),
        ({"input": 3}, "repeated field input must be in []"),
        ({"max_batch_size": 1.5}, "Couldn't parse integer"),
        (None, "not iterable"),
    ],
)
def test_refuses_what_is_no_config(data: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        from_json(data)
    assert message in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Unexpected end of string. Expected a value. (line 1, column 1)"),
        ("{", "Expected an object key or }. (line 1, column 2)"),
        ("[]", "Root element must be a message."),
        ("3", "Root element must be a message."),
        ("null", "Root element must be a message."),
        ("[" * 100_000, "Message too deep."),
        ('{"x": 1}', 'no field named "x"'),
        ('{"name": "m"} x', "Parsing terminated before end of input. (line 1, column 15)"),
        ('{"name": "m",\n ,}', "Expected an object key or }. (line 2, column 2)"),
        ('{"input": [{"dims": [1,,]}]}', "Unexpected token."),
        ('{"name": "m" "backend": "b"}', "Expected , or } after key:value pair."),
        ("{true: 1}", "Expected an object key or }."),
        ("{name: m}", "Unexpected token."),
        ("{a.b: 1}", "Expected : between key:value pair."),
        ("{max_batch_size: 010}", "Octal/hex numbers are not valid JSON values."),
        ("{max_batch_size: +1}", "Expected a value."),
        ("{max_batch_size: NaN}", "Unexpected token."),
        ("{/* no */ max_batch_size: 1}", "Expected an object key or }."),
        ('{"name": "m', "Closing quote expected in string."),
        ('{"name": "\\u12"}', "Illegal hex string."),
        ('{"name": "\\ud800"}', "Invalid surrogate pair."),
        ('{"dynamic_batching": []}', "dynamic_batching: Proto field is not repeating, cannot start list."),
        ('{"parameters": [{"key": "k"}]}', "parameters must be in a dict"),
        ("{dynamic_batching: {}, sequence_batching: {}}", "scheduling_choice"),
    ],
)
def test_bad_override(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^Invalid config override: ") as raised:
        parse_override(text)
    assert message in raised.value.message


@pytest.mark.parametrize(
    "text",
    [
        "{name: 'm', input: {name: 'X', data_type: 'type_fp32', dims: [[2], 3]}, instance_group: {count: 2}}",
        """{"name": "m", "input": [{"name": "X", "dataType": "TYPE_FP32", "dims": [2, 3,],},],
            "instanceGroup": [{"count": "2",}],}""",
        """{"name": "n", "instance_group": {"count": 2.0}, "name": "m", "input": {"name": "X",
            "data_type": 11, "dims": 2, "dims": 3}, "instance_group": [], "instance_group": null}""",
    ],
)
def test_overrides_are_read_as_leniently_as_triton_does(text: str) -> None:
    assert parse_override(text) == parse_config(
        'name: "m" input { name: "X" data_type: TYPE_FP32 dims: [ 2, 3 ] } instance_group { count: 2 }', "c"
    )


def test_the_same_message_twice_is_one() -> None:
    text = """{dynamic_batching: {preserve_ordering: 'true'}, "dynamicBatching": {priority_levels: 2},
        parameters: {k: {string_value: 'a\nb\\u0041\\x'}}, parameters: {'l': {}, 'l': {string_value: "v"}}}"""
    assert parse_override(text) == parse_config(
        """dynamic_batching { preserve_ordering: true priority_levels: 2 }
        parameters { key: "k" value { string_value: "a\\nbAx" } }
        parameters { key: "l" value { string_value: "v" } }""",
        "c",
    )


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20,
))  # fmt: skip
def test_json_is_read_as_ever(value: Any) -> None:
    assert parse_lenient(json.dumps(value, indent=1)) == value
    assert parse_lenient(json.dumps(value, ensure_ascii=False)) == value


def test_override() -> None:
    assert parse_override('{"name": "m", "max_batch_size": "3"}') == ModelConfig(name="m", max_batch_size=3)

from __future__ import annotations

from typing import Any

import pytest

from conch.core.errors import InvalidArgumentError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.jsonform import from_json, parse_override, to_json
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


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"x": 1}', "[" * 100_000])
def test_bad_override(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^Invalid config override: "):
        parse_override(text)


def test_override() -> None:
    assert parse_override('{"name": "m", "max_batch_size": "3"}') == ModelConfig(name="m", max_batch_size=3)

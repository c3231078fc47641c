from __future__ import annotations

from pathlib import Path

import pytest

from conch.core.errors import InternalError, InvalidArgumentError
from conch_control.config.parse import parse_config, read_config


def test_reads_comments_lists_and_joined_strings() -> None:
    config = parse_config('name: "a" "b" # comment\ninput [ { name: "X" dims: [ 2, -1 ] } ]', "c")
    assert config.name == "ab"
    assert list(config.input[0].dims) == [2, -1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'name: "a"\n  max_batch: 3',
            'm.pbtxt:2:3: Message type "inference.ModelConfig" has no field named "max_batch"; did you mean '
            "'max_batch_size'?",
        ),
        (
            "input [ { dim: 3 } ]",
            'm.pbtxt:1:11: Message type "inference.ModelInput" has no field named "dim"; did you mean '
            "'dims'?",
        ),
        ("qqqq: 1", 'm.pbtxt:1:1: Message type "inference.ModelConfig" has no field named "qqqq".'),
        (
            "input { data_type: TYPE_FP23 }",
            "m.pbtxt:1:20: 'input { data_type: TYPE_FP23 }': Enum type \"inference.DataType\" has no value "
            "named TYPE_FP23; did you mean 'TYPE_FP32'?",
        ),
        ('name: "a"\nname: "b"', "should not have multiple"),
        ("dynamic_batching {}\nsequence_batching {}", "another member of oneof"),
        ("input { dims: [ 1, ] }", "m.pbtxt:1:20: "),
        ('input [ { name: "X"', "m.pbtxt:1:"),
    ],
)
def test_says_where_and_what(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        parse_config(text, "m.pbtxt")
    assert message in raised.value.message


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    with pytest.raises(InternalError) as raised:
        read_config(path)
    assert raised.value.message == f"failed to open text file for read {path}: No such file or directory"


def test_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b"name: '\xff'")
    with pytest.raises(InvalidArgumentError, match="not UTF-8"):
        read_config(path)

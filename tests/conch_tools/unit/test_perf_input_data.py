"""Entries of data files and directories."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from conch_tools.perf.load.input_data import DataError, InputRule, read_files


@pytest.mark.parametrize("member", ["timestamp", "delay", "session_id"])
def test_refuses_times_of_entries_unless_they_are_inputs(member: str, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"data": [{"IN": [1], member: [7]}]}))
    rules = [InputRule("IN", "INT32", (1,))]
    with pytest.raises(DataError, match=rf"data\[0\] has '{member}'.*remove it"):
        read_files([path], rules, [], 1, batched=False)
    ((row,),) = read_files([path], [*rules, InputRule(member, "INT32", (1,))], [], 1, batched=False)
    assert [tensor.name for tensor in row.tensors] == ["IN", member]


def test_a_directory_has_a_file_for_each_input(tmp_path: Path) -> None:
    (tmp_path / "NUMBERS").write_bytes(struct.pack("<4h", 1, 2, 3, 4))
    (tmp_path / "TEXTS").write_bytes(b"one\ntw\xff\n")
    rules = [
        InputRule("NUMBERS", "INT16", (-1, 2)),
        InputRule("TEXTS", "BYTES", (2,)),
        InputRule("MORE", "FP32", (1,), optional=True),
    ]
    (tmp_path / "OUT").write_bytes(b"ab")
    ((row,),) = read_files([tmp_path], rules, [InputRule("OUT", "UINT8", (-1,))], 2, batched=True)
    assert row.expected == {"OUT": b"abab"}
    texts = b"\x03\0\0\0one\x03\0\0\0tw\xff"
    assert [(each.name, each.shape, each.data) for each in row.tensors] == [
        ("NUMBERS", (2, 2, 2), struct.pack("<8h", 1, 2, 3, 4, 1, 2, 3, 4)),
        ("TEXTS", (2, 2), texts * 2),
    ]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"IN": b"1234", "OUT": b""}, "OUT is none of the model's tensors IN: remove it"),
        ({}, "lacks a file 'IN'"),
        ({"IN": b"123"}, "IN has 3 bytes, which is no whole number of INT16"),
        ({"IN": b"12345678"}, "IN has 4 elements, which is no shape of dims"),
    ],
)
def test_refuses_directories_that_do_not_fit(files: dict[str, bytes], problem: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem):
        read_files([tmp_path], [InputRule("IN", "INT16", (2,))], [], 1, batched=False)


_ROW: dict[str, Any] = {"IN": [1]}
_OUT: dict[str, Any] = {"OUT": ["a", "bc"]}


@pytest.mark.parametrize(
    ("data", "validation", "lengths"),
    [
        ([_ROW, _ROW], [_OUT, _OUT], [2]),
        ([[_ROW, _ROW], [_ROW]], [[_OUT, _OUT], [_OUT]], [2, 1]),
        ([_ROW, _ROW], [_OUT], None),
        ([[_ROW]], [_OUT, _OUT], None),
        ([_ROW], [{"ELSE": [1]}], None),
    ],
)
def test_expected_outputs_stand_beside_their_inputs(
    data: list[Any], validation: list[Any], lengths: list[int] | None, tmp_path: Path
) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"data": data, "validation_data": validation}))
    inputs, outputs = [InputRule("IN", "INT8", (1,))], [InputRule("OUT", "BYTES", (-1,), optional=True)]
    if lengths is None:
        with pytest.raises(DataError, match="validation_data"):
            read_files([path], inputs, outputs, 1, batched=True)
        return
    sequences = read_files([path], inputs, outputs, 1, batched=True)
    assert [len(rows) for rows in sequences] == lengths
    wanted = {"OUT": b"\x01\0\0\0a\x02\0\0\0bc"}
    assert all(row.expected == wanted for rows in sequences for row in rows)

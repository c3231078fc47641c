"""Entries of data files and directories."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from conch_tools.perf.load.input_data import DataError, InputRule, read_files


@pytest.mark.parametrize("member", ["timestamp", "delay", "session_id"])
def test_refuses_times_of_entries_unless_they_are_inputs(member: str, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"data": [{"IN": [1], member: [7]}]}))
    rules = [InputRule("IN", "INT32", (1,))]
    with pytest.raises(DataError, match=rf"data\[0\] has '{member}'.*remove it"):
        read_files([path], rules, 1, batched=False)
    ((tensors,),) = read_files([path], [*rules, InputRule(member, "INT32", (1,))], 1, batched=False)
    assert [tensor.name for tensor in tensors] == ["IN", member]


def test_a_directory_has_a_file_for_each_input(tmp_path: Path) -> None:
    (tmp_path / "NUMBERS").write_bytes(struct.pack("<4h", 1, 2, 3, 4))
    (tmp_path / "TEXTS").write_bytes(b"one\ntw\xff\n")
    rules = [
        InputRule("NUMBERS", "INT16", (-1, 2)),
        InputRule("TEXTS", "BYTES", (2,)),
        InputRule("MORE", "FP32", (1,), optional=True),
    ]
    ((tensors,),) = read_files([tmp_path], rules, 2, batched=True)
    texts = b"\x03\0\0\0one\x03\0\0\0tw\xff"
    assert [(each.name, each.shape, each.data) for each in tensors] == [
        ("NUMBERS", (2, 2, 2), struct.pack("<8h", 1, 2, 3, 4, 1, 2, 3, 4)),
        ("TEXTS", (2, 2), texts * 2),
    ]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"IN": b"1234", "OUT": b""}, "OUT is no input of the model, which has IN: remove it"),
        ({}, "lacks a file 'IN'"),
        ({"IN": b"123"}, "IN has 3 bytes, which is no whole number of INT16"),
        ({"IN": b"12345678"}, "IN has 4 elements, which is no shape of dims"),
    ],
)
def test_refuses_directories_that_do_not_fit(files: dict[str, bytes], problem: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem):
        read_files([tmp_path], [InputRule("IN", "INT16", (2,))], 1, batched=False)

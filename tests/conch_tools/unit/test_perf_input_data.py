"""Entries of data files."""

from __future__ import annotations

import json
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

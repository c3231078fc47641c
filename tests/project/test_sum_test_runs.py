"""Tests that failed beside others are named, and fail CI only if they fail alone too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripts import sum_test_runs

BESIDE = "failed beside other tests, passed alone, is to be mended: "


def run(status: int, passed: int, *failed: str) -> dict[str, Any]:
    return {"status": status, "passed": passed, "failed": failed}


@pytest.mark.parametrize(
    ("first", "again", "status", "says"),
    [
        ([run(0, 5), run(0, 2)], [run(5, 0)], 0, ["7 passed, 0 failed"]),
        ([run(1, 4, "a"), run(0, 2)], [run(0, 1)], 0, [BESIDE + "a", "7 passed, 0 failed"]),
        (
            [run(1, 4, "a"), run(1, 1, "b")],
            [run(1, 1, "b")],
            1,
            [BESIDE + "a", "failed: b", "6 passed, 1 failed"],
        ),
        # A run that broke off, one that is missing, and a failure that was not run again.
        ([run(0, 5), run(3, 2)], [run(5, 0)], 1, ["1 of 2 runs came to their end", "7 passed, 0 failed"]),
        ([run(0, 5)], [run(5, 0)], 1, ["1 of 2 runs came to their end", "5 passed, 0 failed"]),
        ([run(1, 4, "a"), run(0, 2)], [], 1, ["failed: a", "6 passed, 1 failed"]),
    ],
)
def test_runs_are_summed_up(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    first: list[dict[str, Any]],
    again: list[dict[str, Any]],
    status: int,
    says: list[str],
) -> None:
    for name, runs in (("first", first), ("again", again)):
        if runs:
            (tmp_path / name).write_text("".join(f"{json.dumps(each)}\n" for each in runs))
    with pytest.raises(SystemExit) as ended:
        sum_test_runs.main("2", str(tmp_path / "first"), str(tmp_path / "again"))
    assert ended.value.code == status
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(says)
    assert all(text in line for text, line in zip(says, printed, strict=True))

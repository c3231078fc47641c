"""`conch trace summary`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.support.tracing import TraceMaker, setting_of
from tests.support.waiting import PATIENCE_S

from conch.cli import main
from conch.observability.exporters import DropCounter
from conch.observability.tracing.trace_file import TraceFile


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two indexed files of one server: two requests, then a slower one with a step."""
    setting, maker = setting_of(file=str(tmp_path / "t"), log_frequency=2), TraceMaker()
    roots = [maker.root(setting) for _ in range(3)]
    roots[2].sends, roots[2].request_id = [1090, 9000], "slow"
    maker.child(roots[2])
    file = TraceFile(DropCounter())
    file.write(roots)
    file.close(time.monotonic() + PATIENCE_S)
    return [str(tmp_path / "t.0"), str(tmp_path / "t.1")]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["trace", "summary", *arguments])
    return code, *capsys.readouterr()


def test_tables_of_indexed_files(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, *files, "--slowest", "1")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if "|" in line]
    assert code == 0
    assert ["simple", "1", "total", "3", "2.7", "0.1", "8.0", "8.0"] in rows
    assert ["step", "1", "total", "1", "0.1", "0.1", "0.1", "0.1"] in rows
    (slowest,) = [row for row in rows if "slow" in row]
    assert slowest[:5] == [files[1], "3", "simple", "slow", "8.0"]


def test_json_says_the_same(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, *files, "--json", "--waterfall", "3", "--slowest", "1")
    content = json.loads(output)
    assert code == 0
    assert [(each["model"], each["version"]) for each in content["models"]] == [("simple", 1), ("step", 1)]
    assert content["models"][0]["stages"]["queue"] == {
        "count": 3,
        "mean_us": 0.01,
        "p50_us": 0.01,
        "p99_us": 0.01,
        "max_us": 0.01,
    }
    assert content["slowest"][0]["id"] == content["waterfall"]["id"] == 3
    assert content["waterfall"]["rows"][0]["duration_us"] == 8.0


def test_waterfalls_as_text_and_picture(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "slow.svg"
    code, output, _ = run(capsys, *files, "--svg", str(picture))
    assert (code, "Slowest requests" in output) == (0, True)
    assert "trace 3 of simple (1), request id slow" in picture.read_text()
    code, output, _ = run(capsys, *files, "--waterfall", "1")
    assert (code, output.splitlines()[0]) == (0, "trace 1 of simple (1)")


def test_errors_name_the_file_or_the_flag(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refused = {
        (files[0], "--waterfall", "9"): (2, "--waterfall: no file has a trace 9"),
        (files[0], files[0], "--waterfall", "1"): (
            2,
            f"--waterfall: there is a trace 1 in {files[0]} and {files[0]}; give one of them",
        ),
        ("/dev/null",): (1, "/dev/null:1:1: not a trace file: Expecting value"),
        (files[0], "--svg", "/nowhere/x"): (1, "--svg: /nowhere/x: No such file or directory"),
    }
    for arguments, (code, text) in refused.items():
        assert run(capsys, *arguments) == (code, "", f"conch trace: {text}\n")

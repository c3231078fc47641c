"""Reports of a test run: times of tests and folders, and a record for `scripts/sum_test_runs.py`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

SLOWEST = 20


def report_times(terminal: Any) -> None:
    """Prints the slowest tests and the seconds of each folder's tests; the machine decides much of them."""
    taken: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    for reports in terminal.stats.values():
        for report in reports:
            if hasattr(report, "duration") and hasattr(report, "nodeid"):
                taken[report.nodeid] += report.duration
                folders["/".join(report.nodeid.partition("::")[0].split("/")[1:-1][:3])] += report.duration
    terminal.section(f"slowest {SLOWEST} tests")
    for test, seconds in taken.most_common(SLOWEST):
        terminal.write_line(f"{seconds:8.2f} s  {test}")
    terminal.section("seconds of each folder")
    for folder, seconds in sorted(folders.items()):
        terminal.write_line(f"{seconds:8.1f} s  {folder}")


def record(terminal: Any, status: int, path: Path) -> None:
    """Appends a line of JSON about the run to a file.

    Args:
        terminal: pytest's terminal reporter.
        status: Exit status of pytest.
        path: The file.
    """
    failed = {report.nodeid for kind in ("failed", "error") for report in terminal.stats.get(kind, ())}
    passed = len(terminal.stats.get("passed", ()))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        print(json.dumps({"status": int(status), "passed": passed, "failed": sorted(failed)}), file=file)

"""What the tests of a run took: the slowest, and each folder beside its budget."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

SLOWEST = 20
TOLERANCE = 1.5
"""A budget is passed by half where a run takes this many times as long; machines differ by less."""

BUDGETS = Path(__file__).parents[1] / "budgets.toml"


def durations(terminal: Any) -> Counter[str]:
    """Seconds of each test with its fixtures, by node id."""
    taken: Counter[str] = Counter()
    for reports in terminal.stats.values():
        for report in reports:
            if hasattr(report, "duration") and hasattr(report, "nodeid"):
                taken[report.nodeid] += report.duration
    return taken


def folders(taken: Counter[str], budgets: dict[str, float]) -> Counter[str]:
    """Seconds by folder, each test in the innermost folder that has a budget."""
    totals: Counter[str] = Counter(dict.fromkeys(budgets, 0))
    for test, seconds in taken.items():
        within = [folder for folder in budgets if test.startswith(f"{folder}/")]
        totals[max(within, key=len, default="elsewhere")] += seconds
    return totals


def report(terminal: Any, part: str) -> list[str]:
    """Prints the slowest tests and the folders; returns those whose budget is passed by half.

    Args:
        terminal: pytest's terminal reporter.
        part: Which budgets hold: "quick", "all" or "grpcio".
    """
    taken = durations(terminal)
    terminal.section(f"slowest {SLOWEST} tests")
    for test, seconds in taken.most_common(SLOWEST):
        terminal.write_line(f"{seconds:8.2f} s  {test}")
    budgets: dict[str, float] = tomllib.loads(BUDGETS.read_text())[part]
    terminal.section("seconds of each folder, and its budget")
    over = []
    for folder, seconds in sorted(folders(taken, budgets).items()):
        budget = budgets.get(folder, 0)
        passed = seconds > TOLERANCE * budget
        terminal.write_line(f"{seconds:8.1f} / {budget:5.0f}  {folder}{'  OVER' if passed else ''}")
        if passed:
            over.append(folder)
    return over

"""Sums up test runs: ``python scripts/sum_test_runs.py RUNS FILE REPETITIONS``.

FILE has a line for each of RUNS runs; REPETITIONS for those that ran again, alone, what had failed (see
`tests.support.run_report`). Names each test that failed beside others. Ends with 1 if one has not passed
alone, or if a run has not come to its end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COMPLETE = (0, 1)
"""Exit statuses of pytest after all tests have run."""
NONE = 5
"""Exit status of pytest where no test was to run."""


def main(runs: str, first: str, again: str) -> None:
    """Prints the names and the sum; ends with 1 if the tests have failed."""
    results, repetitions = lines(first), lines(again)
    beside = {test for run in results for test in run["failed"]}
    failed = {test for run in repetitions for test in run["failed"]}
    passed_again = sum(run["passed"] for run in repetitions)
    ended = all(run["status"] in (*COMPLETE, NONE) for run in repetitions)
    if not ended or passed_again + len(failed) < len(beside):
        failed |= beside  # some have not run again
    for test in sorted(beside - failed):
        print(f"failed beside other tests, passed alone, is to be mended: {test}")
    for test in sorted(failed):
        print(f"failed: {test}")
    complete = sum(run["status"] in COMPLETE for run in results)
    if complete != int(runs):
        print(f"{complete} of {runs} runs came to their end")
    print(f"{sum(run['passed'] for run in results) + passed_again} passed, {len(failed)} failed")
    sys.exit(1 if failed or not ended or complete != int(runs) else 0)


def lines(path: str) -> list[dict[str, Any]]:
    """Records in a file, which is absent if there was no run."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if Path(path).exists() else []


if __name__ == "__main__":
    main(*sys.argv[1:])

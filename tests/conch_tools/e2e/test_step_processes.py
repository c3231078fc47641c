"""Processes of steps: their ends, and the time that they have."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from conch_tools.optimize.step_processes import ProcessFailedError, last_lines, run_process

pytestmark = pytest.mark.process

SLEEPS = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '600'])"


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("print('a'); print('b'); raise SystemExit(3)", "its process ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "its process was killed by SIGKILL; the kernel does so where"),
        (SLEEPS, "it did not end within 2 s"),
    ],
)
def test_ends(tmp_path: Path, program: str, text: str) -> None:
    log = tmp_path / "log.txt"
    with pytest.raises(ProcessFailedError, match=text):
        run_process(
            [sys.executable, "-c", program], tmp_path, dict(os.environ), log, 2 if "600" in program else 60
        )
    assert last_lines(log) == ("a\nb" if "raise" in program else "begun" if "600" in program else "")

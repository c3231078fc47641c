"""Memory that was used once, and lies between what is still in use, goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.servers import WAIT_S

pytestmark = pytest.mark.process

PEAK = """
import threading, time
import psutil
from conch.process.allocator import keep_large_blocks, trim_when_idle
keep_large_blocks()
resident = psutil.Process().memory_info
if trim_when_idle(0.02) is None:
    raise SystemExit("not glibc")
before = resident().rss
blocks = [bytes(2000) for _ in range(300_000)]
blocks[:] = blocks[::1000]
deadline = time.monotonic() + 20
while resident().rss > before + (300 << 20) and time.monotonic() < deadline:
    threading.Event().wait(0.02)
print(resident().rss - before >> 20)
"""


def test_a_peak_of_small_blocks_goes_back() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    if "not glibc" in run.stderr:
        return
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) <= 300

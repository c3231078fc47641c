"""Other Pythons than the one that runs the tests, where the machine has them on PATH with numpy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

OTHERS = [
    version
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
    if version != f"{sys.version_info[0]}.{sys.version_info[1]}"
]


def prefix_of(version: str) -> Path:
    """The environment of a Python that can run models; skips the test if there is none."""
    python = shutil.which(f"python{version}")
    code = "import sys, numpy; print(sys.prefix)"
    done = subprocess.run([python or "false", "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"there is no python{version} with numpy on PATH")
    return Path(done.stdout.strip())
